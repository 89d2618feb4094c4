"""One metric of both sides in one cell: its values, their ratio, and the verdict and reason that follow from them.

Every deciding metric in every cell is a chance to be wrong, so the confidence that a verdict needs is found for all
of them together (``judge_together``); it is the one thing that a metric takes from the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import Final, Literal, TypeAlias

from benchctl.analysis.compare.decide import (
    BlockScores,
    Margins,
    Verdict,
    blocks_for_verdict,
    decision_alpha,
    holm_levels,
    joint_level,
    margins_of,
    verdict_of,
)
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.metrics.table import ALL_METRICS, METRICS, Metric
from benchctl.analysis.statistics.components import MAX_BLOCKS_NEEDED
from benchctl.analysis.statistics.estimate import (
    MIN_PAIRED_BLOCKS,
    MIN_UNPAIRED_BLOCKS,
    RatioEstimate,
    SideRatio,
    scatter_of,
)
from benchctl.analysis.statistics.intervals import OrderEffects, order_effects
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
    """Margins and confidence by which all metrics of a comparison are judged."""

    margin_frac: float
    """The threshold."""
    confidence: float
    """Of the intervals, corrected for the looks at which the experiment could have ended."""
    is_paired: bool
    """The sides share blocks."""
    noise: Mapping[str, MetricNoise]
    """Noise of this machine by metric, from an A/A experiment."""
    noise_source: str = ""
    """The file that it comes from, and the A/A experiment that measured it."""
    equivalence_margin_frac: float | None = None
    """Inside it two sides are equivalent; None: inside the threshold."""

    @property
    def min_blocks(self) -> int:
        """Fewer are a screening: no verdict."""
        return MIN_PAIRED_BLOCKS if self.is_paired else MIN_UNPAIRED_BLOCKS


Blocks: TypeAlias = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric of both sides with its verdict."""

    metric: Metric
    role: Role
    rules: Rules
    a_blocks: Blocks
    b_blocks: Blocks
    ratio: SideRatio | None = None
    """None of an exact metric, of one without values, and where a value is not positive."""
    judged_confidence: float | None = None
    """Confidence of the interval that makes the verdict: higher than the shown one where several tests are made.
    None without a ratio."""
    limits: tuple[str, ...] = ()
    """What limits its values; comes first in the reason wherever there is no verdict."""
    unreliable: str | None = None
    """The reason why its values, where they are known, decide nothing."""

    @property
    def estimate(self) -> RatioEstimate | None:
        return None if self.ratio is None else self.ratio.estimate

    @cached_property
    def margins(self) -> Margins:
        """Beyond which a change is called, and inside which equivalence; a noise floor widens the former alone."""
        if self.role == "exact":
            return Margins(0.0, 0.0)
        rules, name = self.rules, self.metric.name
        noise = rules.noise.get(name, rules.noise.get(name.removeprefix("steady_")))
        return margins_of(
            rules.margin_frac, 0.0 if noise is None else noise.floor_frac, rules.equivalence_margin_frac
        )

    @property
    def is_screening(self) -> bool:
        """Too few blocks for any verdict."""
        return self.ratio is not None and self.ratio.estimate.num_blocks < self.rules.min_blocks

    @property
    def tends_to_regress(self) -> bool:
        """Its ratio, though not yet its interval, is beyond the margin of a change on the worse side."""
        log_ratio = 0.0 if self.ratio is None else self.ratio.estimate.log_ratio
        worse = log_ratio if self.metric.direction == "lower" else -log_ratio
        return worse > self.margins.log_change

    @property
    def is_unreliable(self) -> bool:
        """Its runs carry a warning that its values cannot be trusted: it decides nothing."""
        return self.ratio is not None and self.unreliable is not None

    @property
    def is_test(self) -> bool:
        """It takes part in the verdict: a chance to be wrong."""
        return self.role == "deciding" and self.ratio is not None and self.unreliable is None

    @property
    def a(self) -> float | None:
        """The centre of A over the blocks that both know; without a ratio, the mean of its values."""
        return _mean_of(self.a_blocks) if self.ratio is None else self.ratio.a

    @property
    def b(self) -> float | None:
        """As ``a``, so that b / a is the ratio. Of sides that share no blocks, the geometric mean as measured."""
        return self.ratio.b if self.ratio is not None and self.rules.is_paired else _mean_of(self.b_blocks)

    @property
    def scatters(self) -> tuple[float | None, float | None]:
        """The scatter of each side around its centre, over the same blocks and with the same weights."""
        if self.ratio is None or not self.ratio.estimate.block_weights:
            return scatter_of(known_values(self.a_blocks)), scatter_of(known_values(self.b_blocks))
        weights = self.ratio.estimate.block_weights
        return scatter_of(self.ratio.a_values, weights), scatter_of(self.ratio.b_values, weights)

    @cached_property
    def order(self) -> OrderEffects | None:
        """Effects of the order of runs and blocks; None where the sides share none."""
        if self.ratio is None or not self.rules.is_paired:
            return None
        a, b = ([math.log(value) for value in side] for side in (self.ratio.a_values, self.ratio.b_values))
        return order_effects(a, b, self.ratio.design.blocks, self.ratio.design.positions)

    @property
    def outlier_blocks(self) -> tuple[int, ...]:
        """Blocks that stand out; they count as well."""
        if self.ratio is None or not self.rules.is_paired:
            return ()
        return tuple(self.ratio.design.blocks[i] for i in self.ratio.outliers)

    @cached_property
    def without_outliers(self) -> RatioEstimate | None:
        """The estimate without them; None where there are none."""
        return self.ratio.without_outliers() if self.ratio is not None and self.rules.is_paired else None

    @property
    def verdict(self) -> MetricVerdict:
        return self._judgement[0]

    @property
    def reason(self) -> str | None:
        """The reason where there is no verdict."""
        why = self._judgement[1]
        return None if why is None else "; ".join((*self.limits, why))

    @cached_property
    def _judgement(self) -> tuple[MetricVerdict, str | None]:
        """The verdict, and the reason where there is none."""
        if self.role == "exact":
            return _equality(self.a_blocks, self.b_blocks, is_paired=self.rules.is_paired), None
        a, b = _comparable_values(self.a_blocks, self.b_blocks, is_paired=self.rules.is_paired)
        if not a or not b:
            return "unknown", f"needs {self.metric.needs}"
        if self.unreliable is not None:
            return "inconclusive", self.unreliable
        if self.ratio is None:
            return ("equal", None) if len({*a, *b}) == 1 else ("inconclusive", "a value of zero has no ratio")
        if self.rules.is_paired and self.role == "exploratory" and a == b:  # any number of blocks shows that
            return "equal", None
        confidence = self.judged_confidence or self.rules.confidence
        verdict = self.verdict_at(confidence)
        is_open = verdict == "inconclusive"
        return verdict, why_inconclusive(
            self.ratio.estimate, self.margins, self.rules, confidence
        ) if is_open else None

    def verdict_at(self, confidence: float) -> Verdict:
        """The verdict of the interval at a confidence; that of a screening, or without a ratio, is inconclusive."""
        if self.ratio is None or self.is_screening:
            return "inconclusive"
        return verdict_of(self.ratio.estimate.interval_at(confidence), self.margins, self.metric.direction)

    @property
    def verdict_p(self) -> float:
        """The least alpha at which the interval of 1 - alpha decides; 1 where there are too few blocks for that."""
        return 1.0 if self.ratio is None or self.is_screening else decision_alpha(self.ratio.estimate, self.margins)

    @property
    def block_scores(self) -> BlockScores:
        """The contribution of each block to the estimate; none of a screening, and where the sides share none."""
        if self.ratio is None or self.is_screening:
            return {}
        return self.ratio.estimate.block_scores(self.ratio.design.blocks)


def _mean_of(values: Blocks) -> float | None:
    """Geometric mean of the known values, arithmetic where one is not positive, None where none is known."""
    numbers = known_values(values)
    if not numbers:
        return None
    return geometric_mean(numbers) if min(numbers) > 0 else fmean(numbers)


def _comparable_values(a: Blocks, b: Blocks, *, is_paired: bool) -> tuple[list[float], list[float]]:
    """The known values of each side: of paired sides those of the blocks that both know."""
    if not is_paired:
        return known_values(a), known_values(b)
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _equality(a: Blocks, b: Blocks, *, is_paired: bool) -> MetricVerdict:
    """Equal in every block, or different: a count has no noise."""
    if not a or not b or None in (*a, *b):
        return "unknown"
    is_equal = a == b if is_paired else len({*a, *b}) == 1
    return "equal" if is_equal else "different"


def roles_of(deciding: Sequence[str], *, is_forced: bool) -> dict[str, Role]:
    """Role of each metric, deciding ones first."""
    exact = {name for name, metric in METRICS.items() if metric.is_exact or (is_forced and name in FORCED_EXACT)}
    roles: dict[str, Role] = dict.fromkeys((name for name in deciding if name not in exact), "deciding")
    roles |= dict.fromkeys((name for name in METRICS if name in exact), "exact")
    return roles | dict.fromkeys((name for name in METRICS if name not in roles), "exploratory")


def compare_metric(
    name: str,
    role: Role,
    sides: tuple[Blocks, Blocks],
    rules: Rules,
    ratio: SideRatio | None,
    *,
    limits: tuple[str, ...] = (),
    unreliable: str | None = None,
) -> MetricComparison | None:
    """One metric of both sides, judged as if it was the only test; None for an exploratory one without values.

    ``ratio`` is that of the positive values; where others are known as well, the metric has none.
    """
    a, b = sides
    if role == "exploratory" and not known_values((*a, *b)):
        return None
    values = [value for side in _comparable_values(a, b, is_paired=rules.is_paired) for value in side]
    if role == "exact" or min(values, default=0.0) <= 0:
        ratio = None
    return MetricComparison(
        metric=ALL_METRICS[name],
        role=role,
        rules=rules,
        a_blocks=a,
        b_blocks=b,
        ratio=ratio,
        judged_confidence=None if ratio is None else rules.confidence,
        limits=limits,
        unreliable=unreliable,
    )


def judge_together(
    cells: Sequence[Sequence[MetricComparison]], confidence: float
) -> tuple[tuple[MetricComparison, ...], ...]:
    """The metrics of all cells, each test at the confidence with which the chance that any verdict is wrong is
    1 - ``confidence``: joint where the sides share blocks, Holm's where they do not.
    """
    alpha = 1 - confidence
    tests = [metric for metrics in cells for metric in metrics if metric.is_test]
    joint = [test for test in tests if test.block_scores]
    if joint:
        levels = dict.fromkeys(map(id, tests), alpha) | _joint_levels(joint, alpha)
    else:
        levels = dict(zip(map(id, tests), holm_levels([test.verdict_p for test in tests], alpha), strict=True))
    return tuple(
        tuple(
            replace(metric, judged_confidence=1 - levels[id(metric)]) if id(metric) in levels else metric
            for metric in metrics
        )
        for metrics in cells
    )


def _joint_levels(tests: Sequence[MetricComparison], alpha: float) -> dict[int, float]:
    """The alpha of each test by its id: that of all tests for those that decide at it, then that of the others.

    It ends where none of the others decides.
    """
    levels: dict[int, float] = {}
    level, remaining = 0.0, list(tests)
    while remaining:
        level = max(level, joint_level([test.block_scores for test in remaining], alpha))
        levels |= dict.fromkeys(map(id, remaining), level)
        undecided = [test for test in remaining if test.verdict_at(1 - level) == "inconclusive"]
        if len(undecided) == len(remaining):
            break
        remaining = undecided
    return levels


def why_inconclusive(estimate: RatioEstimate, margins: Margins, rules: Rules, confidence: float) -> str:
    """The reason why there is no verdict."""
    if estimate.num_blocks < rules.min_blocks:
        each = "" if rules.is_paired else " on each side"
        number = "1 block gives" if estimate.num_blocks == 1 else f"{estimate.num_blocks} blocks give"
        return f"screening: {number} no verdict; at least {rules.min_blocks}{each} are needed"
    if margins.leave_between(estimate.log_ratio):
        return _why_never(estimate, margins, confidence)
    margin = _margin_across(estimate, margins)
    where = f"the interval reaches across {margin}"
    if verdict_of(estimate.log_interval, margins, "none") != "inconclusive":
        where = (
            f"the {percentage(estimate.confidence)} interval is clear of {margin}, but not that of "
            f"{percentage(confidence, 4)}, which so many tests require"
        )
    if blocks_for_verdict(estimate, margins, confidence) is None:
        return (
            f"{where}; not even {MAX_BLOCKS_NEEDED} blocks would give a verdict: the scatter is too large, or the "
            "change too close to the margin"
        )
    return where


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
