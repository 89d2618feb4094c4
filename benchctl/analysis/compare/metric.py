"""The comparison of one metric in one cell: block values of both sides, estimate, verdict and reason."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Final, Literal, TypeAlias

from benchctl.analysis.compare.decide import (
    MAX_BLOCKS_NEEDED,
    BlockScores,
    Margins,
    Verdict,
    blocks_for_verdict,
    decision_alpha,
    holm_levels,
    joint_levels,
    margins_of,
    verdict_of,
)
from benchctl.analysis.metrics.table import METRICS, Metric
from benchctl.analysis.statistics.estimate import (
    DEFAULT_ESTIMATOR,
    MIN_PAIRED_BLOCKS,
    MIN_UNPAIRED_BLOCKS,
    Estimator,
    RatioEstimate,
    SideRatio,
    scatter_of,
    side_ratio,
)
from benchctl.analysis.statistics.intervals import OrderEffects, order_effects, outlier_indices
from benchctl.records.stores import MetricNoise
from benchctl.units import percentage

MetricVerdict: TypeAlias = Verdict | Literal["equal", "different", "unknown"]
"""``equal`` and ``different`` are those of exact metrics, ``equal`` also that of exploratory ones that are equal in
every block; ``unknown`` is a metric that was not recorded."""

Role: TypeAlias = Literal["deciding", "exact", "exploratory"]
"""``deciding`` metrics make the verdict, ``exact`` ones can only make the comparison invalid."""

FORCED_EXACT: Final = frozenset({"output_tokens"})
"""Exact as well when the length of each output is forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Margins, confidence and estimator by which metrics are compared."""

    margin_frac: float
    """The threshold."""
    confidence: float
    is_paired: bool
    noise: Mapping[str, MetricNoise]
    """Noise of this machine by metric, from an A/A experiment."""
    equivalence_margin_frac: float | None = None
    """Inside it two sides are equivalent; None: inside the threshold."""
    estimator: Estimator = DEFAULT_ESTIMATOR

    def margins_of(self, name: str) -> Margins:
        """The margins of a metric; its noise floor widens the change margin, never that of equivalence."""
        floor_frac = self.noise[name].floor_frac if name in self.noise else 0.0
        return margins_of(self.margin_frac, floor_frac, self.equivalence_margin_frac)

    @property
    def min_blocks(self) -> int:
        """Fewer are a screening: no verdict."""
        return MIN_PAIRED_BLOCKS if self.is_paired else MIN_UNPAIRED_BLOCKS


NO_MARGINS: Final = Margins(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric of both sides with its estimate and verdict.

    Of paired sides, ``a`` and ``b`` are the centres of the blocks that both know, so that b / a is the ratio. Of
    unpaired sides, and without an estimate, they are means of the values as measured, geometric where all are
    positive.
    """

    metric: Metric
    role: Role
    verdict: MetricVerdict
    a_blocks: tuple[float | None, ...]
    b_blocks: tuple[float | None, ...]
    estimate: RatioEstimate | None = None
    reason: str | None = None
    limits: tuple[str, ...] = ()
    """What limits its values; comes first in the reason wherever there is no verdict."""
    blocks: tuple[int, ...] = ()
    """Those of the estimate, in order; empty where the sides share none."""
    margins: Margins = NO_MARGINS
    """Beyond which a change is called, and inside which equivalence."""
    judged_confidence: float | None = None
    """Confidence of the interval that made the verdict: higher than the shown one where several tests are made."""
    order: OrderEffects | None = None
    outlier_blocks: tuple[int, ...] = ()
    """Blocks that stand out; they count as well."""
    without_outliers: RatioEstimate | None = None
    """The estimate without them; None where there are none."""
    is_screening: bool = False
    """Too few blocks for any verdict."""
    is_unreliable: bool = False
    """Its runs carry a warning that its values cannot be trusted: it decides nothing."""
    a_level: float | None = None
    """Of paired sides: the centre of A that the estimate belongs to."""

    @property
    def a(self) -> float | None:
        return mean_of_blocks(self.a_blocks) if self.a_level is None else self.a_level

    @property
    def b(self) -> float | None:
        if self.a_level is None or self.estimate is None:
            return mean_of_blocks(self.b_blocks)
        return self.a_level * self.estimate.ratio


def mean_of_blocks(values: Sequence[float | None]) -> float | None:
    """Geometric mean of the known values, arithmetic where one is not positive, None where none is known."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return geometric_mean(numbers) if min(numbers) > 0 else fmean(numbers)


def scatters_of(metric: MetricComparison) -> tuple[float | None, ...]:
    """The scatter of each side around its centre, over the same blocks and with the same weights."""
    sides, weights = (metric.a_blocks, metric.b_blocks), metric.estimate.block_weights if metric.estimate else ()
    shared = (
        zip(*(pair for pair in zip(*sides, strict=True) if None not in pair), strict=True) if weights else sides
    )
    return tuple(scatter_of([value for value in side if value is not None], weights) for side in shared)


def roles_of(deciding: Sequence[str], *, is_forced: bool) -> dict[str, Role]:
    """Role of each metric, deciding ones first."""
    exact = {name for name, metric in METRICS.items() if metric.is_exact or (is_forced and name in FORCED_EXACT)}
    roles: dict[str, Role] = dict.fromkeys((name for name in deciding if name not in exact), "deciding")
    roles |= dict.fromkeys((name for name in METRICS if name in exact), "exact")
    return roles | dict.fromkeys((name for name in METRICS if name not in roles), "exploratory")


Blocks: TypeAlias = tuple[float | None, ...]


def compare_metric(
    name: str,
    role: Role,
    sides: tuple[Blocks, Blocks],
    rules: Rules,
    ratio_of: Callable[[], SideRatio | None],
    *,
    limits: tuple[str, ...] = (),
    unreliable: str | None = None,
) -> MetricComparison | None:
    """One metric of both sides, not judged yet (``judge_metric``); None for an exploratory one without values.

    ``ratio_of`` estimates the ratio of values that have one. ``unreliable`` is the reason why its values, where
    they are known, decide nothing.
    """
    a, b = sides
    metric = METRICS[name]
    if role == "exact":
        return MetricComparison(metric=metric, role=role, verdict=_equality(a, b, rules), a_blocks=a, b_blocks=b)
    if role == "exploratory" and all(value is None for value in (*a, *b)):
        return None
    unjudged = MetricComparison(
        metric=metric,
        role=role,
        verdict="inconclusive",
        a_blocks=a,
        b_blocks=b,
        margins=rules.margins_of(name),
        limits=limits,
    )
    if rules.is_paired:
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        a_values, b_values = [x for x, _ in pairs], [y for _, y in pairs]
    else:
        a_values, b_values = [x for x in a if x is not None], [y for y in b if y is not None]
    if not a_values or not b_values:
        return replace(unjudged, verdict="unknown", reason="; ".join((*limits, f"needs {metric.needs}")))
    if min(*a_values, *b_values) <= 0 and len({*a_values, *b_values}) == 1:
        return replace(unjudged, verdict="equal")
    ratio = None if min(*a_values, *b_values) <= 0 else ratio_of()
    if ratio is None:
        return replace(unjudged, reason="; ".join((*limits, "a value of zero has no ratio")))
    is_equal = rules.is_paired and role == "exploratory" and a_values == b_values  # any number of blocks shows that
    estimated = replace(
        unjudged,
        verdict="equal" if is_equal and unreliable is None else "inconclusive",
        reason=None if unreliable is None else "; ".join((*limits, unreliable)),
        is_unreliable=unreliable is not None,
        estimate=ratio.estimate,
        is_screening=min(len(a_values), len(b_values)) < rules.min_blocks,
        judged_confidence=rules.confidence,
    )
    return _with_blocks(estimated, ratio, rules) if rules.is_paired else estimated


def _equality(a: Blocks, b: Blocks, rules: Rules) -> MetricVerdict:
    """Equal in every block, or different: a count has no noise."""
    if not a or not b or None in (*a, *b):
        return "unknown"
    is_equal = a == b if rules.is_paired else len({*a, *b}) == 1
    return "equal" if is_equal else "different"


def _with_blocks(estimated: MetricComparison, ratio: SideRatio, rules: Rules) -> MetricComparison:
    """The comparison of paired sides: with the effects of their order, and their outliers."""
    design, outliers = ratio.design, outlier_indices(ratio.log_ratios)
    without = None
    if outliers:
        others = [i for i in range(len(ratio.a_values)) if i not in outliers]
        a_others, b_others = ([side[i] for i in others] for side in (ratio.a_values, ratio.b_values))
        own = design.select(others), ratio.slope, rules.confidence, rules.estimator
        without = side_ratio(a_others, b_others, *own)
    a, b = ([math.log(value) for value in side] for side in (ratio.a_values, ratio.b_values))
    return replace(
        estimated,
        a_level=ratio.a,
        blocks=design.blocks,
        order=order_effects(a, b, design.blocks, design.positions),
        outlier_blocks=tuple(design.blocks[i] for i in outliers),
        without_outliers=None if without is None else without.estimate,
    )


def judge_metric(comparison: MetricComparison, confidence: float) -> MetricComparison:
    """``comparison`` with the verdict of its interval at ``confidence``, and the reason where there is none.

    One without an estimate, with equal values or that must not decide stays as it is.
    """
    if comparison.estimate is None or comparison.is_unreliable or comparison.verdict == "equal":
        return comparison
    verdict = _verdict_at(comparison, confidence)
    reason = None
    if verdict == "inconclusive":
        why = why_inconclusive(comparison, comparison.estimate, confidence)
        reason = "; ".join((*comparison.limits, why))
    return replace(comparison, verdict=verdict, reason=reason, judged_confidence=confidence)


def _verdict_at(comparison: MetricComparison, confidence: float) -> Verdict:
    if comparison.estimate is None or comparison.is_screening:
        return "inconclusive"
    return verdict_of(comparison.estimate, comparison.margins, comparison.metric.direction, confidence)


def judge_together(
    cells: Sequence[Sequence[MetricComparison]], confidence: float
) -> tuple[tuple[MetricComparison, ...], ...]:
    """The metrics of all cells with their verdicts; the chance that any deciding one is wrong is 1 - confidence."""
    tests = [
        (c, i, metric)
        for c, metrics in enumerate(cells)
        for i, metric in enumerate(metrics)
        if metric.role == "deciding" and metric.estimate is not None and not metric.is_unreliable
    ]
    levels = _levels([metric for _, _, metric in tests], 1 - confidence)
    level_of = {(c, i): level for (c, i, _), level in zip(tests, levels, strict=True)}
    return tuple(
        tuple(judge_metric(metric, 1 - level_of.get((c, i), 1 - confidence)) for i, metric in enumerate(metrics))
        for c, metrics in enumerate(cells)
    )


def _levels(metrics: Sequence[MetricComparison], alpha: float) -> tuple[float, ...]:
    """The alpha of each test: joint where the sides share blocks, Holm's where they do not."""
    scores = {i: scores for i, metric in enumerate(metrics) if (scores := _block_scores(metric)) is not None}
    if not scores:
        p_values = [  # 1 where there are too few blocks for a verdict
            1.0 if m.estimate is None or m.is_screening else decision_alpha(m.estimate, m.margins) for m in metrics
        ]
        return holm_levels(p_values, alpha)
    indices = list(scores)

    def decides(test: int, level: float) -> bool:
        return _verdict_at(metrics[indices[test]], 1 - level) != "inconclusive"

    levels = [alpha] * len(metrics)
    for i, level in zip(indices, joint_levels(list(scores.values()), decides, alpha), strict=True):
        levels[i] = level
    return tuple(levels)


def _block_scores(metric: MetricComparison) -> BlockScores | None:
    """The contribution of each block to the estimate; None where the sides share none, or too few for a verdict."""
    estimate = metric.estimate
    if estimate is None or not estimate.block_weights or metric.is_screening:
        return None
    by_block = zip(metric.blocks, estimate.block_weights, estimate.residuals, strict=True)
    return {block: weight * residual for block, weight, residual in by_block}


def why_inconclusive(comparison: MetricComparison, estimate: RatioEstimate, confidence: float) -> str:
    """The reason why there is no verdict, and the number of blocks that would give one where that is known."""
    margins = comparison.margins
    if comparison.is_screening:
        least = MIN_PAIRED_BLOCKS if estimate.is_paired else MIN_UNPAIRED_BLOCKS
        each = "" if estimate.is_paired else " on each side"
        number = "1 block gives" if estimate.num_blocks == 1 else f"{estimate.num_blocks} blocks give"
        return f"screening: {number} no verdict; at least {least}{each} are needed"
    if margins.leave_between(estimate.log_ratio):
        return _why_never(estimate, margins, confidence)
    margin = _margin_across(estimate, margins)
    where = f"the interval reaches across {margin}"
    if verdict_of(estimate, margins, "none") != "inconclusive":
        where = (
            f"the {percentage(estimate.confidence)} interval is clear of {margin}, but not that of "
            f"{percentage(confidence, 4)}, which so many tests require"
        )
    needed = blocks_for_verdict(estimate, margins, confidence)
    if needed is None:
        return (
            f"{where}; not even {MAX_BLOCKS_NEEDED} blocks would give a verdict: the scatter is too large, or the "
            "change too close to the margin"
        )
    more = max(1, needed - estimate.num_blocks)
    blocks = "1 more block" if more == 1 else f"{more} more blocks"
    return f"{where}; about {blocks}, if ratio and scatter stay as they are"


def _margin_across(estimate: RatioEstimate, margins: Margins) -> str:
    """The margin that the ratio has to clear: of equivalence from inside, or of a change from outside."""
    if abs(estimate.log_ratio) < margins.log_equivalence:
        return f"the margin of {percentage(margins.equivalence_frac)}"
    return f"the {'noise floor' if margins.is_noise_floor else 'margin'} of {percentage(margins.change_frac)}"


def _why_never(estimate: RatioEstimate, margins: Margins, confidence: float) -> str:
    """The reason for a ratio between equivalence and change margin, where no number of blocks helps."""
    low, high = estimate.interval_at(confidence) or (-math.inf, math.inf)
    is_between = margins.leave_between(low) and margins.leave_between(high) and low * high > 0
    what = "interval" if is_between else "ratio"
    between = f"the {what} is between the margin of {percentage(margins.equivalence_frac)} and the"
    change = percentage(margins.change_frac)
    if not margins.is_noise_floor:
        return f"{between} threshold of {change}: too large for equivalent, too small to count"
    return (
        f"{between} noise floor of {change}: more blocks will not help while that floor holds; measure the floor "
        "with more blocks, or on a quieter machine (benchctl run NAME --aa --blocks N)"
    )
