"""Do the records of one run agree with one another and with what the profile declared?

Each check compares two independent accounts of the same thing: steps, usage, the client's own counts, the
request set, the profile. ``ok`` is None where an account is missing or the check does not apply.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.analysis.metrics import clock_factor, load_window_ns
from benchctl.analysis.request_timing import e2el_ns, is_completed, measured
from benchctl.errors import ProfileError, RecordError
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.plan import variant_settings
from benchctl.records.directory import LoadedResults, LoadedRun
from benchctl.records.run import PreparedRequest, PrometheusSample, RequestRecord, RunRecord, StepRecord
from benchctl.units import NS_PER_MS, s_from_ns

GENERATED_TOKENS: Final = "vllm:generation_tokens_total"
"""The counter of output tokens, as vLLM names it."""
WALL_TOLERANCE_FRAC: Final = 0.01
WALL_TOLERANCE_NS: Final = 20 * NS_PER_MS
"""What sending, receiving and waking up may add on the client's clock."""


@dataclass(frozen=True, slots=True)
class Check:
    """One reconciliation. A fatal one that fails makes the measurement invalid; the others cast doubt on it."""

    name: str
    ok: bool | None
    detail: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the profile and the request set declare of one run."""

    stop: Literal["forced", "natural"]
    prepared: tuple[PreparedRequest, ...]
    is_guided: bool
    is_greedy: bool
    max_concurrency: int | None
    """Limit of a closed loop; None for every other arrival."""


def profile_of(results: LoadedResults) -> Profile:
    """The profile of an experiment. Raises RecordError when ``profile.yaml`` was damaged since it was written."""
    path = results.path / "profile.yaml"
    try:
        return parse_profile(results.profile_yaml, str(path))
    except ProfileError as error:
        raise RecordError(f"{path} cannot be read as the profile of these results; restore it:\n{error}") from error


def expectation_of(profile: Profile, results: LoadedResults, record: RunRecord) -> Expectation:
    """What one run should show. Greedy is declared by top_k 1 or temperature 0."""
    settings = variant_settings(profile, record.variant, record.cell)
    arrival = profile.workload.arrival
    return Expectation(
        stop=results.manifest.stop,
        prepared=results.requests,
        is_guided=settings.guidance is not None,
        is_greedy=settings.sampling.top_k == 1 or settings.sampling.temperature == 0,
        max_concurrency=arrival.max_concurrency if arrival.kind == "closed-loop" else None,
    )


def reconcile(run: LoadedRun, expectation: Expectation) -> tuple[Check, ...]:
    """Every check of one run, in a fixed order. Warm-up requests and steps take no part."""
    requests = measured(run.requests)
    completed = [request for request in requests if is_completed(request)]
    steps = [step for step in run.steps if not step.is_warmup]
    return (
        _check_requests(run.record, requests, expectation.prepared),
        _check_client_tokens(completed),
        _check_step_tokens(steps, requests, completed),
        _check_counters(run.prometheus, requests, completed),
        _check_step_time(run, steps),
        _check_guided(steps, expectation),
        _check_greedy(steps, expectation),
        _check_forced_stop(completed, expectation),
        _check_concurrency(run, completed, steps, expectation),
    )


def _check_requests(
    record: RunRecord, requests: Sequence[RequestRecord], prepared: Sequence[PreparedRequest]
) -> Check:
    """Sent = completed + failed, and every prepared request has exactly one line."""
    num_completed = sum(is_completed(request) for request in requests)
    num_failed = len(requests) - num_completed
    faults = []
    if record.num_sent is not None and record.num_sent != num_completed + num_failed:
        faults.append(f"run.json says {record.num_sent} were sent")
    counts = Counter(request.request_id for request in requests)
    if twice := sorted(request_id for request_id, count in counts.items() if count > 1):
        faults.append(f"recorded more than once: {_some(twice)}")
    if missing := [request.request_id for request in prepared if request.request_id not in counts]:
        faults.append(f"never recorded: {_some(missing)}")
    detail = (
        f"{len(requests)} recorded = {num_completed} completed + {num_failed} failed, of {len(prepared)} prepared"
    )
    return Check("requests", not faults, "; ".join([detail, *faults]), is_fatal=True)


def _check_client_tokens(completed: Sequence[RequestRecord]) -> Check:
    """Tokens of usage = tokens that the client saw arrive, request by request."""
    name, wrong, compared = "client-tokens", [], 0
    for request in completed:
        seen = [
            sum(choice.chunk_tokens) if choice.chunk_tokens is not None else choice.output_tokens
            for choice in request.choices
        ]
        known = [tokens for tokens in seen if tokens is not None]
        if request.completion_tokens is None or not known or len(known) < len(seen):
            continue
        compared += 1
        if sum(known) != request.completion_tokens:
            wrong.append(f"{request.request_id} {sum(known)} != {request.completion_tokens}")
    if not compared:
        return Check(name, None, "no request has both usage and tokens counted by the client")
    if wrong:
        return Check(
            name,
            False,
            f"client and usage differ in {len(wrong)} of {compared} requests: {_some(wrong)}",
            is_fatal=True,
        )
    return Check(name, True, f"client and usage agree in {compared} requests", is_fatal=True)


def _check_step_tokens(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord], completed: Sequence[RequestRecord]
) -> Check:
    """Sum of output tokens of steps = sum of usage."""
    name = "step-tokens"
    by_step = [step.output_tokens for step in steps if step.output_tokens is not None]
    by_usage = [request.completion_tokens for request in completed if request.completion_tokens is not None]
    if not by_step or len(by_step) < len(steps) or not by_usage or len(by_usage) < len(completed):
        return Check(name, None, "steps or usage do not count tokens")
    detail = f"steps {sum(by_step)}, usage {sum(by_usage)}"
    if len(completed) < len(requests):
        return Check(name, None, f"{detail}; failed requests took tokens that no usage counts")
    return Check(name, sum(by_step) == sum(by_usage), detail, is_fatal=True)


def _check_counters(
    samples: Sequence[PrometheusSample], requests: Sequence[RequestRecord], completed: Sequence[RequestRecord]
) -> Check:
    """What the server's token counter grew by during the load = sum of usage."""
    name = "counters"
    totals = [total for sample in samples if (total := _counted_tokens(sample)) is not None]
    by_usage = [request.completion_tokens for request in completed if request.completion_tokens is not None]
    if len(totals) < 2 or not by_usage or len(by_usage) < len(completed):
        return Check(name, None, f"no two readings of {GENERATED_TOKENS}, or no usage")
    counted = round(totals[-1] - totals[0])
    detail = f"{GENERATED_TOKENS} grew by {counted}, usage {sum(by_usage)}"
    if len(completed) < len(requests):
        return Check(name, None, f"{detail}; failed requests took tokens that no usage counts")
    return Check(name, counted == sum(by_usage), detail, is_fatal=True)


def _counted_tokens(sample: PrometheusSample) -> float | None:
    """The counter summed over its series, one for each model and engine."""
    series = [value for name, value in sample.values.items() if name.partition("{")[0] == GENERATED_TOKENS]
    return sum(series) if series else None


def _check_step_time(run: LoadedRun, steps: Sequence[StepRecord]) -> Check:
    """Sum of step times <= wall time * time_scale, within 1 % and 20 ms of the client's clock."""
    name, window = "step-time", load_window_ns(run)
    if not steps or window is None:
        return Check(name, None, "no steps, or no time of first send and last output")
    factor = clock_factor(run.record)
    wall_ns = (window[1] - window[0]) * factor
    total_ns = sum(step.dur_ns for step in steps)
    limit_ns = wall_ns * (1 + WALL_TOLERANCE_FRAC) + WALL_TOLERANCE_NS * factor
    detail = f"steps {s_from_ns(total_ns):.3f} s, wall {s_from_ns(wall_ns):.3f} s"
    return Check(name, total_ns <= limit_ns, detail)


def _check_guided(steps: Sequence[StepRecord], expectation: Expectation) -> Check:
    """A guided variant scored candidates in some step; any other in none."""
    name = "guided"
    rows = [step.guided_rows for step in steps if step.guided_rows is not None]
    guided_steps = sum(count > 0 for count in rows)
    seen = f"guided rows in {guided_steps} of {len(steps)} steps"
    if not rows:
        return Check(name, None, "the steps do not count guided rows")
    if not expectation.is_guided:
        return Check(name, guided_steps == 0, f"no guidance declared; {seen}", is_fatal=True)
    if expectation.is_greedy:
        return Check(name, None, f"greedy path: with one candidate the value model has nothing to choose; {seen}")
    return Check(name, guided_steps > 0, f"guidance declared; {seen}", is_fatal=True)


def _check_greedy(steps: Sequence[StepRecord], expectation: Expectation) -> Check:
    """All steps are greedy where that is declared, none elsewhere."""
    name = "greedy-share"
    says = [step.is_greedy for step in steps if step.is_greedy is not None]
    if not says:
        return Check(name, None, "the steps do not say whether they are greedy")
    declared = "greedy" if expectation.is_greedy else "sampling"
    expected = len(says) if expectation.is_greedy else 0
    return Check(name, sum(says) == expected, f"{declared} declared; {sum(says)} of {len(says)} steps are greedy")


def _check_forced_stop(completed: Sequence[RequestRecord], expectation: Expectation) -> Check:
    """With forced stop each completed request has exactly max_tokens * n output tokens."""
    name = "forced-stop"
    if expectation.stop != "forced":
        return Check(name, None, "outputs end naturally")
    wanted = {request.request_id: request.max_tokens * request.n for request in expectation.prepared}
    known = [r for r in completed if r.completion_tokens is not None and r.request_id in wanted]
    if not known:
        return Check(name, None, "no completed request has usage")
    wrong = [
        f"{request.request_id} {request.completion_tokens} != {wanted[request.request_id]}"
        for request in known
        if request.completion_tokens != wanted[request.request_id]
    ]
    if wrong:
        detail = f"{len(wrong)} of {len(known)} requests have another length: {_some(wrong)}"
        return Check(name, False, detail, is_fatal=True)
    return Check(name, True, f"{len(known)} requests have their declared length", is_fatal=True)


def _check_concurrency(
    run: LoadedRun,
    completed: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    expectation: Expectation,
) -> Check:
    """Little's law for a closed loop: requests in flight L = rate * latency = sum of latencies / wall time.

    L stays within the declared limit. The mean batch, weighted with step times, is the engine's account of it.
    """
    name, window = "concurrency", load_window_ns(run)
    latencies = [latency for request in completed if (latency := e2el_ns(request)) is not None]
    if expectation.max_concurrency is None or not latencies or window is None or window[0] == window[1]:
        return Check(name, None, "no closed loop, or no latencies")
    in_flight = sum(latencies) / (window[1] - window[0])
    detail = f"{in_flight:.2f} requests in flight on average, limit {expectation.max_concurrency}"
    if total_ns := sum(step.dur_ns for step in steps):
        batch = sum(step.num_seqs * step.dur_ns for step in steps) / total_ns
        detail += f"; {batch:.2f} sequences in the engine's batch"
    return Check(name, in_flight <= expectation.max_concurrency * (1 + WALL_TOLERANCE_FRAC), detail)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
