"""The uncertainty of a robust estimate: a mixture of t distributions, whose intervals are calibrated.

The robust estimate: a mean of differences of which a few, not known beforehand, may be outliers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from benchctl.analysis.statistics.intervals import Interval

_NO_SCATTER: Final = 1e-100
"""Below it, all blocks are equal."""
CALIBRATION: Final[dict[int, tuple[float, float]]] = {
    6: (0.40, 0.15),
    7: (0.33, 0.04),
    8: (0.32, 0.08),
    9: (0.34, 0.09),
    10: (0.23, 0.07),
    12: (0.38, 0.04),
    15: (0.29, 0.17),
    20: (0.53, 0.30),
    30: (0.63, 0.45),
    50: (0.63, 0.43),
}
"""r by number of blocks, for a position effect that is known (q = 0) or estimated from these blocks (q = 1)."""


def calibration_of(num_blocks: int, own_share: float) -> float:
    """r for a number of blocks, by linear interpolation in the table."""
    numbers = list(CALIBRATION)
    pooled, own = (float(np.interp(num_blocks, numbers, [CALIBRATION[n][q] for n in numbers])) for q in (0, 1))
    return pooled + own_share * (own - pooled)


def credibility_of(alpha: float, calibration: float) -> float:
    """c: the share of the mixture that an interval of 1 - ``alpha`` leaves out."""
    return alpha * (calibration + (1 - calibration) * math.sqrt(math.sqrt(alpha)))


def alpha_of(credibility: float, calibration: float) -> float:
    """The alpha whose interval leaves out that share: the inverse of ``credibility_of``, by Newton's method."""
    root = 1.0
    for _ in range(200):
        excess = calibration * root**4 + (1 - calibration) * root**5 - credibility
        step = excess / (4 * calibration * root**3 + 5 * (1 - calibration) * root**4)
        root -= step
        if step <= 1e-13 * root:
            break
    return root**4


@dataclass(frozen=True, slots=True)
class OutlierMixture:
    """The mixture of one data set, as an uncertainty, with the choices of outliers that matter, likeliest first."""

    method: ClassVar = "robust"
    centres: tuple[float, ...]
    scales: tuple[float, ...]
    shares: tuple[float, ...]
    degrees_of_freedom: float
    calibration: float

    @property
    def standard_error(self) -> float:
        """Standard error of a t interval as wide as the 95 % interval of the mixture; for planning only."""
        low, high = self.interval(0.95)
        return (high - low) / 2 / float(stdtrit(self.degrees_of_freedom, 0.975))

    def interval(self, confidence: float) -> Interval:
        return _interval(self, confidence)

    def p_value(self) -> float:
        """The least alpha at which the interval excludes 0."""
        t = (0.0 - np.asarray(self.centres)) / np.asarray(self.scales)
        below = float(np.asarray(self.shares) @ stdtr(self.degrees_of_freedom, t))
        return alpha_of(2 * min(below, 1 - below), self.calibration)


@lru_cache(maxsize=8192)
def _interval(mixture: OutlierMixture, confidence: float) -> Interval:
    """The quantiles at both tails, by Newton's method on log(tail / wanted tail) inside a shrinking bracket."""
    if mixture.scales[0] < _NO_SCATTER:
        return mixture.centres[0], mixture.centres[0]
    df, tail = mixture.degrees_of_freedom, credibility_of(1 - confidence, mixture.calibration) / 2
    centres, scales, shares = (np.asarray(v) for v in (mixture.centres, mixture.scales, mixture.shares))
    reaches = -stdtrit(df, tail) * scales
    sides = np.array([[1.0], [-1.0]])  # the lower end, and the upper one mirrored
    mirrored = sides * centres
    outside, inside = np.min(mirrored - reaches, axis=1), np.max(mirrored - reaches, axis=1)
    ends = mirrored[:, 0] - reaches[0]
    density_at_0 = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for _ in range(60):
        t = (ends[:, None] - mirrored) / scales
        tails = stdtr(df, t) @ shares
        densities = (density_at_0 * (1 + t**2 / df) ** (-(df + 1) / 2) / scales) @ shares
        outside, inside = np.where(tails < tail, ends, outside), np.where(tails < tail, inside, ends)
        with np.errstate(divide="ignore", invalid="ignore"):
            new = ends - tails * np.log(tails / tail) / densities
        new = np.where((new >= outside) & (new <= inside), new, (outside + inside) / 2)
        has_settled = np.all(np.abs(new - ends) <= 1e-9 * scales[0])
        ends = new
        if has_settled:
            break
    return float(ends[0]), -float(ends[1])


Floats = NDArray[np.float64]

OUTLIER_PROBABILITY: Final = 0.2
OUTLIER_SCALE: Final = 16.0
MAX_SUSPECTS: Final = 10
"""Most blocks that may be outliers, those farthest from the others: at most 2^10 choices are weighed."""
SMALL_SLOPE: Final = 0.5
LARGE_SLOPE: Final = 30.0
"""Standard deviations of the effect of a position, in those of a block."""
_LOST_WEIGHT: Final = 1 - 1 / OUTLIER_SCALE**2
_NEGLIGIBLE: Final = 1e-5
"""Share of the mixture that is ignored, that of the least likely choices."""


@dataclass(frozen=True, slots=True)
class PositionCovariate:
    """The positions whose effect is removed from the differences.

    ``x`` is, for each block, the position of B minus that of A. Where ``information`` is None the slope is
    estimated from these blocks; otherwise x times the pooled slope is already subtracted, and ``information`` is
    that of the pooled slope (``PooledSlope``).
    """

    x: Floats
    information: float | None = None

    @property
    def own_share(self) -> float:
        """q: the share of the information on the slope that comes from these blocks."""
        if self.information is None:
            return 1.0
        squares = float(np.sum((self.x - self.x.mean()) ** 2))
        return min(1.0, squares / 2 / self.information)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Distributions of mu for many data sets of n blocks: for each a mixture of t distributions over the choices.

    Arrays have a row for each data set and a column for each choice of outliers; ``block_weights`` has a column for
    each block.
    """

    centres: Floats
    scales: Floats
    shares: Floats
    degrees_of_freedom: float
    block_weights: Floats
    slopes: Floats | None
    suspects: NDArray[np.intp]
    """The blocks that may be outliers, a row for each data set."""

    def below(self, values: Floats) -> Floats:
        """Probability that mu is below its value, for each data set."""
        standardised = (values[:, None] - self.centres) / self.scales
        shares: Floats = np.sum(self.shares * stdtr(self.degrees_of_freedom, standardised), axis=1)
        return shares


def estimate_mixtures(
    differences: Floats, covariate: PositionCovariate | None, like: Mixture | None = None
) -> Mixture:
    """The distribution of mu for each row of ``differences``, a data set.

    The outliers follow from these differences, or, with ``like``, are those of that mixture.
    """
    offsets = np.median(differences, axis=1, keepdims=True)
    d = differences - offsets
    n = d.shape[1]
    is_own = covariate is not None and covariate.information is None
    x = np.zeros(n) if covariate is None else covariate.x
    suspects = like.suspects if like is not None else _suspects(d, x if is_own else None)
    choices, slope_weights = _choices(n), np.zeros(0)
    if is_own:
        choices, slope_weights = _choices_with_slopes(choices, float(np.mean(x**2)))
    chosen = choices.astype(float).T

    def weighted(values: Floats) -> Floats:
        """Sum over the blocks, with the weights of each choice."""
        of_suspects = np.take_along_axis(values, suspects, axis=1)
        sums: Floats = values.sum(axis=1, keepdims=True) - _LOST_WEIGHT * (of_suspects @ chosen)
        return sums

    num_chosen = choices.sum(axis=1)
    rows = np.broadcast_to(x, d.shape)
    s_1, s_x = n - _LOST_WEIGHT * num_chosen[None, :], weighted(rows)
    s_d, s_dd = weighted(d), weighted(d * d)
    log_prior = num_chosen * math.log(OUTLIER_PROBABILITY / (1 - OUTLIER_PROBABILITY) / OUTLIER_SCALE)
    slopes: Floats | None = None
    if is_own:
        s_xx, s_xd = weighted(rows * rows) + slope_weights, weighted(rows * d)
        determinant = s_1 * s_xx - s_x**2
        centres, slopes = (s_xx * s_d - s_x * s_xd) / determinant, (s_1 * s_xd - s_x * s_d) / determinant
        squares, degrees = s_dd - centres * s_d - slopes * s_xd, n - 1.0
        variances = s_xx / determinant
        log_prior = log_prior + 0.5 * np.log(slope_weights / determinant)
    else:
        centres = s_d / s_1
        squares, degrees = s_dd - centres * s_d, n - 1.0 - (0.0 if covariate is None else covariate.own_share)
        variances = 1 / s_1
        if covariate is not None and covariate.information is not None:
            variances = variances + (s_x / s_1) ** 2 / (2 * covariate.information)
        log_prior = log_prior - 0.5 * np.log(s_1)
    squares = np.maximum(squares, 1e-24 * s_dd + 1e-300)
    log_shares = log_prior - degrees / 2 * np.log(squares)
    shares = np.exp(log_shares - log_shares.max(axis=1, keepdims=True))
    shares = like.shares if like is not None else shares / shares.sum(axis=1, keepdims=True)
    factor_1, factor_x = (s_xx / determinant, -s_x / determinant) if is_own else (1 / s_1, np.zeros_like(centres))
    return Mixture(
        centres=centres + offsets,
        scales=np.sqrt(squares / degrees * variances),
        shares=shares,
        degrees_of_freedom=degrees,
        block_weights=_block_weights(shares, factor_1, factor_x, chosen, suspects, rows),
        slopes=slopes,
        suspects=suspects,
    )


def _block_weights(
    shares: Floats, factor_1: Floats, factor_x: Floats, chosen: Floats, suspects: NDArray[np.intp], x: Floats
) -> Floats:
    """The weight of each block in the centre: W_b (factor_1 + factor_x x_b), averaged over the choices."""
    lost = np.zeros((2, *x.shape))
    for row, factor in zip(lost, (factor_1, factor_x), strict=True):
        np.put_along_axis(row, suspects, _LOST_WEIGHT * ((shares * factor) @ chosen.T), axis=1)
    whole_1, whole_x = (np.sum(shares * factor, axis=1, keepdims=True) for factor in (factor_1, factor_x))
    weights: Floats = whole_1 - lost[0] + (whole_x - lost[1]) * x
    return weights


def _suspects(d: Floats, x: Floats | None) -> NDArray[np.intp]:
    """The blocks of each data set that may be outliers: those farthest from a robust line.

    Its slope: A. F. Siegel, *Robust regression using repeated medians*, Biometrika 69, 1982, 242-244.
    """
    n, residuals = d.shape[1], d
    if n <= MAX_SUSPECTS:
        return np.broadcast_to(np.arange(n), d.shape)
    if x is not None:
        apart = x[None, :] - x[:, None]
        slopes = (d[:, None, :] - d[:, :, None]) / np.where(apart == 0, np.nan, apart)
        residuals = d - np.nanmedian(np.nanmedian(slopes, axis=2), axis=1)[:, None] * x
    residuals = np.abs(residuals - np.median(residuals, axis=1, keepdims=True))
    return np.argsort(residuals, axis=1)[:, n - MAX_SUSPECTS :]


@lru_cache(maxsize=64)
def _choices(num_blocks: int) -> NDArray[np.bool_]:
    """Every choice of outliers among the suspects: a row per choice, the first of which chooses none.

    Outliers are fewer than half of the blocks, less one, and at least one.
    """
    suspects = range(min(num_blocks, MAX_SUSPECTS))
    sizes = range(min(max((num_blocks - 1) // 2 - 1, 1), len(suspects)) + 1)
    chosen = [outliers for size in sizes for outliers in combinations(suspects, size)]
    return np.array([[i in outliers for i in suspects] for outliers in chosen])


def _choices_with_slopes(choices: NDArray[np.bool_], mean_square: float) -> tuple[NDArray[np.bool_], Floats]:
    """The choices with a small slope, then those with a large one; for each, the weight of "the slope is 0".

    That weight is in blocks of variance sigma^2 whose squared position is ``mean_square``, as theirs is on average.
    """
    num_chosen = choices.sum(axis=1)
    fewer = choices[num_chosen < max(num_chosen.max(), 1)]
    weights = np.repeat([1 / SMALL_SLOPE**2, 1 / LARGE_SLOPE**2], [len(choices), len(fewer)])
    return np.concatenate([choices, fewer]), mean_square * weights


def estimate_mixture(
    differences: Floats, covariate: PositionCovariate | None, evidence: Sequence[float] | None = None
) -> tuple[OutlierMixture, Floats, float | None]:
    """The uncertainty of one data set, the weights of its blocks, and its slope where it is estimated from them.

    With ``evidence``, the weights are those of these differences.
    """
    like = None if evidence is None else estimate_mixtures(np.asarray([evidence], dtype=float), covariate)
    whole = estimate_mixtures(differences[None, :], covariate, like)
    shares = whole.shares[0]
    order = np.argsort(-shares, kind="stable")
    likely = order[: 1 + int(np.searchsorted(np.cumsum(shares[order]), 1 - _NEGLIGIBLE))]
    calibration = calibration_of(len(differences), 0.0 if covariate is None else covariate.own_share)
    mixture = OutlierMixture(
        centres=tuple(whole.centres[0][likely].tolist()),
        scales=tuple(whole.scales[0][likely].tolist()),
        shares=tuple((shares[likely] / shares[likely].sum()).tolist()),
        degrees_of_freedom=whole.degrees_of_freedom,
        calibration=calibration,
    )
    slope = None if whole.slopes is None else float(shares @ whole.slopes[0])
    return mixture, whole.block_weights[0], slope
