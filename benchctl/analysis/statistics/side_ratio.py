"""The ratio of one quantity between two paired arms, with the means that it is the quotient of.

Comparison, sweep tables, ladder, findings and pictures all take their ratios from here, so that one question has
one answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TypeAlias

import numpy as np

from benchctl.analysis.metrics.table import POSITION_ADJUSTED
from benchctl.analysis.statistics.block_ratio import (
    DEFAULT_ESTIMATOR,
    Estimator,
    PooledSlope,
    RatioEstimate,
    estimate_paired,
    estimate_unpaired,
    log_ratios,
)
from benchctl.analysis.statistics.intervals import Interval

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
