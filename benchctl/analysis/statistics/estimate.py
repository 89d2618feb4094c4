"""The fewest blocks that give a verdict; fewer are a screening. Imports neither numpy nor scipy, which are slow.

Ratios over blocks, with the interval and the test of one model: the answer to "is the change real?".
The ratio of one quantity between two paired arms, with the means that it is the quotient of.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, median, variance
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.metrics.table import POSITION_ADJUSTED
from benchctl.analysis.statistics.intervals import (
    Interval,
    PairwiseShifts,
    StudentT,
    Uncertainty,
    pairwise_shifts,
    t_quantile,
)
from benchctl.analysis.statistics.robust import PositionCovariate, estimate_mixture

MIN_PAIRED_BLOCKS: Final = 6
"""With five, the sign-flip test cannot reach p < 0.05."""
MIN_UNPAIRED_BLOCKS: Final = 4
"""On each side; with three, the Mann-Whitney test cannot reach p < 0.05."""


__all__ = [
    "DEFAULT_ESTIMATOR",
    "ESTIMATORS",
    "MIN_PAIRED_BLOCKS",
    "MIN_UNPAIRED_BLOCKS",
    "Estimator",
    "PooledSlope",
    "RatioEstimate",
    "estimate_paired",
    "estimate_unpaired",
    "log_ratios",
    "t_quantile",
]

Estimator = Literal["robust", "mean"]
"""Average of the differences of the blocks."""
ESTIMATORS: Final[tuple[Estimator, ...]] = get_args(Estimator)
Method = Literal["t", "robust", "hodges-lehmann"]
"""Method of an interval."""

DEFAULT_ESTIMATOR: Final[Estimator] = "robust"
POWER: Final = 0.8


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
    """The ratio of B over A; its interval, test and minimum detectable effect are None for a single block.

    Invariant: ``ci_low <= ratio <= ci_high`` where they are known.
    """

    num_blocks: int
    """That of the smaller side."""
    is_paired: bool
    confidence: float
    log_ratio: float
    method: Method = "t"
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
    def p_value(self) -> float | None:
        """The least alpha at which the interval of 1 - alpha excludes "no change"."""
        return None if self.uncertainty is None else self.uncertainty.p_value()

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def standard_error(self) -> float | None:
        return None if self.uncertainty is None else self.uncertainty.standard_error

    @property
    def degrees_of_freedom(self) -> float | None:
        return None if self.uncertainty is None else self.uncertainty.degrees_of_freedom

    def interval_at(self, confidence: float) -> tuple[float, float] | None:
        """Bounds of the log-ratio at another confidence; None where there are too few blocks for it."""
        return None if self.uncertainty is None else self.uncertainty.interval(confidence)

    @property
    def log_interval(self) -> tuple[float, float] | None:
        return self.interval_at(self.confidence)

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
        if self.standard_error is None or self.degrees_of_freedom is None:
            return None
        upper = 1 - (1 - self.confidence) / 2
        both = t_quantile(upper, self.degrees_of_freedom) + t_quantile(POWER, self.degrees_of_freedom)
        return math.expm1(both * self.standard_error)


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
    d = np.asarray(differences, dtype=float)
    if n < 2:
        return RatioEstimate(
            num_blocks=n, is_paired=True, confidence=confidence, log_ratio=fmean(differences), estimator="mean"
        )
    covariate = _covariate(positions, n, slope)
    if covariate is not None and slope is not None:
        d = d - slope.log_per_position * covariate.x
    if estimator == "mean" or n < MIN_PAIRED_BLOCKS:
        estimate = _mean_estimate(d, covariate, confidence)
    else:
        estimate = _robust_estimate(d, covariate, confidence, evidence)
    if covariate is not None and slope is not None:
        estimate = replace(estimate, position_effect=slope.log_per_position)
    own_effect = estimate.position_effect if slope is None else None
    fitted = estimate.log_ratio + (0.0 if covariate is None or own_effect is None else own_effect * covariate.x)
    return replace(estimate, residuals=tuple((d - fitted).tolist()))


def _covariate(
    positions: Sequence[float] | None, num_blocks: int, slope: PooledSlope | None
) -> PositionCovariate | None:
    """The positions, where their effect can be removed."""
    if positions is None or num_blocks < MIN_PAIRED_BLOCKS or not any(positions):
        return None
    if slope is None and len(set(positions)) < 2:
        return None
    return PositionCovariate(np.asarray(positions, dtype=float), None if slope is None else slope.information)


def _mean_estimate(d: NDArray[np.float64], covariate: PositionCovariate | None, confidence: float) -> RatioEstimate:
    """The mean with its t interval.

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
    centre, df = float(weights @ d), n - 1 - own_share
    variance_of_one = float(off_d @ off_d) / df
    standard_error = math.sqrt(variance_of_one * (1 / n + extra))
    return RatioEstimate(
        num_blocks=n,
        is_paired=True,
        confidence=confidence,
        log_ratio=centre,
        estimator="mean",
        uncertainty=StudentT(centre, standard_error, df),
        position_effect=effect,
        block_weights=tuple(weights.tolist()),
    )


def _robust_estimate(
    d: NDArray[np.float64],
    covariate: PositionCovariate | None,
    confidence: float,
    evidence: Sequence[float] | None,
) -> RatioEstimate:
    """The mixture over the blocks that may be outliers (``robust``)."""
    mixture, weights, effect = estimate_mixture(
        d, covariate, None if evidence is None else np.asarray(evidence, dtype=float)
    )
    return RatioEstimate(
        num_blocks=len(d),
        is_paired=True,
        confidence=confidence,
        log_ratio=float(weights @ d),
        method="robust",
        estimator="robust",
        uncertainty=mixture,
        position_effect=effect,
        block_weights=tuple(weights.tolist()),
    )


def estimate_unpaired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """Hodges-Lehmann shift of the logarithms: the median of all differences, with the Mann-Whitney test.

    The standard error, which only plans use, is Welch's: se^2 = s_a^2 / n_a + s_b^2 / n_b.
    """
    log_a, log_b = [math.log(value) for value in a], [math.log(value) for value in b]
    n = min(len(a), len(b))
    if n < 2:
        log_ratio = fmean(log_b) - fmean(log_a)
        return RatioEstimate(num_blocks=n, is_paired=False, confidence=confidence, log_ratio=log_ratio)
    shifts = pairwise_shifts(log_a, log_b)
    parts = [(variance(values) / len(values), len(values)) for values in (log_a, log_b)]
    squared = sum(part for part, _ in parts)
    spread = sum(part**2 / (count - 1) for part, count in parts)
    df = squared**2 / spread if spread > 0 else float(len(a) + len(b) - 2)
    return RatioEstimate(
        num_blocks=n,
        is_paired=False,
        confidence=confidence,
        log_ratio=median(shifts),
        method="hodges-lehmann",
        uncertainty=PairwiseShifts(shifts, (len(a), len(b)), math.sqrt(squared), df),
    )


Values: TypeAlias = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class BlockDesign:
    """The block of each value and the positions in it; positions are None where the sides do not share blocks."""

    blocks: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    """Position of B minus that of A."""
    a_offsets: tuple[float, ...] | None = None
    """Position of A minus the middle of the block."""

    def select(self, indices: Sequence[int]) -> "BlockDesign":
        """The design of the values at ``indices``."""
        return BlockDesign(
            tuple(self.blocks[i] for i in indices) if self.blocks else tuple(indices),
            None if self.positions is None else tuple(self.positions[i] for i in indices),
            None if self.a_offsets is None else tuple(self.a_offsets[i] for i in indices),
        )

    @property
    def without_positions(self) -> "BlockDesign":
        return BlockDesign(self.blocks)


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
    slope: PooledSlope | None = None

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
        values = zip(self.design.blocks, self.a_values, self.b_values, strict=True)
        return {block: b / a for block, a, b in values}

    @property
    def evidence(self) -> tuple[float, ...] | None:
        """Log-ratios that determine the robust weights of the blocks, the same for all parts of this ratio."""
        if self.estimate.estimator != "robust":
            return None
        return self.log_ratios if self.slope is None else self.adjusted_log_ratios

    @property
    def b(self) -> float:
        return self.a * self.estimate.ratio


def side_ratio(
    a: Values,
    b: Values,
    design: BlockDesign,
    slope: PooledSlope | None,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> SideRatio | None:
    """The ratio over the blocks in which both values are known and positive; None where there are none.

    ``slope`` is the effect of one position later in the block on the logarithm of the quantity. Without one, but
    with positions in the design, the pair estimates its own.
    """
    pairs = [
        (i, x, y)
        for i, (x, y) in enumerate(zip(a, b, strict=True))
        if x is not None and y is not None and min(x, y) > 0
    ]
    if not pairs:
        return None
    a_values, b_values = tuple(x for _, x, _ in pairs), tuple(y for _, _, y in pairs)
    design = design.select([i for i, _, _ in pairs])
    differences = log_ratios(a_values, b_values)
    estimate = estimate_paired(differences, confidence, design.positions, slope=slope, estimator=estimator)
    level = _weighted_level(a_values, design.a_offsets, estimate)
    return SideRatio(a=level, estimate=estimate, a_values=a_values, b_values=b_values, design=design, slope=slope)


def unpaired_ratio(a: Values, b: Values, confidence: float = 0.95) -> SideRatio | None:
    """The shift of sides that share no blocks; None where a side has no value, or one that is not positive."""
    a_values, b_values = (tuple(value for value in side if value is not None) for side in (a, b))
    if min((*a_values, *b_values), default=0.0) <= 0 or not a_values or not b_values:
        return None
    estimate = estimate_unpaired(a_values, b_values, confidence)
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


def level_interval(
    values: Values, level: float, confidence: float = 0.95, estimator: Estimator = DEFAULT_ESTIMATOR
) -> Interval | None:
    """Interval of a level over blocks: that of the blocks' values over a constant, around ``level``.

    Where a value is not positive, the level is the arithmetic mean, and this is the interval of that mean. None
    below two values.
    """
    numbers = [value for value in values if value is not None]
    if numbers and min(numbers) <= 0:
        return estimate_paired(numbers, confidence, estimator="mean").log_interval
    ratio = side_ratio([1.0] * len(values), values, BlockDesign(()), None, confidence, estimator)
    if ratio is None or ratio.estimate.log_interval is None:
        return None
    low, high = (level * math.exp(end - ratio.estimate.log_ratio) for end in ratio.estimate.log_interval)
    return low, high


def metric_ratio(
    name: str,
    a: Values,
    b: Values,
    design: BlockDesign,
    slopes: Mapping[str, PooledSlope] | None,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> SideRatio | None:
    """The ``side_ratio`` of a metric.

    ``slopes`` are known effects of the position by metric; metrics without one are not adjusted. With None, the
    pair estimates its own effect for metrics that a drift moves.
    """
    slope = None if slopes is None else slopes.get(name)
    is_adjusted = name in POSITION_ADJUSTED if slopes is None else slope is not None
    return side_ratio(a, b, design if is_adjusted else design.without_positions, slope, confidence, estimator)


def _weighted_level(a: Sequence[float], offsets: Sequence[float] | None, estimate: RatioEstimate) -> float:
    """Centre of A at the middle of the block, each block weighted as in the estimate."""
    if len(set(a)) == 1 and not estimate.position_effect:
        return a[0]
    weights = estimate.block_weights or [1 / len(a)] * len(a)
    effect = estimate.position_effect or 0.0
    shifts = [0.0] * len(a) if offsets is None else [effect * offset for offset in offsets]
    return math.exp(math.fsum(w * (math.log(x) - s) for w, x, s in zip(weights, a, shifts, strict=True)))
