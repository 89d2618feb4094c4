"""``benchctl simulate --keep summary``: a trace of any length, of which only metrics are printed and written.

Prediction intervals as a table and as ``predictions.json``.
"""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.cli.screen import print_json, uncollected, warn, wide_console
from benchctl.formats import percentage, short_number
from benchctl.measure.capacity.prediction import ArmPrediction
from benchctl.measure.recorded_run import simulate_recorded
from benchctl.measure.result_directory import renamed_when_complete
from benchctl.profile.load import dump_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.files import write_bytes_atomic, write_json_atomic
from benchctl.report.table import Column, Table, table_of
from benchctl.sim.settings import costs_in_words
from benchctl.sim.speculation.fitted_drafts import profile_draft_warnings
from benchctl.workload.recorded import recorded_load

_COLUMNS: Final = (
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
    load = recorded_load(profile)
    runs: list[dict[str, Any]] = []
    for planned in plan_runs(profile).runs:
        metrics = simulate_recorded(profile, planned, load)
        costs = costs_in_words(variant_settings(profile, planned.variant, planned.cell))
        arm = {"run_id": planned.run_id, "arm": arm_label(planned.variant, planned.cell), "costs": costs}
        runs.append({**arm, "metrics": {name: value for name, value in metrics.items() if value is not None}})
    warnings = profile_draft_warnings(profile)
    document = {"schema_version": 1, "profile": profile.name, "seed": profile.seed, "runs": runs}
    document["warnings"] = msgspec.to_builtins(warnings)
    stem = f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}-summary"
    with renamed_when_complete(output_root / profile.name, stem) as (unfinished, finish):
        write_json_atomic(unfinished / "metrics.json", document)
        write_bytes_atomic(unfinished / "profile.yaml", dump_profile(profile).encode())
        directory = finish()
    if as_json:
        print_json({"directory": str(directory), **document})
        return
    _print_table(runs)
    for warning in warnings:
        warn(warning.message)
    print(f"all times are simulated; every metric is in {directory / 'metrics.json'}")


def _print_table(runs: list[dict[str, Any]]) -> None:
    columns = (Column("run_id", "run", is_left=True), *(Column(name, name, short_number) for name in _COLUMNS))
    rows = ({"run_id": run["run_id"]} | {name: run["metrics"].get(name) for name in _COLUMNS} for run in runs)
    wide_console().print(Table("", columns, tuple(rows)))


_SHOWN: Final = ("wall_s", "output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "step_ms")


def print_predictions(predictions: Sequence[ArmPrediction]) -> None:
    """Print a row for each arm; nothing without predictions."""
    if not predictions:
        return
    first = predictions[0]
    print(f"\nPredicted, with the interval of {percentage(first.level)} of {first.num_draws} draws of the fit")
    rows = ((each.arm, *(_interval(each, name) for name in _SHOWN)) for each in predictions)
    wide_console().print(table_of(("arm", *_SHOWN), rows, left=("arm",)))


def write_predictions(directory: Path, predictions: Sequence[ArmPrediction]) -> list[Any]:
    """Write ``predictions.json`` into the result directory; returns its content."""
    content: list[Any] = msgspec.to_builtins(predictions)
    write_json_atomic(directory / "predictions.json", {"schema_version": 1, "predictions": content})
    return content


def _interval(prediction: ArmPrediction, name: str) -> str | None:
    metric = prediction.metrics.get(name)
    if metric is None:
        return None
    return f"{short_number(metric.value)} [{short_number(metric.low)}, {short_number(metric.high)}]"
