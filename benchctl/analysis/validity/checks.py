"""Reconciliation of one run's records with each other and with the profile, drafts and value model included.

Also the share of the requests' time that was in the engine's steps, and unequal prefix caches of two sides: a
server that benchctl starts is fresh, and its cache is an option of the profile; an attached one has the cache of
its owner, filled by whatever was asked before, and what is cached costs nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import Final

import numpy as np

from benchctl.analysis.metrics.chunks import chunks_of, latencies_ns
from benchctl.analysis.metrics.latency import is_completed, known_values, measured, of_load
from benchctl.analysis.metrics.run import DraftCounts, draft_counts, load_window_ns
from benchctl.analysis.metrics.server_counters import (
    COUNTERS,
    measure_growth,
    measure_growth_by_position,
    prefix_hit_frac,
)
from benchctl.analysis.validity.answers import (
    NUM_NAMED,
    Check,
    check_client_tokens,
    check_planned_hits,
    check_prefix_cache,
    check_server_tokens,
    planned_hit_frac,
)
from benchctl.analysis.validity.conversations import check_turns, hits_of_turns
from benchctl.guided.params import parse_params
from benchctl.profile.arrival import Arrival
from benchctl.profile.model import Profile, VariantSettings
from benchctl.records.columns import StepColumns, exact_sum, joined
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RequestRecord, RunRecord, StopMode
from benchctl.records.schema import PrometheusSample, ResultWarning
from benchctl.records.warning_codes import CHECK_FAILED, warnings_of
from benchctl.units import NS_PER_MS, first_of, s_from_ns


def check_draft_counters(samples: Sequence[PrometheusSample], counts: DraftCounts) -> Check:
    """Growth of the server's counters of drafts during the load = sums over the steps, also by position."""
    by_steps = {
        "drafts": (counts.drafts, COUNTERS.drafts),
        "draft tokens": (counts.draft_tokens, COUNTERS.draft_tokens),
        "accepted tokens": (counts.accepted_tokens, COUNTERS.accepted_tokens),
    }
    agrees: dict[str, bool] = {}
    for noun, (count, counters) in by_steps.items():
        grown = measure_growth(samples, counters)
        if grown is not None and count is not None:
            agrees[f"{noun} {count} by steps, {grown.count} by {grown.name}"] = grown.count == count
    positions = measure_growth_by_position(samples, COUNTERS.accepted_by_position)
    if positions and counts.accepted_by_position is not None:
        pairs = zip_longest(positions, counts.accepted_by_position, fillvalue=0)  # unused positions are left out
        text = f"accepted by position {counts.accepted_by_position} by steps, {positions} by counters"
        agrees[text] = all(left == right for left, right in pairs)
    if not agrees:
        return Check("draft-counters", None, "steps or counters do not count drafts")
    wrong = [text for text, does_agree in agrees.items() if not does_agree]
    return Check("draft-counters", not wrong, "; ".join(wrong or agrees), is_fatal=True)


def check_accepted(counts: DraftCounts) -> Check:
    """Accepted tokens <= draft tokens; by position they never increase and add up to all accepted tokens."""
    name, accepted, drafted = "accepted-drafts", counts.accepted_tokens, counts.draft_tokens
    if accepted is None or drafted is None:
        return Check(name, None, "the steps do not count draft tokens")
    details, positions = [f"{accepted} of {drafted} draft tokens accepted"], counts.accepted_by_position
    if accepted > drafted:
        details.append("more than were drafted")
    if positions is not None and counts.drafts is not None:
        details[0] += f", by position {positions} of {counts.drafts} drafts"
        if any(later > earlier for earlier, later in pairwise((counts.drafts, *positions))):
            details.append("a position was accepted more often than the one before it")
        if sum(positions) != accepted:
            details.append(f"the positions add up to {sum(positions)}")
    return Check(name, len(details) == 1, "; ".join(details), is_fatal=True)


def check_speculation(
    samples: Sequence[PrometheusSample], counts: DraftCounts, *, is_speculative: bool | None
) -> Check:
    """A variant with speculative decoding drafted tokens, by its steps or by the server's counters; others none.

    Without drafts the variant measures the plain path under another name. ``is_speculative`` is None where the
    options of the server do not say.
    """
    name, grown = "speculation", measure_growth(samples, COUNTERS.draft_tokens)
    drafted = known_values([counts.draft_tokens, None if grown is None else grown.count])
    if is_speculative is None:
        return Check(name, None, "the options do not say whether the server speculates")
    if not drafted:
        return Check(name, None, "neither steps nor counters count draft tokens")
    declared = "speculation" if is_speculative else "no speculation"
    agrees = (max(drafted) > 0) is is_speculative
    return Check(name, agrees, f"{declared} declared; {max(drafted)} draft tokens", is_fatal=is_speculative)


WALL_TOLERANCE_FRAC: Final = 0.01
WALL_TOLERANCE_NS: Final = 20 * NS_PER_MS
"""Time that sending, receiving and waking up may add on the client's clock."""


def reconcile(
    run: LoadedRun,
    profile: Profile,
    settings: VariantSettings,
    prepared: Sequence[PreparedRequest],
    stop: StopMode,
) -> tuple[Check, ...]:
    """Every check of one run with these settings, in a fixed order.

    Warm-up requests and steps are ignored; those of a load's opening count where two sums over the load are held
    against each other, because their steps are shared with measured requests.
    """
    requests, steps, samples = measured(run.requests), run.columns, run.prometheus
    sent, all_steps = of_load(run), steps_of_load(run)
    completed, drafts = [request for request in requests if is_completed(request)], draft_counts(steps)
    planned, is_allowed = planned_hit_frac(prepared, settings), profile.workload.allow_prefix_cache_hits
    hits = prefix_hit_frac(samples, requests)
    bounds = (planned or 0, planned or 0) if profile.workload.turns is None else hits_of_turns(sent, run.record)
    return (
        _check_requests(run.record, requests, sent, prepared),
        *check_turns(sent, prepared, run.record),
        check_client_tokens(completed),
        *check_server_tokens(all_steps, samples, sent, [request for request in sent if is_completed(request)]),
        check_planned_hits(prepared, bounds, hits, run.record, is_allowed=is_allowed)
        if planned
        else check_prefix_cache(samples, sent, all_steps, is_allowed=is_allowed),
        check_draft_counters(samples, drafts if all_steps is steps else draft_counts(all_steps)),
        check_accepted(drafts),
        check_speculation(samples, drafts, is_speculative=settings.server.speculates),
        _check_step_time(run, steps),
        _check_guided(steps, settings),
        _check_greedy(steps, is_declared=settings.sampling.is_greedy),
        _check_forced_stop(completed, prepared, stop),
        _check_concurrency(run, completed, steps, profile.workload.arrival),
    )


def checks_of_loads(loads: Sequence[tuple[int | None, Sequence[Check]]]) -> tuple[Check, ...]:
    """The checks of a run by those of its loads: one holds where it holds in each; details name the loads."""
    return tuple(
        _check_of_loads([number for number, _ in loads], checks)
        for checks in zip(*(checks for _, checks in loads), strict=True)
    )


def _check_of_loads(numbers: Sequence[int | None], checks: Sequence[Check]) -> Check:
    verdicts = {check.ok for check in checks}
    ok = False if False in verdicts else True if True in verdicts else None
    by_detail: dict[str, list[str]] = defaultdict(list)
    for number, check in zip(numbers, checks, strict=True):
        if check.ok is ok:
            by_detail[check.detail].append(str(number))
    texts = [f"load {', '.join(loads)}: {detail}" for detail, loads in by_detail.items()]
    is_fatal = any(check.is_fatal for check in checks if check.ok is ok)
    return Check(checks[0].name, ok, "; ".join(texts), is_fatal=is_fatal)


def steps_of_load(run: LoadedRun) -> StepColumns:
    """The steps of the load, with those of its opening.

    Where steps have another clock than requests, those of the opening follow the steps whose output the earlier
    requests of the warm-up had.
    """
    opening_ns, warmup = run.record.times.opening_ns, run.warmup_columns
    if opening_ns is None or not len(warmup):
        return run.columns
    is_opening = warmup.start_ns + warmup.dur_ns > opening_ns
    if run.record.is_virtual:
        sent = {id(request) for request in of_load(run)}
        earlier = sum(r.completion_tokens or 0 for r in run.requests if id(r) not in sent)
        output = np.maximum(warmup.arrays.get("output_tokens", np.zeros(len(warmup))), 0)
        is_opening = np.cumsum(output) - output >= earlier
    opening = StepColumns({name: values[is_opening] for name, values in warmup.arrays.items()})
    return joined((opening, run.columns))


def failed_checks(run: LoadedRun, checks: Iterable[Check]) -> tuple[ResultWarning, ...]:
    """A warning for each fatal check of a run that fails; each makes the run suspect."""
    failed = (check for check in checks if check.ok is False and check.is_fatal)
    texts = (f"check {check.name} failed: {check.detail}" for check in failed)
    return tuple(ResultWarning(code=CHECK_FAILED, message=text, where=run.record.run_id) for text in texts)


def _check_requests(
    record: RunRecord,
    requests: Sequence[RequestRecord],
    sent: Sequence[RequestRecord],
    prepared: Sequence[PreparedRequest],
) -> Check:
    """Sent = completed + failed, and every prepared request has exactly one line, measured or discarded."""
    num_completed = sum(map(is_completed, requests))
    num_failed = len(requests) - num_completed
    details = [
        f"{len(requests)} recorded = {num_completed} completed + {num_failed} failed, of {len(prepared)} prepared"
    ]
    if record.num_sent not in {None, len(requests)}:
        details.append(f"run.json says {record.num_sent} were sent")
    counts = Counter(request.request_id for request in sent)
    if twice := sorted(request_id for request_id, count in counts.items() if count > 1):
        details.append(f"recorded more than once: {first_of(twice, NUM_NAMED)}")
    if missing := [request.request_id for request in prepared if request.request_id not in counts]:
        details.append(f"never recorded: {first_of(missing, NUM_NAMED)}")
    return Check("requests", len(details) == 1, "; ".join(details), is_fatal=True)


def _check_step_time(run: LoadedRun, steps: StepColumns) -> Check:
    """Sum of step times <= wall time * time_scale, within 1 % and 20 ms of the client's clock.

    The same limit holds for steps that time the sampler alone.
    """
    name, window = "step-time", load_window_ns(run)
    if not len(steps) or window is None:
        return Check(name, None, "no steps, or no time of first send and last output")
    factor = run.record.clock_factor
    wall_ns = (window[1] - window[0]) * factor
    total_ns = exact_sum(steps.dur_ns)
    limit_ns = wall_ns * (1 + WALL_TOLERANCE_FRAC) + WALL_TOLERANCE_NS * factor
    timed = "steps" if run.record.times_whole_steps else "samplers of the steps"
    detail = f"{timed} {s_from_ns(total_ns):.3f} s, wall {s_from_ns(wall_ns):.3f} s"
    return Check(name, total_ns <= limit_ns, detail)


def skips_guidance(settings: VariantSettings) -> bool:
    """True where the declared guidance changes no probability, and the server skips such guidance."""
    if settings.guidance is None or not settings.server.skips_neutral_guidance:
        return False
    params = parse_params(settings.guidance.model_dump(exclude_none=True))
    return params is not None and params.is_neutral


def _check_guided(steps: StepColumns, settings: VariantSettings) -> Check:
    """A guided variant scored candidates in some step, unless the server skips its guidance; others in none."""
    name, rows = "guided", steps.known_values("guided_rows")
    guided_steps = int((rows > 0).sum())
    observed = f"guided rows in {guided_steps} of {len(steps)} steps"
    if not len(rows):
        return Check(name, None, "the steps do not count guided rows")
    if settings.guidance is None or skips_guidance(settings):
        reason = "no guidance declared" if settings.guidance is None else "neutral guidance is skipped"
        return Check(name, guided_steps == 0, f"{reason}; {observed}", is_fatal=True)
    if settings.sampling.is_greedy:
        reason = "greedy path: with one candidate the value model has nothing to choose"
        return Check(name, None, f"{reason}; {observed}")
    return Check(name, guided_steps > 0, f"guidance declared; {observed}", is_fatal=True)


def _check_greedy(steps: StepColumns, *, is_declared: bool) -> Check:
    """All steps are greedy where that is declared by top_k 1 or temperature 0, none elsewhere."""
    name, says = "greedy-share", steps.known_values("is_greedy")
    if not len(says):
        return Check(name, None, "the steps do not say whether they are greedy")
    declared, greedy = "greedy" if is_declared else "sampling", int(says.sum())
    detail = f"{declared} declared; {greedy} of {len(says)} steps are greedy"
    return Check(name, greedy == (len(says) if is_declared else 0), detail)


def _check_forced_stop(
    completed: Sequence[RequestRecord], prepared: Sequence[PreparedRequest], stop: StopMode
) -> Check:
    """With forced stop each completed request has exactly max_tokens * n output tokens."""
    name = "forced-stop"
    if stop == "natural":
        return Check(name, None, "outputs end naturally")
    max_tokens = {request.request_id: request.max_tokens * request.n for request in prepared}
    counted = [r for r in completed if r.completion_tokens is not None and r.request_id in max_tokens]
    if not counted:
        return Check(name, None, "no completed request has usage")
    wrong = [
        f"{request.request_id} {request.completion_tokens} != {max_tokens[request.request_id]}"
        for request in counted
        if request.completion_tokens != max_tokens[request.request_id]
    ]
    detail = f"{len(counted)} requests have their declared length"
    if wrong:
        detail = f"{len(wrong)} of {len(counted)} requests have a different length: {first_of(wrong, NUM_NAMED)}"
    return Check(name, not wrong, detail, is_fatal=True)


def _check_concurrency(
    run: LoadedRun, completed: Sequence[RequestRecord], steps: StepColumns, arrival: Arrival
) -> Check:
    """Little's law for a closed loop: requests in flight L = rate * latency = sum of latencies / wall time.

    L stays within the declared limit. The mean batch, weighted by step times, is the engine's value of it.
    """
    name, window = "concurrency", load_window_ns(run)
    latencies, limit = latencies_ns(completed)["e2el"], arrival.max_concurrency
    if arrival.kind != "closed-loop" or limit is None or not latencies or window is None or window[0] == window[1]:
        return Check(name, None, "no closed loop, or no latencies")
    in_flight = sum(latencies) / (window[1] - window[0])
    detail = f"{in_flight:.2f} requests in flight on average, limit {limit}"
    if run.record.times_whole_steps and (total_ns := exact_sum(steps.dur_ns)):
        batch = exact_sum(steps.dur_ns, steps.num_seqs) / total_ns
        detail += f"; {batch:.2f} sequences in the engine's batch"
    return Check(name, in_flight <= limit * (1 + WALL_TOLERANCE_FRAC), detail)


def value_model_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """Warnings about the value model of this run's server; none where it has none."""
    config = run.record.effective_config
    reason = config.get("server.value_model.kernels_reason")
    # elsewhere nobody expects kernels
    are_missing = reason is not None and config.get("server.value_model.device") == "cuda"
    missing = f"the value model was computed by torch alone, although kernels were wanted: {reason}"
    return warnings_of(
        {
            "value-passes-recorded-late": _late_recordings(run),
            "value-kernels-missing": missing if are_missing else None,
        }
    )


def _late_recordings(run: LoadedRun) -> str | None:
    steps, recordings = run.columns, run.columns.optional("value_recordings")
    if recordings is None or not (recordings > 0).any():
        return None
    is_late = recordings > 0  # unknown is NaN, which is not
    late_ns, all_ns = exact_sum(steps.dur_ns[is_late]), exact_sum(steps.dur_ns)
    remedy = "raise max_num_seqs, for which passes are recorded, or num_warmups"
    return (
        f"{int(is_late.sum())} of {len(steps)} steps of the load recorded {int(recordings[is_late].sum())} passes "
        f"of the value model, of sizes that no step had before; these steps took {s_from_ns(late_ns):.3g} s, "
        f"{late_ns / max(all_ns, 1):.1%} of the time of all; {remedy}"
    )


def prefix_warnings(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], where: str
) -> tuple[ResultWarning, ...]:
    """A warning where the sides, or the runs of one side, found different shares of their prompts in a cache.

    Only servers that benchctl did not start have a cache that is not one of their options.
    """
    a, b = (
        known_values(
            prefix_hit_frac(load.prometheus, measured(load.requests))
            for run in runs
            if not run.record.argv
            for load in run.loads
        )
        for runs in (a_runs, b_runs)
    )
    # Of all prompt tokens: the difference below which caches count as equally warm
    if not a or not b or max(*a, *b) - min(*a, *b) <= 0.05:
        return ()
    of_a, of_b = (" to ".join(dict.fromkeys((f"{min(s):.0%}", f"{max(s):.0%}"))) for s in (a, b))
    message = (
        f"prompt tokens found in the servers' prefix caches: {of_a} on side A, {of_b} on side B; what is cached is "
        "not computed, so the difference is partly that of the caches"
    )
    return (ResultWarning(code="prefix-hits-differ", message=message, where=where),)


MIN_IN_STEP_FRAC: Final = 0.7
"""Share below which a run gets the warning. Overhead between steps and on the path to the client is less: it took
6 % with small models on two cores without any waiting."""


def in_step_frac(run: LoadedRun) -> float | None:
    """Time that sequences spent in steps, divided by the time that they were in flight for the client.

    The former is the sum of num_seqs * dur over the steps of the load, the latter that of e2el * choices over its
    completed requests, in sequences times seconds as in Little's law. None without steps or their whole durations,
    on a virtual clock, or if a request failed, whose share of the steps is unknown.
    """
    if not run.record.times_whole_steps:
        return None
    requests, steps = of_load(run), steps_of_load(run)
    if run.record.is_virtual or not all(map(is_completed, requests)):
        return None
    in_flight_ns = sum(
        (answer.e2el_ns or 0) * len(request.choices)
        for request, answer in zip(requests, chunks_of(requests).answers, strict=True)
    )
    return exact_sum(steps.dur_ns, steps.num_seqs) / in_flight_ns if in_flight_ns and len(steps) else None


def underfilled_batch_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning if requests spent much of their time outside the engine's steps."""
    share = in_step_frac(run)
    if share is None or share >= MIN_IN_STEP_FRAC:
        return ()
    message = (
        f"requests spent less than {MIN_IN_STEP_FRAC:.0%} of their time in steps of the engine and waited "
        "elsewhere: in its queue, in a front end without processor time, or in the client. The batch was smaller "
        "than the load, and step times are those of the smaller batch; lower the load below max_num_seqs, or free "
        "processors for the server's front end"
    )
    return (ResultWarning(code="underfilled-batch", message=message),)
