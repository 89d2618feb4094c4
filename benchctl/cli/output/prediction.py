"""An experiment before its first run: durations, batch, saturation, and the origin of the step times."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchctl.cli.output.outcome import warn
from benchctl.formats import count_of, duration, four_digits, percentage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from benchctl.profile.model import Profile
    from benchctl.records.request import PreparedRequest
    from benchctl.sim.prediction.plan_prediction import PlanPrediction
    from benchctl.sim.prediction.prediction import PredictedRun

_WORDS_FROM_S: Final = 100
_TIMES_FROM: Final = 10
_CROWDED_FRAC: Final = 0.95
_WAITING_FROM: Final = 1.05
"""Requests for each row of the batch from which some wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Seconds of one run of each arm by its label, as far as they are known, and what they rest on.

    ``has_starts`` is False where they are those of the load alone, because no server was started here before.
    """

    run_s: "Mapping[str, float]"
    around_s: float
    basis: str
    has_starts: bool = True
    prediction: "PlanPrediction | None" = None


def estimate_plan(
    profile: "Profile",
    requests: "Sequence[PreparedRequest]",
    model: "Path | None" = None,
    *,
    visible: str | None = None,
) -> PlanEstimate:
    """Durations by the step-time model that is named, else from earlier runs here, else by the roofline.

    ``visible`` names the devices of the servers, where CUDA_VISIBLE_DEVICES is another one for them. Raises
    UsageError for a step-time model that is damaged or of another hardware.
    """
    from benchctl.measure.durations import AROUND_S, earlier_overhead_s, estimate_durations
    from benchctl.measure.telemetry.gpu import gpu_inventory
    from benchctl.sim.prediction.plan_prediction import predict_plan

    gpus = [gpu.name for gpu in gpu_inventory(visible)]
    predicted = predict_plan(profile, requests, gpus, model)
    prediction = None if isinstance(predicted, str) else predicted
    is_named = model is not None or profile.step_time_model is not None
    earlier = None if is_named or profile.engine.kind == "sim" else estimate_durations(profile, requests, gpus)
    if earlier is not None:
        basis = f"from {count_of(earlier.num_runs, 'earlier run')} on this machine"
        return PlanEstimate(run_s=earlier.run_s, around_s=earlier.around_s, basis=basis, prediction=prediction)
    if isinstance(predicted, str):
        return PlanEstimate(run_s={}, around_s=0.0, basis=predicted)
    overhead_s = predicted.overhead_s
    if overhead_s is None:
        overhead_s = earlier_overhead_s(profile, gpus)
    run_s = {label: run.load_s + (overhead_s or 0.0) for label, run in predicted.runs.items()}
    return PlanEstimate(
        run_s=run_s,
        around_s=0.0 if profile.engine.kind == "sim" else AROUND_S,
        basis=predicted.basis,
        has_starts=overhead_s is not None,
        prediction=prediction,
    )


def duration_text(profile: "Profile", estimate: PlanEstimate) -> str:
    """``estimated duration 240 s (4 min)``, with what it leaves out; or that it is unknown."""
    from benchctl.profile.planning.plan import plan_runs
    from benchctl.records.directory import arm_label

    if not estimate.run_s:
        return (
            f"duration unknown: no earlier run of {profile.engine.kind} with {profile.model} on this machine; the "
            "first block will show it"
        )
    runs = plan_runs(profile).runs
    total_s = sum(estimate.run_s[arm_label(run.variant, run.cell)] for run in runs) + estimate.around_s
    at_most = " at most" if profile.stopping is not None else ""
    in_words = f" ({duration(total_s)})" if total_s >= _WORDS_FROM_S else ""
    what = "duration" if estimate.has_starts else "duration of the loads"
    rest = "" if estimate.has_starts else f"; {count_of(len(runs), 'server start')} come on top, unmeasured here"
    earlier = f", {estimate.basis}" if estimate.prediction is None or estimate.basis.startswith("from ") else ""
    return f"estimated {what} {total_s:.0f} s{in_words}{at_most}{earlier}{rest}"


def print_prediction(estimate: PlanEstimate) -> None:
    """Print the origin of the step times, and the load that they predict."""
    if estimate.prediction is None:
        if not estimate.run_s:
            print(estimate.basis)
        return
    print(estimate.prediction.basis)
    for line in load_lines(estimate.prediction.runs):
        print(line)
    for warning in estimate.prediction.warnings:
        warn(warning.message)


def load_lines(runs: "Mapping[str, PredictedRun]") -> "Iterator[str]":
    """One line for each load that arms share, with the arms that it holds for."""
    labels: dict[str, list[str]] = {}
    for label, run in runs.items():
        labels.setdefault(load_text(run), []).append(label)
    for text, arms in labels.items():
        yield f"{', '.join(arms)}: {text}" if len(labels) > 1 else f"load: {text}"


def load_text(run: "PredictedRun") -> str:
    """The batch, its latencies and its memory; at a rate, how much of the server's capacity is offered."""
    parts = [
        f"{four_digits(run.batch)} rows in a batch on average, {run.largest_batch} at most",
        f"step {four_digits(run.step_s * 1e3)} ms",
        f"first token after {four_digits(run.ttft_s * 1e3)} ms",
    ]
    if run.in_server > _WAITING_FROM * run.batch:
        parts.insert(1, f"{four_digits(run.in_server)} sequences in the server, so that some wait for a row")
    if run.kv_frac is not None:
        crowded = ": it is full" if run.kv_frac > _CROWDED_FRAC else ""
        parts.append(f"key-value memory {percentage(run.kv_frac, 2)} used at most{crowded}")
    if run.num_preempted:
        parts.append(f"{count_of(run.num_preempted, 'preemption')}")
    if run.offered is not None and run.offered_rate is not None:
        parts.insert(0, _saturation_text(run))
    return "; ".join(parts)


def _saturation_text(run: "PredictedRun") -> str:
    offered, rate = run.offered, run.offered_rate
    if offered is None or rate is None:
        return ""
    part = offered.utilisation
    times = f"{percentage(part)} of" if part < _TIMES_FROM else f"{part:.0f} times"
    most = f"the {four_digits(offered.max_requests_per_s)} that the server completes at most"
    share = f"{four_digits(rate)} requests/s offered, {times} {most}"
    if offered.is_saturated:
        return f"saturated: {share}, so the queue grows while the load lasts"
    return f"{share}, {four_digits(offered.concurrency)} in the server on average"
