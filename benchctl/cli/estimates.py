"""Numbers that are computed and not measured: durations and loads of a plan, intervals of predictions, and the
metrics of a simulated trace.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.cli.screen import tell, uncollected, warn, wide_console
from benchctl.formats import count_of, duration, four_digits, percentage, short_number
from benchctl.measure.capacity.prediction import ArmPrediction, Predicted
from benchctl.measure.durations import AROUND_S, earlier_overhead_s, estimate_durations
from benchctl.measure.recorded_run import simulate_recorded
from benchctl.measure.result_directory import renamed_when_complete
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.load import dump_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.files import write_bytes_atomic, write_json_atomic
from benchctl.records.record import PreparedRequest
from benchctl.report.table import Column, Table
from benchctl.sim.prediction.plan_prediction import PlanPrediction, predict_plan
from benchctl.sim.prediction.prediction import PredictedRun
from benchctl.sim.settings import costs_in_words
from benchctl.sim.speculation.fitted_drafts import profile_draft_warnings
from benchctl.steptime.queueing import PredictedLoad
from benchctl.workload.recorded import recorded_load

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

    run_s: Mapping[str, float]
    around_s: float
    basis: str
    has_starts: bool = True
    prediction: PlanPrediction | None = None


def estimate_plan(
    profile: Profile,
    requests: Sequence[PreparedRequest],
    model: Path | None = None,
    *,
    visible: str | None = None,
) -> PlanEstimate:
    """Durations by the step-time model that is named, else from earlier runs here, else by the roofline.

    ``visible`` names the devices of the servers, where CUDA_VISIBLE_DEVICES is another one for them. Raises
    UsageError for a step-time model that is damaged or of another hardware.
    """
    gpus, is_simulated = [gpu.name for gpu in gpu_inventory(visible)], profile.engine.kind == "sim"
    predicted = predict_plan(profile, requests, gpus, model)
    if model is None and profile.step_time_model is None and not is_simulated:
        earlier = estimate_durations(profile, requests, gpus)
        if earlier is not None:
            return PlanEstimate(
                run_s=earlier.run_s,
                around_s=earlier.around_s,
                basis=f"from {count_of(earlier.num_runs, 'earlier run')} on this machine",
                prediction=None if isinstance(predicted, str) else predicted,
            )
    if isinstance(predicted, str):
        return PlanEstimate(run_s={}, around_s=0.0, basis=predicted)
    overhead_s = predicted.overhead_s
    if overhead_s is None:
        overhead_s = earlier_overhead_s(profile, gpus)
    return PlanEstimate(
        run_s={label: run.load_s + (overhead_s or 0.0) for label, run in predicted.runs.items()},
        around_s=0.0 if is_simulated else AROUND_S,
        basis=predicted.basis,
        has_starts=overhead_s is not None,
        prediction=predicted,
    )


def duration_text(profile: Profile, estimate: PlanEstimate) -> str:
    """``estimated duration 240 s (4 min)``, with what it leaves out; or that it is unknown."""
    if not estimate.run_s:
        return (
            f"duration unknown: no earlier run of {profile.engine.kind} with {profile.model} on this machine; the "
            "first block will show it"
        )
    runs = plan_runs(profile).runs
    total_s = sum(estimate.run_s[arm_label(run.variant, run.cell)] for run in runs) + estimate.around_s
    text = f"{total_s:.0f} s{f' ({duration(total_s)})' if total_s >= _WORDS_FROM_S else ''}"
    text += " at most" if profile.stopping is not None else ""
    text += f", {estimate.basis}" if estimate.basis.startswith("from ") else ""
    if estimate.has_starts:
        return f"estimated duration {text}"
    starts = count_of(len(runs), "server start")
    return f"estimated duration of the loads {text}; {starts} come on top, unmeasured here"


def print_prediction(estimate: PlanEstimate) -> None:
    """Print the origin of the step times, and the load that they predict: one line for arms that share it."""
    prediction = estimate.prediction
    if prediction is None:
        if not estimate.run_s:
            print(estimate.basis)
        return
    print(prediction.basis)
    labels: dict[str, list[str]] = {}
    for label, run in prediction.runs.items():
        labels.setdefault(_load_text(run), []).append(label)
    for text, arms in labels.items():
        print(f"{', '.join(arms) if len(labels) > 1 else 'load'}: {text}")
    for warning in prediction.warnings:
        warn(warning.message)


def _load_text(run: PredictedRun) -> str:
    """The batch, its latencies and its memory; at a rate, how much of the server's capacity is offered."""
    offered, rate, waiting_from = run.offered, run.offered_rate, _WAITING_FROM * run.batch
    full = ": it is full" if run.kv_frac is not None and run.kv_frac > _CROWDED_FRAC else ""
    parts = (
        None if offered is None or rate is None else _saturation_text(offered, rate),
        f"{four_digits(run.batch)} rows in a batch on average, {run.largest_batch} at most",
        f"{four_digits(run.in_server)} sequences in the server, so that some wait for a row"
        if run.in_server > waiting_from
        else None,
        f"step {four_digits(run.step_s * 1e3)} ms",
        f"first token after {four_digits(run.ttft_s * 1e3)} ms",
        None if run.kv_frac is None else f"key-value memory {percentage(run.kv_frac, 2)} used at most{full}",
        count_of(run.num_preempted, "preemption") if run.num_preempted else None,
    )
    return "; ".join(part for part in parts if part is not None)


def _saturation_text(offered: PredictedLoad, rate: float) -> str:
    part = offered.utilisation
    times = f"{percentage(part)} of" if part < _TIMES_FROM else f"{part:.0f} times"
    most = f"the {four_digits(offered.max_requests_per_s)} that the server completes at most"
    share = f"{four_digits(rate)} requests/s offered, {times} {most}"
    if offered.is_saturated:
        return f"saturated: {share}, so the queue grows while the load lasts"
    return f"{share}, {four_digits(offered.concurrency)} in the server on average"


_OF_A_TRACE: Final = (
    "num_requests",
    "wall_s",
    "output_throughput",
    "ttft_ms",
    "p99_ttft_ms",
    "tpot_ms",
    "e2el_ms",
    "p99_e2el_ms",
    "num_steps",
)


@uncollected()
def simulate_summary(profile: Profile, output_root: Path, *, as_json: bool) -> None:
    """Simulate every run of the profile on its trace, one after the other; write ``metrics.json`` and print it."""
    load, warnings = recorded_load(profile), profile_draft_warnings(profile)
    runs: list[dict[str, Any]] = []
    for planned in plan_runs(profile).runs:
        metrics = simulate_recorded(profile, planned, load)
        costs = costs_in_words(variant_settings(profile, planned.variant, planned.cell))
        arm = {"run_id": planned.run_id, "arm": arm_label(planned.variant, planned.cell), "costs": costs}
        runs.append({**arm, "metrics": {name: value for name, value in metrics.items() if value is not None}})
    document = {"schema_version": 1, "profile": profile.name, "seed": profile.seed, "runs": runs}
    document["warnings"] = msgspec.to_builtins(warnings)
    stem = f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}-summary"
    with renamed_when_complete(output_root / profile.name, stem) as (unfinished, finish):
        write_json_atomic(unfinished / "metrics.json", document)
        write_bytes_atomic(unfinished / "profile.yaml", dump_profile(profile).encode())
        directory = finish()
    for warning in () if as_json else warnings:
        warn(warning.message)
    columns = (Column("run_id", "run", is_left=True), *(Column(name, name, short_number) for name in _OF_A_TRACE))
    table = Table("", columns, tuple(dict.fromkeys(_OF_A_TRACE) | run["metrics"] | run for run in runs))
    end = f"all times are simulated; every metric is in {directory / 'metrics.json'}"
    tell({"directory": str(directory), **document}, table, end, as_json=as_json)


_OF_AN_ARM: Final = ("wall_s", "output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "step_ms")


def print_predictions(predictions: Sequence[ArmPrediction]) -> None:
    """Print a row for each arm; nothing without predictions."""
    if not predictions:
        return
    level, num_draws = percentage(predictions[0].level), predictions[0].num_draws
    print(f"\nPredicted, with the interval of {level} of {num_draws} draws of the fit")
    columns = (Column("arm", "arm", is_left=True), *(Column(name, name, _interval) for name in _OF_AN_ARM))
    rows = (dict.fromkeys(_OF_AN_ARM) | dict(each.metrics) | {"arm": each.arm} for each in predictions)
    wide_console().print(Table("", columns, tuple(rows)))


def _interval(metric: Predicted) -> str:
    return f"{short_number(metric.value)} [{short_number(metric.low)}, {short_number(metric.high)}]"


def write_predictions(directory: Path, predictions: Sequence[ArmPrediction]) -> list[Any]:
    """Write ``predictions.json`` into the result directory; returns its content."""
    content: list[Any] = msgspec.to_builtins(predictions)
    write_json_atomic(directory / "predictions.json", {"schema_version": 1, "predictions": content})
    return content
