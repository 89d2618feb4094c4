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
import scipy  # loads scipy.special when it is called for the first time: 0.1 s
from numpy.typing import NDArray

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
        return (high - low) / 2 / float(scipy.special.stdtrit(self.degrees_of_freedom, 0.975))

    def interval(self, confidence: float) -> Interval:
        return _interval(self, confidence)

    def p_value(self) -> float:
        """The least alpha at which the interval excludes 0."""
        below = self.below(0.0)
        return alpha_of(2 * min(below, 1 - below), self.calibration)

    def below(self, value: float) -> float:
        """Probability that mu is below a value."""
        t = (value - np.asarray(self.centres)) / np.asarray(self.scales)
        return float(np.asarray(self.shares) @ scipy.special.stdtr(self.degrees_of_freedom, t))


@lru_cache(maxsize=8192)
def _interval(mixture: OutlierMixture, confidence: float) -> Interval:
    """The quantiles at both tails, by Newton's method on log(tail / wanted tail) inside a shrinking bracket."""
    if mixture.scales[0] < _NO_SCATTER:
        return mixture.centres[0], mixture.centres[0]
    df, tail = mixture.degrees_of_freedom, credibility_of(1 - confidence, mixture.calibration) / 2
    centres, scales, shares = (np.asarray(v) for v in (mixture.centres, mixture.scales, mixture.shares))
    reaches = -scipy.special.stdtrit(df, tail) * scales
    sides = np.array([[1.0], [-1.0]])  # the lower end, and the upper one mirrored
    mirrored = sides * centres
    outside, inside = np.min(mirrored - reaches, axis=1), np.max(mirrored - reaches, axis=1)
    ends = mirrored[:, 0] - reaches[0]
    density_at_0 = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for _ in range(60):
        t = (ends[:, None] - mirrored) / scales
        tails = scipy.special.stdtr(df, t) @ shares
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


def estimate_mixture(
    differences: Floats, covariate: PositionCovariate | None, evidence: Sequence[float] | None = None
) -> tuple[OutlierMixture, Floats, float | None]:
    """The distribution of mu, the weights of the blocks in its mean, and the slope where these blocks give it.

    For each choice of outliers the differences have a t distribution by weighted least squares. How likely a choice
    is follows from the differences, or, with ``evidence``, from these differences of the same blocks.
    """
    n, own_share = len(differences), 0.0 if covariate is None else covariate.own_share
    x = np.zeros(n) if covariate is None else covariate.x
    is_own = covariate is not None and covariate.information is None
    judged = differences if evidence is None else np.asarray(evidence, dtype=float)
    judged, offset = judged - np.median(judged), np.median(differences)
    choices, slope_weights = _choices(n), np.zeros(0)
    if is_own:
        # The choices with a small slope, then those with a large one; for each, the weight of "the slope is 0" in
        # blocks of variance sigma^2 whose squared position is the mean one.
        sizes = choices.sum(axis=1)
        fewer = choices[sizes < max(sizes.max(), 1)]
        inverses = np.repeat([1 / SMALL_SLOPE**2, 1 / LARGE_SLOPE**2], [len(choices), len(fewer)])
        choices, slope_weights = np.concatenate([choices, fewer]), float(np.mean(x**2)) * inverses
    weights = np.ones((len(choices), n))
    weights[:, _suspects(judged, x if is_own else None)] -= _LOST_WEIGHT * choices
    s_1, s_x, num_chosen = weights.sum(axis=1), weights @ x, choices.sum(axis=1)
    # the inverse of the information on mu and the slope
    if is_own:
        s_xx = weights @ x**2 + slope_weights
        determinant = s_1 * s_xx - s_x**2
        inverse_1, inverse_x, inverse_xx = s_xx / determinant, -s_x / determinant, s_1 / determinant
        variances, volume = inverse_1, slope_weights / determinant
    else:
        inverse_1, inverse_x, inverse_xx = 1 / s_1, np.zeros(len(choices)), np.zeros(len(choices))
        variances, volume = inverse_1, inverse_1
        if covariate is not None and covariate.information is not None:
            variances = variances + (s_x / s_1) ** 2 / (2 * covariate.information)
    df = n - 1.0 if is_own else n - 1.0 - own_share
    log_prior = num_chosen * math.log(OUTLIER_PROBABILITY / (1 - OUTLIER_PROBABILITY) / OUTLIER_SCALE)

    def solved(values: Floats) -> tuple[Floats, Floats, Floats]:
        """Centre, slope and sum of squares of each choice."""
        s_d, s_xd, s_dd = weights @ values, weights @ (x * values), weights @ values**2
        centres, slopes = inverse_1 * s_d + inverse_x * s_xd, inverse_x * s_d + inverse_xx * s_xd
        return centres, slopes, np.maximum(s_dd - centres * s_d - slopes * s_xd, 1e-24 * s_dd + 1e-300)

    log_shares = log_prior + 0.5 * np.log(volume) - df / 2 * np.log(solved(judged)[2])
    shares = np.exp(log_shares - log_shares.max())
    shares /= shares.sum()
    centres, slopes, squares = solved(differences - offset)
    order = np.argsort(-shares, kind="stable")
    likely = order[: 1 + int(np.searchsorted(np.cumsum(shares[order]), 1 - _NEGLIGIBLE))]
    mixture = OutlierMixture(
        centres=tuple((centres[likely] + offset).tolist()),
        scales=tuple(np.sqrt(squares / df * variances)[likely].tolist()),
        shares=tuple((shares[likely] / shares[likely].sum()).tolist()),
        degrees_of_freedom=df,
        calibration=calibration_of(n, own_share),
    )
    block_weights = (shares * inverse_1) @ weights + (shares * inverse_x) @ weights * x
    return mixture, block_weights, float(shares @ slopes) if is_own else None


def _suspects(d: Floats, x: Floats | None) -> NDArray[np.intp]:
    """The blocks that may be outliers: those farthest from a robust line.

    Its slope: A. F. Siegel, *Robust regression using repeated medians*, Biometrika 69, 1982, 242-244.
    """
    if x is not None and len(d) > MAX_SUSPECTS:
        apart = x[None, :] - x[:, None]
        slopes = (d[None, :] - d[:, None]) / np.where(apart == 0, np.nan, apart)
        d = d - np.nanmedian(np.nanmedian(slopes, axis=1)) * x
    return np.arange(len(d)) if len(d) <= MAX_SUSPECTS else np.argsort(np.abs(d - np.median(d)))[-MAX_SUSPECTS:]


@lru_cache(maxsize=64)
def _choices(num_blocks: int) -> NDArray[np.bool_]:
    """Every choice of outliers among the suspects: a row per choice, the first of which chooses none.

    Outliers are fewer than half of the blocks, less one, and at least one.
    """
    suspects = range(min(num_blocks, MAX_SUSPECTS))
    sizes = range(min(max((num_blocks - 1) // 2 - 1, 1), len(suspects)) + 1)
    chosen = [outliers for size in sizes for outliers in combinations(suspects, size)]
    return np.array([[i in outliers for i in suspects] for outliers in chosen])
