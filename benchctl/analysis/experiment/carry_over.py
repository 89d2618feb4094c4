"""Carry-over of an experiment: what its several loads on one server give that fresh servers would not."""

import math
from collections.abc import Iterator, Mapping

from benchctl.analysis.experiment.experiment import Arm, Experiment
from benchctl.analysis.experiment.pairing import baseline_pairs, deciding_among
from benchctl.analysis.statistics.carry_over import TERMS, CarryOver, Load, LoadKey, carry_over
from benchctl.analysis.statistics.estimate import SURPRISING_P
from benchctl.profile.settings import load_part, server_part
from benchctl.records.directory import arm_label
from benchctl.records.schema import Cell, ResultWarning
from benchctl.units import p_value


def carry_over_of(experiment: Experiment) -> dict[str, CarryOver]:
    """The carry-over in the deciding metrics, and in their ratios to the baseline, where all arms share it.

    By ``step_ms`` and ``ratio of step_ms``; the metrics are tested together, and so are the ratios. Without those
    that some run does not know; empty where no server got several load points. It is estimated once.
    """
    if not experiment.carry_over:
        experiment.carry_over.update(_estimated(experiment))
    return experiment.carry_over


def _estimated(experiment: Experiment) -> dict[str, CarryOver]:
    runs = {
        _key(block, arm): run
        for arm in experiment.arms
        for block, run in arm.runs.items()
        if load_part(arm.cell) in run.record.ladder  # a foreign ladder may lack it
    }
    orders = {block: [_sizes(point) for point in run.record.ladder] for (block, _, _), run in runs.items()}
    pairs = baseline_pairs(experiment) if runs else ()
    both = [(_key(block, pair.a), _key(block, pair.b)) for pair in pairs for block in pair.blocks]
    levels: dict[str, dict[LoadKey, float]] = {}
    ratios: dict[str, dict[LoadKey, float]] = {}
    for name in deciding_among(experiment, pairs):
        values = {key: experiment.counted(run, name) or 0.0 for key, run in runs.items()}
        if all(value > 0 for value in values.values()):
            level = levels[name] = {key: math.log(value) for key, value in values.items()}
            ratios[f"ratio of {name}"] = {b: level[b] - level[a] for a, b in both if a in level and b in level}
    return carry_over(levels, orders) | carry_over(ratios, orders)


def _key(block: int, arm: Arm) -> LoadKey:
    return block, arm_label(arm.variant, server_part(arm.cell)), _sizes(arm.cell)


def _sizes(cell: Cell) -> Load:
    return tuple(value if isinstance(value, int | float) else 0.0 for value in load_part(cell).values())


def carry_over_warnings(effects: Mapping[str, CarryOver]) -> Iterator[ResultWarning]:
    """A warning for each metric and ratio whose carry-over is hardly chance."""
    for name, each in effects.items():
        if each.p_value < SURPRISING_P:
            effect = each.effects[each.clearest]
            value, low, high = (f"{math.expm1(end or 0.0):+.1%}" for end in (effect.value, effect.low, effect.high))
            message = (
                f"{name} changes by {value} [{low}, {high}] {TERMS[each.clearest]} (p {p_value(each.p_value)}): "
                "what several loads on one server give is not what fresh servers would; measure with per_server: "
                "fresh"
            )
            yield ResultWarning(code="ladder-carry-over", message=message)
