"""Reconciliation of one run's records with each other and with the profile.

Each check compares two independent records of the same thing: steps, usage, the client's own counts, the request
set, the profile. ``ok`` is None if a record is missing or the check does not apply.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.request_timing import e2el_ns, is_completed, measured
from benchctl.analysis.metrics.run_metrics import load_window_ns
from benchctl.analysis.metrics.speculation import draft_counts
from benchctl.analysis.validity.draft_checks import check_accepted, check_draft_counters, check_speculation
from benchctl.analysis.validity.token_checks import (
    Check,
    abbreviate_names,
    check_client_tokens,
    check_counters,
    check_prefix_cache,
    check_step_tokens,
)
from benchctl.guided.params import is_noop, parse_params
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning.plan import variant_settings
from benchctl.records.columns.step_columns import StepColumns, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.manifest import StopMode
from benchctl.records.record import ResultWarning
from benchctl.records.request import PreparedRequest, RequestRecord
from benchctl.records.run import RunRecord
from benchctl.records.warning_codes import CHECK_FAILED
from benchctl.units import NS_PER_MS, s_from_ns

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
