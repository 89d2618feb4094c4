"""Reconciliation of one run's records with each other and with the profile, drafts and value model included.

Also unequal prefix caches of two sides: a server that benchctl starts is fresh, and its cache is an option of the
profile; an attached one has the cache of its owner, filled by whatever was asked before, and what is cached costs
nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from benchctl.analysis.metrics.latency import e2el_ns, is_completed, known_values, measured, total
from benchctl.analysis.metrics.run import load_window_ns
from benchctl.analysis.metrics.server_counters import (
    ACCEPTED_BY_POSITION,
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    DRAFTS,
    PREFIX_HITS,
    measure_growth,
    measure_growth_by_position,
)
from benchctl.analysis.metrics.speculation import DraftCounts, draft_counts
from benchctl.analysis.validity.answers import (
    Check,
    abbreviate_names,
    check_client_tokens,
    check_counters,
    check_prefix_cache,
    check_step_tokens,
)
from benchctl.guided.params import is_noop, parse_params
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import StepColumns, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RequestRecord, RunRecord, StopMode
from benchctl.records.schema import PrometheusSample, ResultWarning
from benchctl.records.warning_codes import CHECK_FAILED
from benchctl.units import NS_PER_MS, s_from_ns

_COUNTERS: Final = {"drafts": DRAFTS, "draft tokens": DRAFT_TOKENS, "accepted tokens": ACCEPTED_TOKENS}


def check_draft_counters(samples: Sequence[PrometheusSample], counts: DraftCounts) -> Check:
    """Growth of the server's counters of drafts during the load = sums over the steps, also by position."""
    name = "draft-counters"
    by_steps = dict(zip(_COUNTERS, (counts.drafts, counts.draft_tokens, counts.accepted_tokens), strict=True))
    agreed: list[str] = []
    wrong: list[str] = []
    for noun, counters in _COUNTERS.items():
        grown, of_steps = measure_growth(samples, counters), by_steps[noun]
        if grown is None or of_steps is None:
            continue
        text = f"{noun} {of_steps} by steps, {grown.count} by {grown.name}"
        (agreed if grown.count == of_steps else wrong).append(text)
    positions = measure_growth_by_position(samples, ACCEPTED_BY_POSITION)
    if positions and counts.accepted_by_position is not None:
        text = f"accepted by position {counts.accepted_by_position} by steps, {positions} by counters"
        pairs = zip_longest(positions, counts.accepted_by_position, fillvalue=0)  # unused positions are left out
        (agreed if all(left == right for left, right in pairs) else wrong).append(text)
    if not agreed and not wrong:
        return Check(name, None, "steps or counters do not count drafts")
    return Check(name, not wrong, "; ".join(wrong or agreed), is_fatal=True)


def check_accepted(counts: DraftCounts) -> Check:
    """Accepted tokens <= draft tokens; by position they never increase and add up to all accepted tokens."""
    name, accepted, drafted = "accepted-drafts", counts.accepted_tokens, counts.draft_tokens
    if accepted is None or drafted is None:
        return Check(name, None, "the steps do not count draft tokens")
    problems = [] if accepted <= drafted else ["more than were drafted"]
    detail = f"{accepted} of {drafted} draft tokens accepted"
    positions = counts.accepted_by_position
    if positions is not None and counts.drafts is not None:
        detail += f", by position {positions} of {counts.drafts} drafts"
        if any(later > earlier for earlier, later in zip((counts.drafts, *positions), positions, strict=False)):
            problems.append("a position was accepted more often than the one before it")
        if sum(positions) != accepted:
            problems.append(f"the positions add up to {sum(positions)}")
    return Check(name, not problems, "; ".join([detail, *problems]), is_fatal=True)


def check_speculation(
    samples: Sequence[PrometheusSample], counts: DraftCounts, *, is_speculative: bool | None
) -> Check:
    """A variant with speculative decoding drafted tokens, by its steps or by the server's counters; others none.

    Without drafts the variant measures the plain path under another name. ``is_speculative`` is None where the
    options of the server do not say.
    """
    name, grown = "speculation", measure_growth(samples, DRAFT_TOKENS)
    drafted = known_values([counts.draft_tokens, None if grown is None else grown.count])
    if is_speculative is None or not drafted:
        unknown = "the options do not say whether the server speculates"
        reason = unknown if is_speculative is None else "neither steps nor counters count draft tokens"
        return Check(name, None, reason)
    observed = f"{max(drafted)} draft tokens"
    if is_speculative:
        return Check(name, max(drafted) > 0, f"speculation declared; {observed}", is_fatal=True)
    return Check(name, max(drafted) == 0, f"no speculation declared; {observed}")


__all__ = ["Check", "Expectation", "expected", "expected_of", "failed_checks", "reconcile"]

WALL_TOLERANCE_FRAC: Final = 0.01
WALL_TOLERANCE_NS: Final = 20 * NS_PER_MS
"""Time that sending, receiving and waking up may add on the client's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The declarations of the profile and the request set for one run."""

    stop: StopMode
    prepared: tuple[PreparedRequest, ...]
    is_guided: bool
    is_greedy: bool
    is_skipped: bool = False
    """The declared guidance changes no probability, and the server skips such guidance."""
    max_concurrency: int | None
    """Limit of a closed loop; None for any other arrival."""
    is_cached: bool = False
    """Prompts may be found in a prefix cache."""
    is_speculative: bool | None = None
    """The server drafts tokens; None where its options do not say."""


def expected(profile: Profile, prepared: Sequence[PreparedRequest], record: RunRecord) -> Expectation:
    """The expectation for one run of a profile."""
    settings = variant_settings(profile, record.variant, record.cell)
    return expected_of(profile, settings, prepared, profile.stop)


def expected_of(
    profile: Profile, settings: VariantSettings, prepared: Sequence[PreparedRequest], stop: StopMode
) -> Expectation:
    """The expectation for a run with these settings. Greedy means top_k 1 or temperature 0."""
    arrival, params = profile.workload.arrival, None
    if settings.guidance is not None and settings.server.skips_neutral_guidance:
        params = parse_params(settings.guidance.model_dump(exclude_none=True))
    return Expectation(
        stop=stop,
        prepared=tuple(prepared),
        is_guided=settings.guidance is not None,
        is_greedy=settings.sampling.is_greedy,
        is_skipped=params is not None and is_noop(params),
        max_concurrency=arrival.max_concurrency if arrival.kind == "closed-loop" else None,
        is_cached=profile.workload.allow_prefix_cache_hits,
        is_speculative=settings.server.speculates,
    )


def reconcile(run: LoadedRun, expectation: Expectation) -> tuple[Check, ...]:
    """Every check of one run, in a fixed order. Warm-up requests and steps are ignored."""
    requests = measured(run.requests)
    completed = [request for request in requests if is_completed(request)]
    steps = run.columns
    drafts = draft_counts(steps)
    return (
        _check_requests(run.record, requests, expectation.prepared),
        check_client_tokens(completed),
        check_step_tokens(steps, requests, completed),
        check_counters(run.prometheus, requests, completed),
        check_prefix_cache(run.prometheus, requests, steps, is_allowed=expectation.is_cached),
        check_draft_counters(run.prometheus, drafts),
        check_accepted(drafts),
        check_speculation(run.prometheus, drafts, is_speculative=expectation.is_speculative),
        _check_step_time(run, steps),
        _check_guided(steps, expectation),
        _check_greedy(steps, expectation),
        _check_forced_stop(completed, expectation),
        _check_concurrency(run, completed, steps, expectation),
    )


def failed_checks(run: LoadedRun, checks: Iterable[Check]) -> tuple[ResultWarning, ...]:
    """A warning for each fatal check of a run that fails; each makes the run suspect."""
    messages = [
        f"check {check.name} failed: {check.detail}" for check in checks if check.ok is False and check.is_fatal
    ]
    return tuple(ResultWarning(code=CHECK_FAILED, message=text, where=run.record.run_id) for text in messages)


def _check_requests(
    record: RunRecord, requests: Sequence[RequestRecord], prepared: Sequence[PreparedRequest]
) -> Check:
    """Sent = completed + failed, and every prepared request has exactly one line."""
    num_completed = sum(is_completed(request) for request in requests)
    num_failed = len(requests) - num_completed
    problems = []
    if record.num_sent is not None and record.num_sent != num_completed + num_failed:
        problems.append(f"run.json says {record.num_sent} were sent")
    counts = Counter(request.request_id for request in requests)
    if twice := sorted(request_id for request_id, count in counts.items() if count > 1):
        problems.append(f"recorded more than once: {abbreviate_names(twice)}")
    if missing := [request.request_id for request in prepared if request.request_id not in counts]:
        problems.append(f"never recorded: {abbreviate_names(missing)}")
    detail = (
        f"{len(requests)} recorded = {num_completed} completed + {num_failed} failed, of {len(prepared)} prepared"
    )
    return Check("requests", not problems, "; ".join([detail, *problems]), is_fatal=True)


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


def _check_guided(steps: StepColumns, expectation: Expectation) -> Check:
    """A guided variant scored candidates in some step, unless the server skips its guidance; others in none."""
    name, rows = "guided", steps.known_values("guided_rows")
    guided_steps = int((rows > 0).sum())
    observed = f"guided rows in {guided_steps} of {len(steps)} steps"
    if not len(rows):
        return Check(name, None, "the steps do not count guided rows")
    if not expectation.is_guided or expectation.is_skipped:
        reason = "neutral guidance is skipped" if expectation.is_guided else "no guidance declared"
        return Check(name, guided_steps == 0, f"{reason}; {observed}", is_fatal=True)
    if expectation.is_greedy:
        reason = "greedy path: with one candidate the value model has nothing to choose"
        return Check(name, None, f"{reason}; {observed}")
    return Check(name, guided_steps > 0, f"guidance declared; {observed}", is_fatal=True)


def _check_greedy(steps: StepColumns, expectation: Expectation) -> Check:
    """All steps are greedy where that is declared, none elsewhere."""
    name, says = "greedy-share", steps.known_values("is_greedy")
    if not len(says):
        return Check(name, None, "the steps do not say whether they are greedy")
    declared = "greedy" if expectation.is_greedy else "sampling"
    expected = len(says) if expectation.is_greedy else 0
    greedy = int(says.sum())
    return Check(name, greedy == expected, f"{declared} declared; {greedy} of {len(says)} steps are greedy")


def _check_forced_stop(completed: Sequence[RequestRecord], expectation: Expectation) -> Check:
    """With forced stop each completed request has exactly max_tokens * n output tokens."""
    name = "forced-stop"
    if expectation.stop == "natural":
        return Check(name, None, "outputs end naturally")
    max_tokens = {request.request_id: request.max_tokens * request.n for request in expectation.prepared}
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
        detail = f"{len(wrong)} of {len(counted)} requests have a different length: {abbreviate_names(wrong)}"
    return Check(name, not wrong, detail, is_fatal=True)


def _check_concurrency(
    run: LoadedRun, completed: Sequence[RequestRecord], steps: StepColumns, expectation: Expectation
) -> Check:
    """Little's law for a closed loop: requests in flight L = rate * latency = sum of latencies / wall time.

    L stays within the declared limit. The mean batch, weighted by step times, is the engine's value of it.
    """
    name, window = "concurrency", load_window_ns(run)
    latencies = [latency for request in completed if (latency := e2el_ns(request)) is not None]
    if expectation.max_concurrency is None or not latencies or window is None or window[0] == window[1]:
        return Check(name, None, "no closed loop, or no latencies")
    in_flight = sum(latencies) / (window[1] - window[0])
    detail = f"{in_flight:.2f} requests in flight on average, limit {expectation.max_concurrency}"
    if run.record.times_whole_steps and (total_ns := exact_sum(steps.dur_ns)):
        batch = exact_sum(steps.dur_ns, steps.num_seqs) / total_ns
        detail += f"; {batch:.2f} sequences in the engine's batch"
    return Check(name, in_flight <= expectation.max_concurrency * (1 + WALL_TOLERANCE_FRAC), detail)


_CONFIG: Final = "server.value_model."


def value_model_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """Warnings about the value model of this run's server; none where it has none."""
    return (*_late_recordings(run), *_missing_kernels(run))


def _late_recordings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    steps = run.columns
    recordings = steps.optional("value_recordings")
    if recordings is None:
        return ()
    is_late = recordings > 0  # unknown is NaN, which is not
    late_ns, all_ns = exact_sum(steps.dur_ns[is_late]), exact_sum(steps.dur_ns)
    if not is_late.any():
        return ()
    if run.record.effective_config.get("server.value_recording") is False:
        remedy = "set value_recording to true"
    else:
        remedy = "raise max_num_seqs, for which passes are recorded, or num_warmups"
    message = (
        f"{int(is_late.sum())} of {len(steps)} steps of the load recorded {int(recordings[is_late].sum())} passes "
        f"of the value model, of sizes that no step had before; these steps took {s_from_ns(late_ns):.3g} s, "
        f"{late_ns / max(all_ns, 1):.1%} of the time of all; {remedy}"
    )
    return (ResultWarning(code="value-passes-recorded-late", message=message, where=run.record.run_id),)


def _missing_kernels(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A note for a GPU on which kernels cannot run or compute other values; elsewhere nobody expects them."""
    config = run.record.effective_config
    reason = config.get(f"{_CONFIG}kernels_reason")
    if reason is None or config.get(f"{_CONFIG}device") != "cuda":
        return ()
    message = f"the value model was computed by torch alone, although kernels were wanted: {reason}"
    return (ResultWarning(code="value-kernels-missing", message=message, where=run.record.run_id),)


TOLERATED_SHARE: Final = 0.05
"""Of all prompt tokens: the difference below which caches count as equally warm."""


def prefix_warnings(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], where: str
) -> Iterable[ResultWarning]:
    """A warning where the sides, or the runs of one side, found different shares of their prompts in a cache."""
    a_shares, b_shares = (_shares(runs) for runs in (a_runs, b_runs))
    if not a_shares or not b_shares:
        return
    lowest, highest = min(*a_shares, *b_shares), max(*a_shares, *b_shares)
    if highest - lowest <= TOLERATED_SHARE:
        return
    message = (
        f"prompt tokens found in the servers' prefix caches: {_percent(a_shares)} on side A, {_percent(b_shares)} "
        "on side B; what is cached is not computed, so the difference is partly that of the caches"
    )
    yield ResultWarning(code="prefix-hits-differ", message=message, where=where)


def hit_share(run: LoadedRun) -> float | None:
    """Share of the prompt tokens of a load that came from a cache, by the server's counters or else by usage."""
    requests = measured(run.requests)
    prompt = total([request.prompt_tokens for request in requests])
    grown = measure_growth(run.prometheus, PREFIX_HITS)
    hits = total([request.cached_tokens for request in requests]) if grown is None else grown.count
    return None if not prompt or hits is None else min(1.0, hits / prompt)


def _shares(runs: Iterable[LoadedRun]) -> list[float]:
    """Of servers that benchctl did not start."""
    shares = (hit_share(run) for run in runs if not run.record.argv)
    return [share for share in shares if share is not None]


def _percent(shares: Sequence[float]) -> str:
    lowest, highest = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return lowest if lowest == highest else f"{lowest} to {highest}"
