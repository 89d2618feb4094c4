"""Variance components: the scatter between servers, between the loads of one server, and the drift over its loads;
and from them the cheapest design: how many loads to send to each server, and how many blocks a precision takes.

After T. Kalibera and R. Jones, *Rigorous benchmarking in reasonable time*, ISMM 2013, doi:10.1145/2464157.2464160,
in the version of kar.kent.ac.uk/33611 with corrected estimators in section 9.2: the variance of a level is that of
its means less that of all means of the level below over its repetitions, T_i^2 = S_i^2 - S_(i-1)^2 / r_(i-1). The
printed one subtracts T_(i-1)^2 / r_(i-1), which is the same for the two levels here and wrong from the third on.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import scipy  # loads scipy.special when it is called for the first time: 0.1 s
from numpy.typing import NDArray

from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, RunKey
from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.profile.bounds import MAX_LOADS
from benchctl.steptime.speculation_law import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Standard deviations of the logarithm of one metric, and its slope, with intervals of 95 %.

    The variance of the difference of two arms of one block is 2 (between^2 + within^2 / N) with N loads per server.
    """

    between: Estimate
    """Scatter between servers, after what all servers of a block share."""
    within: Estimate
    """Scatter between the loads of one server, without the drift."""
    drift: Estimate
    """Added by each load to the next one of the same server."""
    evidence: "Evidence"


class Evidence(NamedTuple):
    """Two mean squares with their degrees of freedom: of the means of servers, and of the loads of a server."""

    of_means: float
    of_loads: float
    df_means: int
    df_loads: int
    num_loads: float
    """Loads of a server, their harmonic mean: E(of_means) = between^2 + within^2 / num_loads."""


def variance_components(
    servers: Mapping[RunKey, Mapping[int, float]], confidence: float = 0.95
) -> Components | None:
    """The components of logarithms by server, block and arm, and by the number of the load; some may be missing.

    Means of servers are compared after least squares on blocks and arms, on arms alone where there is one, so that
    what moves a whole block does not count. Each server has a slope over its loads; their mean, weighted by
    information, is the drift, and what it leaves is the scatter within. None where fewer than two servers have two
    loads each, or nothing is left to compare means by. A negative variance is 0.
    """
    keys = [key for key, loads in servers.items() if loads]
    several = [(np.array(list(servers[key])), np.array(list(servers[key].values()))) for key in keys]
    off = [(x - x.mean(), y - y.mean()) for x, y in several if len(y) > 1]
    means, counts = np.array([y.mean() for _, y in several]), np.array([len(y) for _, y in several])
    df_loads = int(counts.sum()) - len(keys) - 1
    if len(off) < 2 or df_loads < 1:
        return None
    information = np.array([x @ x for x, _ in off])
    slopes = np.array([x @ y for x, y in off]) / information
    slope = float(np.average(slopes, weights=information))
    of_loads = _beyond_rounding(float(sum(np.sum((y - slope * x) ** 2) for x, y in off)) / df_loads)
    of_means, df_means = _mean_square_of_servers(keys, means)
    if df_means < 1:
        return None
    evidence = Evidence(of_means, of_loads, df_means, df_loads, 1 / float(np.mean(1 / counts)))
    upper, df = (1 + confidence) / 2, len(off) - 1
    scatter = float(np.average((slopes - slope) ** 2, weights=information)) / df  # the unit is the server
    half = t_quantile(upper, df) * math.sqrt(scatter)
    low, high = (df_loads * of_loads / scipy.special.chdtri(df_loads, tail) for tail in (1 - upper, upper))
    return Components(
        between=_between(evidence, confidence),
        within=Estimate(*map(math.sqrt, (of_loads, low, high))),
        drift=Estimate(slope, slope - half, slope + half),
        evidence=evidence,
    )


def _mean_square_of_servers(keys: list[RunKey], means: NDArray[np.float64]) -> tuple[float, int]:
    """The mean square of what blocks and arms leave of the means, and its degrees of freedom, 0 for none."""
    blocks, arms = (sorted({key[i] for key in keys}, key=str) for i in (0, 1))
    labels = [
        [key[1] == arm for arm in arms] + ([key[0] == b for b in blocks] if len(arms) > 1 else []) for key in keys
    ]
    indicators = np.array(labels, dtype=float)
    effects, _, rank, _ = np.linalg.lstsq(indicators, means, rcond=None)
    df = len(keys) - int(rank)
    return (_beyond_rounding(float(np.sum((means - indicators @ effects) ** 2)) / df) if df else 0.0), df


def _beyond_rounding(mean_square: float) -> float:
    """0 for a scatter of logarithms below 1e-10: equal values, whose means and residuals are rounded."""
    return mean_square if mean_square > 1e-20 else 0.0


def _between(evidence: Evidence, confidence: float) -> Estimate:
    """sqrt(S^2 - W / N), with the modified large-sample interval of a difference of two mean squares.

    N. Ting, R. K. Burdick, F. A. Graybill, S. Jeyaratnam, T.-F. C. Lu, *Confidence intervals on linear combinations
    of variance components that are unrestricted in sign*, J. of Statistical Computation and Simulation 35, 1990.
    """
    upper, lower = (1 + confidence) / 2, (1 - confidence) / 2
    above, below = evidence.of_means, evidence.of_loads / evidence.num_loads
    n, m = evidence.df_means, evidence.df_loads
    f_high, f_low = (float(scipy.special.fdtri(n, m, p)) for p in (upper, lower))
    (g_n, h_n), (g_m, h_m) = (
        (1 - df / float(scipy.special.chdtri(df, lower)), df / float(scipy.special.chdtri(df, upper)) - 1)
        for df in (n, m)
    )
    g = ((f_high - 1) ** 2 - (g_n * f_high) ** 2 - h_m**2) / f_high
    h = ((1 - f_low) ** 2 - (h_n * f_low) ** 2 - g_m**2) / f_low
    down = (g_n * above) ** 2 + (h_m * below) ** 2 + g * above * below
    up = (h_n * above) ** 2 + (g_m * below) ** 2 + h * above * below
    ends = above - below, above - below - math.sqrt(max(down, 0.0)), above - below + math.sqrt(max(up, 0.0))
    return Estimate(*(math.sqrt(max(end, 0.0)) for end in ends))


class Costs(NamedTuple):
    """Seconds of a server, or of all servers of a block: of all but the loads, such as the start, and of a load."""

    starts_s: float
    load_s: float

    def of_block(self, num_arms: int) -> "Costs":
        return Costs(num_arms * self.starts_s, num_arms * self.load_s)


class Design(NamedTuple):
    """So many blocks with so many loads on each server, and what they take."""

    num_loads: int
    num_blocks: int
    seconds: float


MAX_BLOCKS_NEEDED: Final = 1000


def design_of(
    num_loads: int, half_width_frac: float, between: float, within: float, costs: Costs, width: float = 1.0
) -> Design | None:
    """The design whose 95 % interval of a ratio is at most ± ``half_width_frac``; None if 1000 blocks are too few.

    The least n from 6 on with width * t(0.975, n - 2) sd / sqrt(n) <= ln(1 + half width), and
    sd^2 = 2 (between^2 + within^2 / N); ``width`` is what the estimator of the ratio costs.
    """
    sd, half = width * math.sqrt(2 * (between**2 + within**2 / num_loads)), math.log1p(half_width_frac)
    numbers = range(MIN_PAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1)
    least = bisect_left(numbers, True, key=lambda n: t_quantile(0.975, n - 2) * sd / math.sqrt(n) <= half)
    if least == len(numbers):
        return None
    return Design(num_loads, numbers[least], numbers[least] * (costs.starts_s + num_loads * costs.load_s))


def cheapest_design(
    half_width_frac: float, between: float, within: float, costs: Costs, width: float = 1.0
) -> Design | None:
    """The design that takes the least time; of those that take as long, the one of fewer loads.

    Near N = sqrt(starts / load * within^2 / between^2), where (starts + N load)(between^2 + within^2 / N) is least;
    all are tried, because blocks are whole, at least six, and few of them widen the interval.
    """
    designs = (design_of(n, half_width_frac, between, within, costs, width) for n in range(1, MAX_LOADS + 1))
    return min((each for each in designs if each is not None), key=lambda each: each.seconds, default=None)


PRIOR: Final = (1e-3, 1e2)
"""Ratios of the variances between and within servers that are thought possible before anything is measured, all
orders of magnitude alike: scatter between loads from a tenth to thirty times that between servers."""


def loads_for_least_cost(pilot: Iterable[Evidence], costs: Costs, num_pilot: int, num_blocks: int) -> int:
    """The number of loads per server that is expected to cost least after ``num_pilot`` of ``num_blocks`` blocks.

    The cost of an experiment is its time at equal precision: the seconds of all blocks times the sum of
    r + 1 / loads over them, r the ratio of the variances between and within servers. Few blocks hardly tell r, so N
    is not the optimum of an estimate: of all N it has the least expected cost, relative to the best N of each r,
    where of_means / of_loads is distributed as (r + 1 / num_loads) times F, and r as ``PRIOR``. The mean over
    metrics counts. It is 1 where loads do not scatter, and never depends on the sign or size of a change.
    """
    ratios, numbers = np.geomspace(*PRIOR, 101)[:, None], np.arange(1, MAX_LOADS + 1)
    num_left, expected = num_blocks - num_pilot, np.zeros(MAX_LOADS)
    for evidence in pilot:
        if not evidence.of_loads:
            continue
        loads, n, m = evidence.num_loads, evidence.df_means, evidence.df_loads
        seconds = num_blocks * costs.starts_s + (num_pilot * loads + num_left * numbers) * costs.load_s
        each = seconds * (num_pilot * (ratios + 1 / loads) + num_left * (ratios + 1 / numbers))
        spread = ratios[:, 0] + 1 / loads
        f = np.maximum(evidence.of_means / evidence.of_loads / spread, 1e-12)
        logs = (n / 2 - 1) * np.log(f) - (n + m) / 2 * np.log1p(n / m * f) - np.log(spread)
        likelihood = np.exp(logs - logs.max())
        expected += likelihood / likelihood.sum() @ (each / each.min(axis=1, keepdims=True))
    return int(numbers[np.argmin(expected)])
