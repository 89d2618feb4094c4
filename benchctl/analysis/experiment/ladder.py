"""Ladders of controls: the cost of a variant divided into the differences of neighbouring steps.

The declared rule for ending early: measure until the answer is precise, whatever the answer is.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.attribution.splits import logarithmic_mean
from benchctl.analysis.experiment.experiment import Arm, Experiment
from benchctl.analysis.experiment.pairing import CellPair, PairedRuns, Side, deciding_between, match_cells
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, SideRatio
from benchctl.profile.controls import ladder_of
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms
from benchctl.profile.settings import factors_of
from benchctl.records.directory import arm_label
from benchctl.records.record import HalfWidth, Look, Manifest, StoppingRecord
from benchctl.records.schema import Cell

CONFIDENCE: Final = 0.95
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


def divide_ladders(experiment: Experiment, confidence: float = CONFIDENCE) -> tuple[Ladder, ...]:
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
        arm_label(step, {} if _is_unswept(profile, step) else factors_of(profile.variants[step].swept, cell))
        for step in steps
    ]
    of_steps = [by_label[label] for label in labels if label in by_label]
    blocks = set.intersection(*(set(arm.runs) for arm in of_steps)) if len(of_steps) == len(labels) else set()
    if not blocks:
        return None
    ladder_arms = [arm.restrict_to(blocks) for arm in of_steps]
    levels = {name: _levels(experiment, ladder_arms, name, confidence) for name in LADDER_METRICS}
    prices = tuple(
        _price(experiment, ladder_arms, levels, (i, i + 1), confidence) for i in range(len(ladder_arms) - 1)
    )
    whole = _price(experiment, ladder_arms, levels, (0, len(ladder_arms) - 1), confidence, what="all of it")
    return Ladder(label=labels[-1], num_blocks=len(blocks), prices=prices, whole=whole)


def _is_unswept(profile: Profile, step: str) -> bool:
    return step == profile.baseline and not profile.sweep_baseline


def _levels(experiment: Experiment, steps: Sequence[Arm], name: str, confidence: float) -> tuple[float | None, ...]:
    """The level of every step; None where some block does not know the quantity."""
    ratios = [_ratio_of(experiment, steps[0], step, name, confidence) for step in steps[1:]]
    if any(ratio is None or ratio.estimate.num_blocks < len(steps[0].runs) for ratio in ratios):
        return (None,) * len(steps)
    levels = [ratio for ratio in ratios if ratio is not None]
    return (levels[0].a, *(ratio.b for ratio in levels)) if levels else (None,) * len(steps)


def _ratio_of(experiment: Experiment, a: Arm, b: Arm, name: str, confidence: float) -> SideRatio | None:
    pair = CellPair(label=b.label, a=a, b=b, pairing="interleaved")
    return PairedRuns.of(pair, (experiment, experiment)).ratio(name, confidence)


def _price(
    experiment: Experiment,
    steps: Sequence[Arm],
    levels: Mapping[str, Sequence[float | None]],
    ends: tuple[int, int],
    confidence: float,
    what: str | None = None,
) -> Price:
    lower, upper = (steps[end] for end in ends)
    differences = {}
    for name in LADDER_METRICS:
        before, after = (levels[name][end] for end in ends)
        ratio = _ratio_of(experiment, lower, upper, name, confidence)
        if before is not None and after is not None and ratio is not None:
            half, num_blocks = ratio.estimate.half_width, ratio.estimate.num_blocks
            half_width = None if half is None else half * logarithmic_mean(before, after)
            differences[name] = Difference(mean=after - before, num_blocks=num_blocks, half_width=half_width)
    settings = [experiment.settings(arm.runs[min(arm.runs)].record) for arm in (lower, upper)]
    return Price(
        what=what or describe_difference(*settings), lower=lower.label, upper=upper.label, differences=differences
    )


def describe_difference(lower: VariantSettings | None, upper: VariantSettings | None) -> str:
    """The difference between two neighbours of a ladder, in words."""
    if lower is None or upper is None:
        return "unknown"
    names = []
    if _without_value_model(lower) != _without_value_model(upper):
        names.append("flags")
    if lower.server.guides_with != upper.server.guides_with:
        names.append("idle code")
    if lower.sampling != upper.sampling:
        names.append("sampling")
    if lower.request != upper.request:
        names.append("fields of requests")
    if lower.guidance is None and upper.guidance is not None:
        names.append("value-model compute")
    elif lower.guidance != upper.guidance:
        names.append("changed tokens")
    if lower.model != upper.model:
        names.append("model")
    return " + ".join(names) or "nothing"


def _without_value_model(settings: VariantSettings) -> dict[str, object]:
    return settings.server.model_dump(exclude=set(settings.server.VALUE_MODEL_OPTIONS))


def num_looks_of(a: Manifest, b: Manifest) -> int:
    """Number of looks at which two compared experiments could have ended; 1 where their blocks were fixed.

    Who adds blocks to an experiment could have ended it before: every extension is one more look, whether or not
    anybody looked. Of two experiments the numbers are multiplied, because each end of one may meet each end of the
    other.
    """
    manifests = (a,) if a == b else (a, b)
    return math.prod(
        len(m.stopping.look_blocks) if m.stopping is not None else 1 + len(m.extensions) for m in manifests
    )


def num_extensions_of(a: Manifest, b: Manifest) -> int:
    """Number of times that blocks were added to either of two experiments."""
    return len(a.extensions) + (0 if a == b else len(b.extensions))


def take_look(
    experiment: Experiment,
    rule: StoppingRecord,
    num_blocks: int,
    metrics: Sequence[str],
    *,
    left_out: Collection[str] = (),
) -> Look:
    """The precision of the primary ``metrics`` after ``num_blocks`` blocks.

    A block counts where it counts in a comparison, and so does a metric (``deciding_between``). Cells in
    ``left_out`` (by label) are ignored; where nothing remains, the look is not precise.
    """
    so_far = experiment.first_blocks(num_blocks)
    results, baseline = so_far.results, so_far.results.manifest.baseline
    others = dict.fromkeys(run.variant for run in results.plan.runs if run.variant != baseline)
    sides = [(Side(results.path, baseline), Side(results.path, other)) for other in others]
    widths = tuple(
        width
        for a, b in sides
        for pair in match_cells(so_far, a, so_far, b)
        if pair.b.label not in left_out
        for name in deciding_between(metrics, pair, (so_far, so_far)).names
        if (width := _half_width(PairedRuns.of(pair, (so_far, so_far)), name, rule.confidence)) is not None
    )
    is_precise = bool(widths) and all(_width(width) <= rule.precision_frac for width in widths)
    return Look(num_blocks=num_blocks, half_widths=widths, is_precise=is_precise)


def widest_interval(look: Look) -> HalfWidth | None:
    """The widest interval, an unknown one first: what keeps the experiment from ending. None without any."""
    return max(look.half_widths, key=_width, default=None)


def _width(width: HalfWidth) -> float:
    return math.inf if width.half_width_frac is None else width.half_width_frac


def _half_width(paired: PairedRuns, name: str, confidence: float) -> HalfWidth | None:
    """exp(half the interval of the logarithms) - 1; unknown below six blocks.

    None where all runs know the metric and it has no ratio, such as a count that is zero.
    """
    ratio = paired.ratio(name, confidence)
    if (
        ratio is None
        and paired.pair.a_runs
        and all(value is not None for side in paired.values(name) for value in side)
    ):
        return None
    num_blocks = 0 if ratio is None else ratio.estimate.num_blocks
    half = ratio.estimate.half_width if ratio is not None and num_blocks >= MIN_PAIRED_BLOCKS else None
    return HalfWidth(
        cell=paired.pair.b.label,
        metric=name,
        num_blocks=num_blocks,
        half_width_frac=None if half is None else math.expm1(half),
    )
