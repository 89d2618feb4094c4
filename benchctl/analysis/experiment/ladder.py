"""Ladders of controls: the cost of a variant, divided into the differences of neighbouring steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from benchctl.analysis.attribution.estimate import logarithmic_mean
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import ArmPair, pair_in
from benchctl.profile.controls import ladder_of
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms
from benchctl.profile.settings import factors_of
from benchctl.records.directory import arm_label
from benchctl.records.schema import Cell

LADDER_METRICS: Final = ("wall_s", "step_ms")
"""Metrics whose difference is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of two levels, in the unit of its metric."""

    mean: float
    num_blocks: int
    half_width: float | None = None
    """Half of the interval; None for one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Cost of a step of the ladder beyond the one before it, for each of ``LADDER_METRICS``."""

    what: str
    """Change between the two steps, in words."""
    lower: str
    upper: str
    differences: Mapping[str, Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Invariant: for every quantity, the means of ``prices`` add up to that of ``whole``."""

    label: str
    num_blocks: int
    prices: tuple[Price, ...]
    whole: Price


def divide_ladders(experiment: Experiment, confidence: float) -> tuple[Ladder, ...]:
    """The ladder of every variant with ``controls``, in each cell with a block whose steps are all usable."""
    profile = experiment.profile_or_none
    if profile is None:
        return ()
    candidates = (
        _ladder(experiment, profile, ladder_of(profile, variant), cell, confidence)
        for variant, cell in arms(profile)
        if profile.variants[variant].controls
    )
    return tuple(ladder for ladder in candidates if ladder is not None)


def _ladder(
    experiment: Experiment, profile: Profile, steps: Sequence[str], cell: Cell, confidence: float
) -> Ladder | None:
    by_label = {arm.label: arm for arm in experiment.arms}
    labels = [
        arm_label(step, {factor: value for factor, value in cell.items() if factor in factors_of(profile, step)})
        for step in steps
    ]
    if not by_label.keys() >= set(labels):
        return None
    arms_up = [by_label[label] for label in labels]
    blocks = set.intersection(*(set(arm.runs) for arm in arms_up))
    if not blocks:
        return None
    rungs = [replace(arm, runs={block: arm.runs[block] for block in blocks}) for arm in arms_up]
    from_first = [pair_in(experiment, rungs[0], rung, confidence) for rung in rungs[1:]]
    levels = {name: _levels(from_first, name) for name in LADDER_METRICS}
    steps_up = [pair_in(experiment, lower, upper, confidence) for lower, upper in pairwise(rungs)]
    return Ladder(
        label=labels[-1],
        num_blocks=len(blocks),
        prices=tuple(
            _price(pair, levels, describe_difference(experiment.settings(pair.a), experiment.settings(pair.b)))
            for pair in steps_up
        ),
        whole=_price(from_first[-1], levels, "all of it"),
    )


def _levels(from_first: Sequence[ArmPair], name: str) -> dict[str, float]:
    """The level of every rung by its label, of pairs with the first; empty where some block does not know it."""
    levels: dict[str, float] = {}
    for pair in from_first:
        ratio = pair.ratio(name)
        if ratio is None or ratio.estimate.num_blocks < len(pair.blocks):
            return {}
        levels.setdefault(pair.a.label, ratio.a)
        levels[pair.b.label] = ratio.b
    return levels


def _price(pair: ArmPair, levels: Mapping[str, Mapping[str, float]], what: str) -> Price:
    differences = {}
    for name, of_rungs in levels.items():
        ratio = pair.ratio(name)
        if ratio is not None and of_rungs:
            before, after, half = of_rungs[pair.a.label], of_rungs[pair.b.label], ratio.estimate.half_width
            differences[name] = Difference(
                mean=after - before,
                num_blocks=ratio.estimate.num_blocks,
                half_width=None if half is None else half * logarithmic_mean(before, after),
            )
    return Price(what=what, lower=pair.a.label, upper=pair.b.label, differences=differences)


def describe_difference(lower: VariantSettings | None, upper: VariantSettings | None) -> str:
    """The difference between two neighbours of a ladder, in words."""
    if lower is None or upper is None:
        return "unknown"
    flags = [each.server.model_dump(exclude=set(each.server.VALUE_MODEL_OPTIONS)) for each in (lower, upper)]
    begins_to_guide = lower.guidance is None and upper.guidance is not None
    is_changed = {
        "flags": flags[0] != flags[1],
        "idle code": lower.server.guides_with != upper.server.guides_with,
        "sampling": lower.sampling != upper.sampling,
        "fields of requests": lower.request != upper.request,
        "value-model compute": begins_to_guide,
        "changed tokens": not begins_to_guide and lower.guidance != upper.guidance,
        "model": lower.model != upper.model,
    }
    return " + ".join(name for name, is_other in is_changed.items() if is_other) or "nothing"
