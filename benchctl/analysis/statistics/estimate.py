"""Ratios over blocks, with the interval and the test of one model: the answer to "is the change real?".

The ratio of one quantity between two paired arms, with the means that it is the quotient of.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, geometric_mean, median, variance
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.intervals import (
    POWER,
    Interval,
    PairwiseShifts,
    StudentT,
    outlier_indices,
    t_quantile,
)
from benchctl.analysis.statistics.robust import OutlierMixture, PositionCovariate, estimate_mixture

MIN_PAIRED_BLOCKS: Final = 6
"""Fewer give no verdict: with five, the sign-flip test cannot reach p < 0.05."""
MIN_INTERVAL_BLOCKS: Final = 3
"""Fewer give no interval: the t quantile of two blocks is 12.7, so that theirs says nothing."""
MIN_UNPAIRED_BLOCKS: Final = 4
"""On each side; with three, the Mann-Whitney test cannot reach p < 0.05."""
SURPRISING_P: Final = 0.01
"""Effects of the order of runs or loads are reported where their p-value, over all tests, is below it."""

Estimator = Literal["robust", "mean"]
"""Average of the differences of the blocks."""
DEFAULT_ESTIMATOR: Final[Estimator] = "robust"
Uncertainty: TypeAlias = StudentT | PairwiseShifts | OutlierMixture
Values: TypeAlias = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class PooledSlope:
    """The effect of one position later in the block on the logarithm of a run, from all arms of a directory.

    Least squares of log value = block + arm + slope * position over all usable runs.
    """

    log_per_position: float
    information: float
    """Szz: the sum of squares of the positions after regression on blocks and arms; the variance of the slope is
    that of a run, divided by Szz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """The ratio of B over A; its interval, test and minimum detectable effect are None for one or two blocks.

    Invariant: ``ci_low <= ratio <= ci_high`` where they are known.
    """

    num_blocks: int
    """That of the smaller side."""
    is_paired: bool
    confidence: float
    log_ratio: float
    estimator: Estimator | None = None
    """None where the sides share no blocks."""
    uncertainty: Uncertainty | None = None
    position_effect: float | None = None
    """Effect of one position later in the block on a log value; None where it was not removed."""
    block_weights: tuple[float, ...] = ()
    """w with log_ratio = sum of w_b (d_b - position_effect * x_b) over the blocks; they add up to 1.

    Where these blocks alone gave the effect, the weights remove it: log_ratio = sum of w_b d_b.
    """
    residuals: tuple[float, ...] = ()
    """Difference of each block minus ratio and position effect."""

    @property
    def method(self) -> str:
        """Method of the interval: ``t``, ``robust`` or ``hodges-lehmann``."""
        return StudentT.method if self.uncertainty is None else self.uncertainty.method

    @property
    def p_value(self) -> float | None:
        """The least alpha at which the interval of 1 - alpha excludes "no change"."""
        return None if self.uncertainty is None else self.uncertainty.p_value()

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def standard_error(self) -> float | None:
        return None if self.uncertainty is None else self.uncertainty.standard_error

    def interval_at(self, confidence: float) -> Interval | None:
        """Bounds of the log-ratio at another confidence; None where there are too few blocks for it."""
        return None if self.uncertainty is None else self.uncertainty.interval(confidence)

    @property
    def log_interval(self) -> Interval | None:
        return self.interval_at(self.confidence)

    def block_scores(self, blocks: Sequence[int]) -> dict[int, float]:
        """The contribution of each of its ``blocks`` beyond the centre; empty where the sides share none."""
        by_block = zip(blocks, self.block_weights, self.residuals, strict=True) if self.block_weights else ()
        return {block: weight * residual for block, weight, residual in by_block}

    @property
    def half_width(self) -> float | None:
        """Half the interval in logarithms."""
        interval = self.log_interval
        return None if interval is None else (interval[1] - interval[0]) / 2

    @property
    def ci_low(self) -> float | None:
        return None if self.log_interval is None else math.exp(self.log_interval[0])

    @property
    def ci_high(self) -> float | None:
        return None if self.log_interval is None else math.exp(self.log_interval[1])

    @property
    def minimum_detectable_effect(self) -> float | None:
        """Smallest change, as a fraction, that these blocks detect with a power of 0.8.

        exp((t(1 - alpha / 2) + t(power)) * standard error) - 1.
        """
        if self.uncertainty is None:
            return None
        df = self.uncertainty.degrees_of_freedom
        both = t_quantile(1 - (1 - self.confidence) / 2, df) + t_quantile(POWER, df)
        return math.expm1(both * self.uncertainty.standard_error)


def log_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """d_b = ln(B_b / A_b) for each block. Both sides are positive and of one length."""
    return tuple(math.log(after) - math.log(before) for before, after in zip(a, b, strict=True))


def estimate_paired(
    differences: Sequence[float],
    confidence: float = 0.95,
    positions: Sequence[float] | None = None,
    *,
    slope: PooledSlope | None = None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    evidence: Sequence[float] | None = None,
) -> RatioEstimate:
    """The centre of the block log-ratios, its interval and its test.

    ``positions`` is, for each block, the position of B in it less that of A; where they vary over at least 6 blocks
    the estimate is the ratio at equal positions. Their effect is ``slope``, or, where that is None, estimated from
    these blocks (analysis of covariance).

    ``evidence`` are differences of the same blocks, without the effect of a pooled slope, that determine the
    outliers; None: ``differences``. Parts that add up in every block add up in estimates with one evidence.
    """
    n = len(differences)
    if n < MIN_INTERVAL_BLOCKS:
        centre = fmean(differences)
        return RatioEstimate(
            num_blocks=n,
            is_paired=True,
            confidence=confidence,
            log_ratio=centre,
            estimator="mean",
            block_weights=(1 / n,) * n,
            residuals=tuple(difference - centre for difference in differences),
        )
    d, covariate = np.asarray(differences, dtype=float), None
    if positions is not None and n >= MIN_PAIRED_BLOCKS and any(positions) and (slope or len(set(positions)) > 1):
        x = np.asarray(positions, dtype=float)
        covariate = PositionCovariate(x, None if slope is None else slope.information)
        d = d if slope is None else d - slope.log_per_position * x
    uncertainty: Uncertainty
    if estimator == "mean" or n < MIN_PAIRED_BLOCKS:
        estimator = "mean"
        uncertainty, weights, effect = _estimate_mean(d, covariate)
    else:
        uncertainty, weights, effect = estimate_mixture(d, covariate, evidence)
    centre = float(weights @ d)
    fitted = centre if covariate is None or effect is None else centre + effect * covariate.x
    return RatioEstimate(
        num_blocks=n,
        is_paired=True,
        confidence=confidence,
        log_ratio=centre,
        estimator=estimator,
        uncertainty=uncertainty,
        position_effect=effect if slope is None or covariate is None else slope.log_per_position,
        block_weights=tuple(weights.tolist()),
        residuals=tuple((d - fitted).tolist()),
    )


def _estimate_mean(
    d: NDArray[np.float64], covariate: PositionCovariate | None
) -> tuple[StudentT, NDArray[np.float64], float | None]:
    """The t interval of the mean, the weights of the blocks, and the effect of the position where they give it.

    With the slope of these blocks: the intercept of d = mu + beta * x, n - 2 degrees of freedom, and variance
    s^2 (1/n + mean(x)^2 / Sxx). With a pooled slope, subtracted already: n - 1 - q degrees of freedom, q the share
    of its information Szz that is these blocks' own, and s^2 (1/n + mean(x)^2 / (2 Szz)); by Gauss and Markov the
    sum of squares that remains has the expectation sigma^2 (n - 1 - q). Without positions: n - 1 and s^2 / n.
    """
    n, off_d = len(d), d - d.mean()
    weights, effect, own_share, extra = np.full(n, 1 / n), None, 0.0, 0.0
    if covariate is not None:
        x, off_x = covariate.x, covariate.x - covariate.x.mean()
        squares, own_share = float(off_x @ off_x), covariate.own_share
        information = squares / 2 if covariate.information is None else covariate.information
        extra = float(x.mean()) ** 2 / (2 * information)
        if covariate.information is None:
            effect = float(off_x @ off_d) / squares
            off_d = off_d - effect * off_x
            weights = weights - x.mean() * off_x / squares
    df = n - 1 - own_share
    standard_error = math.sqrt(float(off_d @ off_d) / df * (1 / n + extra))
    return StudentT(float(weights @ d), standard_error, df), weights, effect


@dataclass(frozen=True, slots=True)
class BlockDesign:
    """The block of each value, and the positions in it whose effect a ratio is freed from.

    Without ``positions`` it is freed from none, without ``slope`` from the effect that these blocks show.
    """

    blocks: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    """Position of B minus that of A."""
    a_offsets: tuple[float, ...] | None = None
    """Position of A minus the middle of the block."""
    slope: PooledSlope | None = None
    """Effect of one position later in the block, from all arms of the experiment."""

    def select(self, indices: Sequence[int]) -> "BlockDesign":
        """The design of the values at ``indices``."""
        return BlockDesign(
            tuple(self.blocks[i] for i in indices),
            None if self.positions is None else tuple(self.positions[i] for i in indices),
            None if self.a_offsets is None else tuple(self.a_offsets[i] for i in indices),
            self.slope,
        )


UNORDERED = BlockDesign(())
"""The design of values that share no blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRatio:
    """The estimate of B over A over the blocks in which both are known.

    ``a`` is the centre of A: exp of the mean of its logarithms over these blocks, at the middle of the block and
    with the weights of the estimate; ``b`` is that of B, so that b / a is the ratio.
    """

    a: float
    estimate: RatioEstimate
    a_values: tuple[float, ...]
    b_values: tuple[float, ...]
    design: BlockDesign

    @property
    def adjusted_log_ratios(self) -> tuple[float, ...]:
        """ln(B / A) of each block as it would be at equal positions."""
        effect = self.estimate.position_effect
        if effect is None or self.design.positions is None:
            return self.log_ratios
        return tuple(d - effect * x for d, x in zip(self.log_ratios, self.design.positions, strict=True))

    @property
    def log_ratios(self) -> tuple[float, ...]:
        """ln(B / A) of each block as measured."""
        return log_ratios(self.a_values, self.b_values)

    @property
    def block_ratios(self) -> dict[int, float]:
        """B / A by block, as measured."""
        return {block: b / a for block, a, b in zip(self.design.blocks, self.a_values, self.b_values, strict=True)}

    @property
    def outliers(self) -> tuple[int, ...]:
        """Indices of the blocks that stand out; they count as well."""
        return outlier_indices(self.log_ratios)

    def without_outliers(self) -> RatioEstimate | None:
        """The estimate of paired sides without the blocks that stand out; None where none do."""
        outliers = self.outliers
        others = [i for i in range(len(self.a_values)) if i not in outliers]
        if not outliers:
            return None
        a, b = ([side[i] for i in others] for side in (self.a_values, self.b_values))
        estimator = self.estimate.estimator or DEFAULT_ESTIMATOR
        ratio = side_ratio(a, b, self.design.select(others), self.estimate.confidence, estimator)
        return None if ratio is None else ratio.estimate

    @property
    def evidence(self) -> tuple[float, ...] | None:
        """Log-ratios that determine the robust weights of the blocks, the same for all parts of this ratio."""
        if self.estimate.estimator != "robust":
            return None
        return self.log_ratios if self.design.slope is None else self.adjusted_log_ratios

    @property
    def b(self) -> float:
        return self.a * self.estimate.ratio


def side_ratio(
    a: Values,
    b: Values,
    design: BlockDesign,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> SideRatio | None:
    """The ratio over the blocks in which both values are known and positive; None where there are none."""
    shared = [i for i, values in enumerate(zip(a, b, strict=True)) if all(value and value > 0 for value in values)]
    if not shared:
        return None
    a_values, b_values = (tuple(side[i] or 0.0 for i in shared) for side in (a, b))
    design = design.select(shared)
    estimate = estimate_paired(
        log_ratios(a_values, b_values), confidence, design.positions, slope=design.slope, estimator=estimator
    )
    level, effect = a_values[0], estimate.position_effect or 0.0
    if effect or len(set(a_values)) > 1:
        weights = estimate.block_weights or [1.0]
        logs = logs_at_middle(a_values, design.a_offsets, effect)
        level = math.exp(math.fsum(weight * log for weight, log in zip(weights, logs, strict=True)))
    return SideRatio(a=level, estimate=estimate, a_values=a_values, b_values=b_values, design=design)


def logs_at_middle(values: Sequence[float], offsets: Sequence[float] | None, effect: float) -> list[float]:
    """The logarithms of runs as they would be in the middle of their block.

    ``offsets`` are their positions less the middle; None where they are not known, which adjusts nothing.
    """
    shifts = [0.0] * len(values) if offsets is None else [effect * offset for offset in offsets]
    return [math.log(value) - shift for value, shift in zip(values, shifts, strict=True)]


def unpaired_ratio(a: Values, b: Values, confidence: float = 0.95) -> SideRatio | None:
    """Hodges-Lehmann shift of the logarithms of sides that share no blocks: the median of all differences, with the
    Mann-Whitney test. None where a side has no value, or one that is not positive.

    The standard error, which only plans use, is Welch's: se^2 = s_a^2 / n_a + s_b^2 / n_b.
    """
    a_values, b_values = (tuple(value for value in side if value is not None) for side in (a, b))
    if not a_values or not b_values or min(*a_values, *b_values) <= 0:
        return None
    log_a, log_b = ([math.log(value) for value in side] for side in (a_values, b_values))
    log_ratio, uncertainty, sizes = fmean(log_b) - fmean(log_a), None, (len(log_a), len(log_b))
    if min(sizes) >= 2:
        shifts = tuple(sorted(after - before for after in log_b for before in log_a))
        of_a, of_b = variance(log_a) / sizes[0], variance(log_b) / sizes[1]
        spread = of_a**2 / (sizes[0] - 1) + of_b**2 / (sizes[1] - 1)
        df = (of_a + of_b) ** 2 / spread if spread > 0 else float(sum(sizes) - 2)
        log_ratio, uncertainty = median(shifts), PairwiseShifts(shifts, sizes, math.sqrt(of_a + of_b), df)
    estimate = RatioEstimate(
        num_blocks=min(sizes), is_paired=False, confidence=confidence, log_ratio=log_ratio, uncertainty=uncertainty
    )
    return SideRatio(
        a=geometric_mean(a_values), estimate=estimate, a_values=a_values, b_values=b_values, design=UNORDERED
    )


def scatter_of(values: Sequence[float], weights: Sequence[float] = ()) -> float | None:
    """Relative scatter of blocks: standard deviation of the logarithms, weighted as their centre.

    With equal weights, or none, that of a sample. None below two positive values.
    """
    if len(values) < 2 or min(values) <= 0:
        return None
    variance = np.cov(np.log(values), aweights=np.abs(weights) if weights else None)
    return math.sqrt(variance) if len(set(values)) > 1 else 0.0


def level_interval(values: Values, level: float, confidence: float = 0.95) -> Interval | None:
    """Interval of a level over blocks: that of the blocks' values over a constant, around ``level``.

    Where a value is not positive, the level is the arithmetic mean, and this is the interval of that mean. None
    below two values.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if min(numbers) <= 0:
        return estimate_paired(numbers, confidence, estimator="mean").log_interval
    estimate = estimate_paired([math.log(value) for value in numbers], confidence)
    if estimate.log_interval is None:
        return None
    low, high = (level * math.exp(end - estimate.log_ratio) for end in estimate.log_interval)
    return low, high


RunKey: TypeAlias = tuple[int, str]
"""Block and arm of a run."""


def pooled_slope(values: Mapping[RunKey, float | None], positions: Mapping[RunKey, int]) -> PooledSlope | None:
    """The effect of a run's position in its block, estimated once from all runs whose values are positive.

    A machine that drifts within a block makes later runs slower. For the value y of the run of arm j at position p
    of block b, the model is the analysis of variance of a row-column design,

        ln y = block_b + arm_j + β p

    fitted by least squares. With z the positions less what blocks and arms explain of them, β = Σ z y / Σ z²
    (R. Frisch, F. V. Waugh, *Partial time regressions as compared with individual trends*, Econometrica 1, 1933,
    387-401). Every comparison of two arms then removes the same β from both, so that each arm has one mean,
    whatever it is compared with.

    The effect is removed in three places, each with the slope of its own quantity: from the ratio of two arms and
    its two centres (``ArmPair.ratio``), from the parts that their times are divided into (``compare/cells``), and
    from the centre of an arm that is compared with none (``adjusted_level``). Values of single runs are shown as
    measured. None below six blocks, and where the effects of positions and arms are confounded.
    """
    logs = {key: math.log(value) for key, value in values.items() if value and value > 0}
    z, y = _residual_positions(tuple((key, positions[key]) for key in logs)), np.array(list(logs.values()))
    if z is None:
        return None
    information = float(z @ z)
    return PooledSlope(float(z @ (y - y.mean())) / information, information)


@lru_cache(maxsize=64)
def _residual_positions(positions: tuple[tuple[RunKey, int], ...]) -> NDArray[np.float64] | None:
    """z: the positions minus their least-squares fit by blocks and arms."""
    of_blocks, of_arms = [block for (block, _), _ in positions], [arm for (_, arm), _ in positions]
    blocks, arms = sorted(set(of_blocks)), sorted(set(of_arms))
    if len(blocks) < MIN_PAIRED_BLOCKS or len(arms) < 2:
        return None
    in_block = np.eye(len(blocks))[[blocks.index(block) for block in of_blocks]]
    indicators = np.hstack([in_block, np.eye(len(arms))[[arms.index(arm) for arm in of_arms]]])
    p = np.array([position for _, position in positions], dtype=float)
    z: NDArray[np.float64] = p - indicators @ np.linalg.lstsq(indicators, p, rcond=None)[0]
    # Less is rounding: the positions of the runs are fixed by their blocks and arms
    return z if float(z @ z) > 1e-9 else None


def adjusted_level(
    values: Sequence[float],
    offsets: Sequence[float] | None,
    slope: PooledSlope | None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> tuple[float, tuple[float, ...]]:
    """The centre of one arm's values at the middle of a block, exp of that of ln y - β offset, and their weights.

    The centre is that of the ``estimator``: the mean, or one in which outliers count little. ``offsets`` are the
    positions of its runs minus the middle; without them or a slope nothing is adjusted.
    """
    effect = 0.0 if slope is None else slope.log_per_position
    if not effect and len(set(values)) == 1:
        return values[0], ()
    estimate = estimate_paired(logs_at_middle(values, offsets, effect), estimator=estimator)
    return math.exp(estimate.log_ratio), estimate.block_weights
