"""The cost of a variant, divided: differences of neighbours on its ladder of controls.

A block runs every step of the ladder on a fresh server. The difference of two neighbours is taken within the block,
and the price of what they differ in is its mean over the blocks, with a Student-t interval. Only blocks count in
which every step is usable, so that the prices add up to the whole difference between the variant and the baseline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Final

from benchctl.analysis.statistics import t_quantile
from benchctl.analysis.summary import RunSummary
from benchctl.profile.controls import ladder_of
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.plan import arms
from benchctl.profile.settings import factors_of
from benchctl.records.directory import arm_label
from benchctl.records.run import Cell

CONFIDENCE: Final = 0.95
LADDER_COLUMNS: Final = {"wall_s": "wall_clock_s", "step_ms": "step_ms"}
"""What is divided, and the column of a run's row that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean over blocks of a difference within the block; one block has no interval."""

    mean: float
    num_blocks: int
    half_width: float | None = None
    """Half of the 95 % interval: t(0.975, n - 1) * sd / sqrt(n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a step of the ladder costs beyond the one before it, by the names of ``LADDER_COLUMNS``."""

    what: str
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


def ladders(
    profile: Profile | None, runs: Sequence[RunSummary], confidence: float = CONFIDENCE
) -> tuple[Ladder, ...]:
    """The ladder of every variant with ``controls``, in each cell with a block whose steps are all usable."""
    if profile is None:
        return ()
    usable: dict[str, dict[int, RunSummary]] = {}
    for run in runs:
        if run.is_usable:
            usable.setdefault(run.label, {})[run.record.block] = run
    found = (
        _ladder(profile, ladder_of(profile, variant), cell, usable, confidence)
        for variant, cell in arms(profile)
        if profile.variants[variant].controls
    )
    return tuple(ladder for ladder in found if ladder is not None)


def _ladder(
    profile: Profile,
    steps: Sequence[str],
    cell: Cell,
    usable: Mapping[str, Mapping[int, RunSummary]],
    confidence: float,
) -> Ladder | None:
    labels = [arm_label(step, _own_cell(profile, step, cell)) for step in steps]
    by_step = [usable.get(label, {}) for label in labels]
    blocks = sorted(set.intersection(*(set(runs) for runs in by_step)))
    if not blocks:
        return None
    columns = [[runs[block] for block in blocks] for runs in by_step]
    prices = tuple(_price(a, b, confidence) for a, b in pairwise(zip(labels, columns, strict=True)))
    whole = _price((labels[0], columns[0]), (labels[-1], columns[-1]), confidence, what="all of it")
    return Ladder(label=labels[-1], num_blocks=len(blocks), prices=prices, whole=whole)


def _own_cell(profile: Profile, step: str, cell: Cell) -> Cell:
    """The part of a cell that a step of the ladder runs in."""
    return {} if step == profile.baseline else factors_of(profile.variants[step].swept, cell)


def _price(
    lower: tuple[str, Sequence[RunSummary]],
    upper: tuple[str, Sequence[RunSummary]],
    confidence: float,
    what: str | None = None,
) -> Price:
    differences = {}
    for name, column in LADDER_COLUMNS.items():
        pairs = [(a.number(column), b.number(column)) for a, b in zip(lower[1], upper[1], strict=True)]
        known = [after - before for before, after in pairs if before is not None and after is not None]
        if len(known) == len(pairs):
            differences[name] = mean_difference(known, confidence)
    named = what or what_differs(lower[1][0].settings, upper[1][0].settings)
    return Price(what=named, lower=lower[0], upper=upper[0], differences=differences)


def mean_difference(values: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """The mean of one value for each block, and half of its Student-t interval."""
    n = len(values)
    if n < 2:
        return Difference(mean=fmean(values), num_blocks=n)
    half = t_quantile(1 - (1 - confidence) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Difference(mean=fmean(values), num_blocks=n, half_width=half)


def what_differs(lower: VariantSettings | None, upper: VariantSettings | None) -> str:
    """What two neighbours of a ladder differ in, in words."""
    if lower is None or upper is None:
        return "unknown"
    names = []
    if _without_value_model(lower) != _without_value_model(upper):
        names.append("flags")
    if lower.server.guides_with != upper.server.guides_with:
        names.append("idle code")
    if lower.sampling != upper.sampling:
        names.append("sampling")
    if lower.guidance is None and upper.guidance is not None:
        names.append("value-model compute")
    elif lower.guidance != upper.guidance:
        names.append("changed tokens")
    if lower.model != upper.model:
        names.append("model")
    return " + ".join(names) or "nothing"


def _without_value_model(settings: VariantSettings) -> dict[str, object]:
    return settings.server.model_dump(exclude=set(settings.server.VALUE_MODEL_OPTIONS))
