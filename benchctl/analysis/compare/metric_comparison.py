"""One metric in one cell: the values of each block on both sides, the estimate, the verdict and its reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, stdev
from typing import Final, Literal, TypeAlias

from benchctl.analysis.metrics.table import METRICS, Metric
from benchctl.analysis.statistics.block_order import OrderEffects, order_effects, outlier_indices
from benchctl.analysis.statistics.block_ratio import (
    DEFAULT_ESTIMATOR,
    MIN_PAIRED_BLOCKS,
    MIN_UNPAIRED_BLOCKS,
    Estimator,
    PooledSlope,
    RatioEstimate,
    estimate_unpaired,
    log_ratios,
)
from benchctl.analysis.statistics.margins import Margins, Verdict, margins_of, verdict_of
from benchctl.analysis.statistics.sample_size import MAX_BLOCKS_NEEDED, blocks_for_verdict
from benchctl.analysis.statistics.side_ratio import UNORDERED, BlockDesign, SideRatio, metric_ratio, side_ratio
from benchctl.formats import percentage
from benchctl.records.noise import MetricNoise

MetricVerdict: TypeAlias = Verdict | Literal["equal", "different", "unknown"]
"""``equal`` and ``different`` are those of exact metrics; ``unknown`` is a metric that was not recorded."""

Role: TypeAlias = Literal["deciding", "exact", "exploratory"]
"""``deciding`` metrics make the verdict, ``exact`` ones can only make the comparison invalid."""

FORCED_EXACT: Final = frozenset({"output_tokens"})
"""Exact as well when the length of each output is forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How metrics are judged. ``noise`` is what an A/A experiment of this machine showed, by metric."""

    margin_frac: float
    """The threshold."""
    confidence: float
    is_paired: bool
    noise: Mapping[str, MetricNoise]
    equivalence_margin_frac: float | None = None
    """Inside it two sides are equivalent; None: inside the threshold."""
    estimator: Estimator = DEFAULT_ESTIMATOR
    slopes: Mapping[str, PooledSlope] | None = None
    """The effect of the position on each metric, from all arms of the directory; metrics that are not in it are not
    adjusted. None: each pair of arms estimates its own."""

    def margins_of(self, name: str) -> Margins:
        """A change is called beyond the noise floor of the metric where that exceeds the threshold; equivalence
        never is.
        """
        noise = self.noise.get(name)
        return margins_of(
            self.margin_frac, 0.0 if noise is None else noise.floor_frac, self.equivalence_margin_frac
        )

    @property
    def min_blocks(self) -> int:
        """Fewer are a screening: no verdict."""
        return MIN_PAIRED_BLOCKS if self.is_paired else MIN_UNPAIRED_BLOCKS


NO_MARGINS: Final = Margins(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """``a`` and ``b`` belong to the estimate: of paired sides, geometric means over the blocks that both know, at
    the middle of the block, so that b / a is the ratio. Without an estimate, and of unpaired sides, they are means
    of the values as measured, geometric where all are positive.
    """

    metric: Metric
    role: Role
    verdict: MetricVerdict
    a_blocks: tuple[float | None, ...]
    b_blocks: tuple[float | None, ...]
    estimate: RatioEstimate | None = None
    reason: str | None = None
    blocks: tuple[int, ...] = ()
    """Those of the estimate, in order; empty where the sides share none."""
    margins: Margins = NO_MARGINS
    """Beyond which a change is called, and inside which equivalence."""
    judged_confidence: float | None = None
    """Confidence of the interval that made the verdict: higher than the shown one where several tests are made."""
    order: OrderEffects | None = None
    outlier_blocks: tuple[int, ...] = ()
    """Blocks that stand out. They count all the same."""
    without_outliers: RatioEstimate | None = None
    """What would be estimated without them, where there are any."""
    is_screening: bool = False
    """Too few blocks for any verdict."""
    is_unreliable: bool = False
    """The runs themselves call its values untrustworthy: it decides nothing."""
    num_bounded: tuple[int, int] = (0, 0)
    """Runs of either side in which it is only known between bounds: they do not count for it."""
    a_level: float | None = None
    """Of paired sides: the mean of A that the estimate belongs to."""

    @property
    def margin_frac(self) -> float:
        """The change margin."""
        return self.margins.change_frac

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
    known = [value for value in values if value is not None]
    if not known:
        return None
    return geometric_mean(known) if min(known) > 0 else fmean(known)


def spread_of_blocks(values: Sequence[float | None]) -> float | None:
    """Relative scatter over blocks: standard deviation of the logarithms, None below two positive values."""
    known = [value for value in values if value is not None]
    return stdev(math.log(value) for value in known) if len(known) > 1 and min(known) > 0 else None


def roles_of(deciding: Sequence[str], *, is_forced: bool) -> dict[str, Role]:
    """Role of each metric, deciding ones first. vLLM's second names of the means are left out."""
    exact = {name for name, metric in METRICS.items() if metric.is_exact or (is_forced and name in FORCED_EXACT)}
    aliases = {f"mean_{name}" for name in METRICS}
    roles: dict[str, Role] = dict.fromkeys((name for name in deciding if name not in exact), "deciding")
    roles |= dict.fromkeys((name for name in METRICS if name in exact), "exact")
    others = (name for name in METRICS if name not in roles and name not in aliases)
    return roles | dict.fromkeys(others, "exploratory")


def compare_metrics(
    a_runs: Sequence[Mapping[str, float | None]],
    b_runs: Sequence[Mapping[str, float | None]],
    roles: Mapping[str, Role],
    rules: Rules,
    design: BlockDesign = UNORDERED,
) -> tuple[MetricComparison, ...]:
    """Compare each metric, without a correction for several; exploratory ones without values are left out."""
    found = []
    for name, role in roles.items():
        a_blocks, b_blocks = tuple(run[name] for run in a_runs), tuple(run[name] for run in b_runs)
        if role == "exact":
            compared = _compare_exactly(name, role, a_blocks, b_blocks, rules)
        else:
            compared = _compare_ratio(name, role, (a_blocks, b_blocks), rules, design)
        if role != "exploratory" or any(value is not None for value in (*a_blocks, *b_blocks)):
            found.append(compared)
    return tuple(found)


Blocks: TypeAlias = tuple[float | None, ...]


def _compare_exactly(name: str, role: Role, a: Blocks, b: Blocks, rules: Rules) -> MetricComparison:
    """Equal in every block, or different: a count has no noise."""
    known = None not in (*a, *b) and a and b
    is_equal = a == b if rules.is_paired else len({*a, *b}) == 1
    verdict: MetricVerdict = "unknown" if not known else "equal" if is_equal else "different"
    return MetricComparison(metric=METRICS[name], role=role, verdict=verdict, a_blocks=a, b_blocks=b)


def _compare_ratio(
    name: str,
    role: Role,
    sides: tuple[Blocks, Blocks],
    rules: Rules,
    design: BlockDesign,
) -> MetricComparison:
    a, b = sides
    metric = METRICS[name]
    compared = MetricComparison(
        metric=metric,
        role=role,
        verdict="inconclusive",
        a_blocks=a,
        b_blocks=b,
        margins=rules.margins_of(name),
    )
    if rules.is_paired:
        known = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        known_a, known_b = [x for x, _ in known], [y for _, y in known]
    else:
        known_a, known_b = [v for v in a if v is not None], [v for v in b if v is not None]
    if not known_a or not known_b:
        return replace(compared, verdict="unknown", reason=f"needs {metric.needs}")
    if min(*known_a, *known_b) <= 0:
        if len({*known_a, *known_b}) == 1:
            return replace(compared, verdict="equal")
        return replace(compared, reason="a value of zero has no ratio")
    if not rules.is_paired:
        estimate = estimate_unpaired(known_a, known_b, rules.confidence)
        is_screening = min(len(known_a), len(known_b)) < rules.min_blocks
        return judge_metric(replace(compared, estimate=estimate, is_screening=is_screening), rules.confidence)
    ratio = metric_ratio(name, a, b, design, rules.slopes, rules.confidence, rules.estimator)
    return compared if ratio is None else judge_metric(_paired(compared, ratio, rules), rules.confidence)


def _paired(compared: MetricComparison, ratio: SideRatio, rules: Rules) -> MetricComparison:
    design, differences = ratio.design, log_ratios(ratio.a_values, ratio.b_values)
    odd = outlier_indices(differences)
    a, b = ([math.log(value) for value in side] for side in (ratio.a_values, ratio.b_values))
    return replace(
        compared,
        estimate=ratio.estimate,
        a_level=ratio.a,
        blocks=design.blocks,
        is_screening=len(differences) < rules.min_blocks,
        order=order_effects(a, b, design.blocks, design.positions),
        outlier_blocks=tuple(design.blocks[i] for i in odd),
        without_outliers=_without(odd, ratio, rules) if odd else None,
    )


def _without(odd: Sequence[int], ratio: SideRatio, rules: Rules) -> RatioEstimate | None:
    kept = [i for i in range(len(ratio.a_values)) if i not in odd]
    a, b = ([side[i] for i in kept] for side in (ratio.a_values, ratio.b_values))
    without = side_ratio(a, b, ratio.design.only(kept), ratio.slope, rules.confidence, rules.estimator)
    return None if without is None else without.estimate


def judge_metric(compared: MetricComparison, confidence: float) -> MetricComparison:
    """With the verdict of the interval of ``confidence``, and why where there is none."""
    if compared.estimate is None:
        return compared
    estimate = compared.estimate
    verdict: Verdict = "inconclusive"
    if not compared.is_screening:
        verdict = verdict_of(estimate, compared.margins, compared.metric.direction, confidence)
    reason = why_inconclusive(compared, confidence) if verdict == "inconclusive" else None
    return replace(compared, verdict=verdict, reason=reason, judged_confidence=confidence)


def why_inconclusive(compared: MetricComparison, confidence: float) -> str:
    """What is missing for a verdict, in blocks where that can be said."""
    estimate, margins = compared.estimate, compared.margins
    if estimate is None:
        return "nothing was estimated"
    least = MIN_PAIRED_BLOCKS if estimate.is_paired else MIN_UNPAIRED_BLOCKS
    if compared.is_screening:
        each = "" if estimate.is_paired else " on each side"
        number = "1 block gives" if estimate.num_blocks == 1 else f"{estimate.num_blocks} blocks give"
        return f"screening: {number} no verdict; at least {least}{each} are needed"
    if margins.leave_between(estimate.log_ratio):
        return _why_never(estimate, margins, confidence)
    where = f"the interval reaches across {_margin_across(estimate, margins)}"
    if verdict_of(estimate, margins, "none") != "inconclusive":
        where = (
            f"the {percentage(estimate.confidence)} interval is clear of {_margin_across(estimate, margins)}, but "
            f"not that of {percentage(confidence, 4)}, which so many tests ask for"
        )
    needed = blocks_for_verdict(estimate, margins, confidence)
    if needed is None:
        return (
            f"{where}; not even {MAX_BLOCKS_NEEDED} blocks would tell: the scatter is too large, or the change "
            "too close to the margin"
        )
    more = max(1, needed - estimate.num_blocks)
    blocks = "1 more block" if more == 1 else f"{more} more blocks"
    return f"{where}; about {blocks}, if ratio and scatter stay as they are"


def _margin_across(estimate: RatioEstimate, margins: Margins) -> str:
    """The margin that the ratio would have to clear: inside the one of equivalence, or beyond that of a change."""
    if abs(estimate.log_ratio) < margins.log_equivalence:
        return f"the margin of {percentage(margins.equivalence_frac)}"
    return f"the {_change_margin(margins)}"


def _change_margin(margins: Margins) -> str:
    what = "noise floor" if margins.is_noise_floor else "margin"
    return f"{what} of {percentage(margins.change_frac)}"


def _why_never(estimate: RatioEstimate, margins: Margins, confidence: float) -> str:
    """Between equivalence and change margin: the machine, not the number of blocks, is what is missing."""
    low, high = estimate.interval_at(confidence) or (-math.inf, math.inf)
    is_between = margins.leave_between(low) and margins.leave_between(high) and low * high > 0
    what = "interval" if is_between else "ratio"
    lies = f"the {what} lies between the margin of {percentage(margins.equivalence_frac)} and the"
    if not margins.is_noise_floor:
        return (
            f"{lies} threshold of {percentage(margins.change_frac)}: too large for equivalent, too small to count"
        )
    return (
        f"{lies} {_change_margin(margins)}: no number of blocks tells while that floor stands; measure it with "
        "more blocks, or on a quieter machine (benchctl run --profile aa --blocks N)"
    )
