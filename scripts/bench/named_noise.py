"""Noise of runs, by name: what servers do from one life to the next, in virtual time.

Each process gives the logarithm of a number for every run of an experiment, in the order in which they ran. All
have the same scatter of the *block log-ratio* of two neighbours in a block, d = ln(B / A): its standard deviation
is the ``ratio_sd`` that was asked for. What the linear drift adds to that is no scatter but an effect of the place.
"""

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]
Noise: TypeAlias = Callable[[np.random.Generator, int, float], Values]
"""(stream, number of runs, scatter of the block log-ratio) to the logarithms, run by run."""

_SKEW_SIGMA: Final = 1.0
_DRIFT_PER_RUN: Final = 0.005
_PHI: Final = 0.8


def gaussian(stream: np.random.Generator, num_runs: int, ratio_sd: float) -> Values:
    """Independent runs, normal logarithms."""
    return stream.normal(0, ratio_sd / math.sqrt(2), num_runs)


def heavy_tail(stream: np.random.Generator, num_runs: int, ratio_sd: float) -> Values:
    """Independent runs, most a little fast and a few very slow: log-normal, skewness 6, excess kurtosis 111."""
    draws = stream.lognormal(0, _SKEW_SIGMA, num_runs)
    mean = math.exp(_SKEW_SIGMA**2 / 2)
    sd = mean * math.sqrt(math.expm1(_SKEW_SIGMA**2))
    return (draws - mean) / sd * ratio_sd / math.sqrt(2)


def linear_drift(stream: np.random.Generator, num_runs: int, ratio_sd: float) -> Values:
    """A machine that warms up: each run 0.5 % slower than the one before, and gaussian noise."""
    return gaussian(stream, num_runs, ratio_sd) + _DRIFT_PER_RUN * np.arange(num_runs)


def random_walk(stream: np.random.Generator, num_runs: int, ratio_sd: float) -> Values:
    """A level that wanders: half of the variance of a ratio is a step of the level, half is the run's own."""
    return np.cumsum(stream.normal(0, ratio_sd / math.sqrt(2), num_runs)) + gaussian(
        stream, num_runs, ratio_sd / math.sqrt(2)
    )


def autoregressive(stream: np.random.Generator, num_runs: int, ratio_sd: float) -> Values:
    """A level that wanders and returns: AR(1) with coefficient 0.8, half of the variance of a ratio."""
    sd = ratio_sd / 2 / math.sqrt(1 - _PHI)
    shocks = stream.normal(0, sd * math.sqrt(1 - _PHI**2), num_runs)
    level, levels = stream.normal(0, sd), np.empty(num_runs)
    for i, shock in enumerate(shocks):
        level = _PHI * level + shock
        levels[i] = level
    return levels + gaussian(stream, num_runs, ratio_sd / math.sqrt(2))


NOISES: Final[dict[str, Noise]] = {
    "gaussian": gaussian,
    "heavy tail": heavy_tail,
    "linear drift": linear_drift,
    "random walk": random_walk,
    "AR(1)": autoregressive,
}
