"""Carry-over of an experiment: what its several loads on one server give that fresh servers would not."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from benchctl.analysis.experiment.experiment import Arm, Experiment, cell_key
from benchctl.analysis.experiment.pairing import baseline_pairs, deciding_between
from benchctl.analysis.statistics.carry_over import CarryOver, LoadKey, carry_over
from benchctl.analysis.statistics.estimate import SURPRISING_P
from benchctl.profile.settings import load_part, server_part
from benchctl.records.directory import arm_label
from benchctl.records.record import RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.units import p_value


def carry_over_of(experiment: Experiment) -> dict[str, CarryOver]:
    """The carry-over in the deciding metrics, and in their ratios to the baseline, where all arms share it.

    By ``step_ms`` and ``ratio of step_ms``; the metrics are tested together, and so are the ratios. Without those
    that some run does not know; empty where no server got several load points.
    """
    counted = experiment.counted_runs.values()  # a foreign record may have points that its ladder lacks
    runs = [run for run in counted if load_part(run.record.cell) in run.record.ladder]
    orders = {run.record.block: [cell_key(point) for point in run.record.ladder] for run in runs}
    points = {cell_key(point): point for run in runs for point in run.record.ladder}
    sizes = sorted(points, key=lambda name: [v if type(v) in {int, float} else 0.0 for v in points[name].values()])
    pairs = [pair for pair in baseline_pairs(experiment) if cell_key(load_part(pair.b.cell)) in points]
    primary = () if experiment.profile_or_none is None else experiment.profile.primary_metrics
    levels: dict[str, dict[LoadKey, float]] = {}
    ratios: dict[str, dict[LoadKey, float]] = {}
    for name in dict.fromkeys(name for pair in pairs for name in deciding_between(primary, pair)) or primary:
        values = [(run.record, experiment.counted(run, name)) for run in runs]
        if runs and all(value is not None and value > 0 for _, value in values):
            levels[name] = {_key(record.block, record): math.log(value) for record, value in values if value}
            ratios[f"ratio of {name}"] = {
                _key(block, pair.b): math.log(b / a)
                for pair in pairs
                for block, a, b in zip(pair.blocks, *pair.values(name), strict=True)
                if a and b and block in orders
            }
    return carry_over(levels, orders, sizes) | carry_over(ratios, orders, sizes)


def _key(block: int, arm: RunRecord | Arm) -> LoadKey:
    return block, arm_label(arm.variant, server_part(arm.cell)), cell_key(load_part(arm.cell))


_WHERE: Final = {
    "per_load": "with each load of its server",
    "after_larger": "after a larger load, against after a smaller one",
    "first": "in the first load of a server",
}


def carry_over_warnings(effects: Mapping[str, CarryOver]) -> Iterator[ResultWarning]:
    """A warning for each metric and ratio whose carry-over is hardly chance."""
    for name, each in effects.items():
        if each.p_value is None or each.p_value >= SURPRISING_P:
            continue
        effect = each.effects[each.clearest]
        value, low, high = (f"{math.expm1(end or 0.0):+.1%}" for end in (effect.value, effect.low, effect.high))
        message = (
            f"{name} changes by {value} [{low}, {high}] {_WHERE[each.clearest]} (p {p_value(each.p_value)}): what "
            "several loads on one server give is not what fresh servers would; measure with per_server: fresh"
        )
        yield ResultWarning(code="ladder-carry-over", message=message)
