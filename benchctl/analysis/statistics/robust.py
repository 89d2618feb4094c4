"""The robust estimate: a mean of differences of which a few, not known beforehand, may be outliers.

The model is that of G. E. P. Box, G. C. Tiao, *A Bayesian approach to some outlier problems*, Biometrika 55, 1968,
119-129: each difference is normal around mu + beta * x with variance sigma^2, or, with probability 0.2, with
variance (16 sigma)^2. For a given choice z of the outliers this is weighted least squares, and mu has Student's t
distribution; with the usual flat prior of mu and log sigma the choice has the weight

    p(z) ~ (0.2 / 0.8 / 16)^|z| * |X' W X|^(-1/2) * RSS_z^(-df / 2),    W = 1, or 1 / 16^2 for the blocks in z

and the distribution of mu is the mixture of these t distributions. There is no trimming and no threshold: a block
that is a little off counts a little less, one that is far off hardly at all, and without outliers the result is
nearly the mean. The centre is a weighted mean of the blocks (``block_weights``), so that parts that add up in each
block add up in the centre. ``outlier_mixture.py`` has its interval.

Fewer than half of the blocks may be outliers, less one (``most_outliers``). Where a machine jumps between a few
speeds, differences take few values; if half of the blocks were enough, those that agree by chance would pass for
the truth, and an interval of 95 % would miss it in 8 % of experiments of six blocks.

A slope that these blocks estimate themselves is small, normal with standard deviation 0.5 sigma, or, as likely
beforehand, of any size, normal with standard deviation 30 sigma; with a large one, one outlier less is allowed.
With a flat prior of beta, four of six blocks would lie on two lines by chance so often that an interval of 95 %
misses the truth in 20 %. A normal prior is one more observation, "beta is 0", so that df = n - 1.

Rank tests, a trimmed mean and the mean serve worse: where a machine makes one run in ten slow, three in ten
experiments of eight blocks contain two such blocks. A signed-rank or sign-flip interval at 95 % fails with one
outlier of eight, and a trimmed mean discards the same share whether or not there are outliers.
``benchmarks/verdict/verdict_truth.py --sections power`` prints what each law of noise leaves of the power of this
and of the mean.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from benchctl.analysis.statistics.outlier_mixture import OutlierMixture, calibration_of

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
    whole = [np.sum(shares * factor, axis=1, keepdims=True) for factor in (factor_1, factor_x)]
    weights: Floats = whole[0] - lost[0] + (whole[1] - lost[1]) * x
    return weights


def _suspects(d: Floats, x: Floats | None) -> NDArray[np.intp]:
    """The blocks of each data set that may be outliers: those farthest from a robust line."""
    n = d.shape[1]
    if n <= MAX_SUSPECTS:
        return np.broadcast_to(np.arange(n), d.shape)
    residuals = d
    if x is not None:
        residuals = d - _repeated_median_slopes(d, x)[:, None] * x
    residuals = np.abs(residuals - np.median(residuals, axis=1, keepdims=True))
    return np.argsort(residuals, axis=1)[:, n - MAX_SUSPECTS :]


def _repeated_median_slopes(d: Floats, x: Floats) -> Floats:
    """A. F. Siegel, *Robust regression using repeated medians*, Biometrika 69, 1982, 242-244."""
    apart = x[None, :] - x[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (d[:, None, :] - d[:, :, None]) / np.where(apart == 0, np.nan, apart)
    return np.asarray(np.nanmedian(np.nanmedian(slopes, axis=2), axis=1), dtype=float)


def most_outliers(num_blocks: int) -> int:
    """Number of blocks that may be outliers: fewer than half of them, less one, and at least one."""
    return max((num_blocks - 1) // 2 - 1, 1)


@lru_cache(maxsize=64)
def _choices(num_blocks: int) -> NDArray[np.bool_]:
    """Every choice of outliers among the suspects: a row per choice, the first of which chooses none."""
    num_suspects = min(num_blocks, MAX_SUSPECTS)
    rows = [
        [i in chosen for i in range(num_suspects)]
        for size in range(min(most_outliers(num_blocks), num_suspects) + 1)
        for chosen in combinations(range(num_suspects), size)
    ]
    return np.array(rows)


def _choices_with_slopes(choices: NDArray[np.bool_], mean_square: float) -> tuple[NDArray[np.bool_], Floats]:
    """The choices with a small slope, then those with a large one; for each, the weight of "the slope is 0".

    That weight is in blocks of variance sigma^2 whose squared position is ``mean_square``, as theirs is on average.
    """
    num_chosen = choices.sum(axis=1)
    fewer = choices[num_chosen < max(num_chosen.max(), 1)]
    weights = np.repeat([1 / SMALL_SLOPE**2, 1 / LARGE_SLOPE**2], [len(choices), len(fewer)])
    return np.concatenate([choices, fewer]), mean_square * weights


def estimate_mixture(
    differences: Floats, covariate: PositionCovariate | None, evidence: Floats | None = None
) -> tuple[OutlierMixture, Floats, float | None]:
    """The uncertainty of one data set, the weights of its blocks, and its slope where it is estimated from them.

    With ``evidence``, the weights are those of these differences.
    """
    like = None if evidence is None else estimate_mixtures(evidence[None, :], covariate)
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
