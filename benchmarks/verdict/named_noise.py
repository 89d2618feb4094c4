"""Noise of runs, by name: what servers do from one life to the next, in virtual time.

Each process gives the logarithm of a number for every run of an experiment, in the order in which they ran. The
first five have the same scatter of the *block log-ratio* of two neighbours in a block, d = ln(B / A): its
standard deviation is the ``ratio_sd`` that was asked for. What the linear drift adds to that is no scatter but an
effect of the position. The others are those of bad machines: the scatter that was asked for, and on top of it
what their names say.
"""

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]
Noise: TypeAlias = Callable[[np.random.Generator, NDArray[np.bool_], float], Values]
"""(stream, which runs are the baseline's, scatter of the block log-ratio) to the logarithms, run by run."""

_SKEW_SIGMA: Final = 1.0
_DRIFT_PER_RUN: Final = 0.005
_PHI: Final = 0.8


def gaussian(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """Independent runs, normal logarithms."""
    return stream.normal(0, ratio_sd / math.sqrt(2), len(is_baseline))


def heavy_tail(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """Independent runs, most a little fast and a few very slow: log-normal, skewness 6, excess kurtosis 111."""
    draws = stream.lognormal(0, _SKEW_SIGMA, len(is_baseline))
    mean = math.exp(_SKEW_SIGMA**2 / 2)
    sd = mean * math.sqrt(math.expm1(_SKEW_SIGMA**2))
    return (draws - mean) / sd * ratio_sd / math.sqrt(2)


def linear_drift(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """A machine that warms up: each run 0.5 % slower than the one before, and gaussian noise."""
    return gaussian(stream, is_baseline, ratio_sd) + _DRIFT_PER_RUN * np.arange(len(is_baseline))


def random_walk(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """A level that wanders: half of the variance of a ratio is a step of the level, half is the run's own."""
    return np.cumsum(stream.normal(0, ratio_sd / math.sqrt(2), len(is_baseline))) + gaussian(
        stream, is_baseline, ratio_sd / math.sqrt(2)
    )


def autoregressive(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """A level that wanders and returns: AR(1) with coefficient 0.8, half of the variance of a ratio."""
    sd = ratio_sd / 2 / math.sqrt(1 - _PHI)
    shocks = stream.normal(0, sd * math.sqrt(1 - _PHI**2), len(is_baseline))
    level, levels = stream.normal(0, sd), np.empty(len(is_baseline))
    for i, shock in enumerate(shocks):
        level = _PHI * level + shock
        levels[i] = level
    return levels + gaussian(stream, is_baseline, ratio_sd / math.sqrt(2))


def regimes(gap: float, switching: float) -> Noise:
    """A machine with two speeds, ``gap`` apart, that changes between them before a run with that probability."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        switches = stream.random(len(is_baseline)) < switching
        is_slow = (np.cumsum(switches) + stream.integers(2)) % 2
        return gaussian(stream, is_baseline, ratio_sd) + math.log1p(gap) * is_slow

    return noise


def outliers(share: float, slower: float) -> Noise:
    """A share of all runs is slower by that fraction."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        is_outlier = stream.random(len(is_baseline)) < share
        return gaussian(stream, is_baseline, ratio_sd) + math.log1p(slower) * is_outlier

    return noise


def noisy_baseline(baseline_sd: float) -> Noise:
    """The baseline scatters by ``baseline_sd`` from run to run, other arms by 1.8 %, whatever was asked for."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], _ratio_sd: float) -> Values:
        return stream.normal(size=len(is_baseline)) * np.where(is_baseline, baseline_sd, 0.018)

    return noise


def clock_steps(num_steps: int) -> Noise:
    """The level of the whole machine jumps so many times in an experiment, by 5 to 10 % up or down."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        values = gaussian(stream, is_baseline, ratio_sd)
        for _ in range(num_steps):
            begins = stream.integers(1, len(is_baseline))
            values[begins:] += stream.choice([-1.0, 1.0]) * math.log1p(stream.uniform(0.05, 0.1))
        return values

    return noise


def changing_clock(share: float, step: float) -> Noise:
    """In a share of the blocks the clock changes by ``step``, up or down, before one of the runs; then back."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        num_blocks = int(is_baseline.sum())
        values = gaussian(stream, is_baseline, ratio_sd).reshape(num_blocks, -1)
        begins = stream.integers(1, values.shape[1], num_blocks)
        steps = stream.choice([-1.0, 1.0], num_blocks) * math.log1p(step) * (stream.random(num_blocks) < share)
        is_after = np.arange(values.shape[1]) >= begins[:, None]
        return (values + steps[:, None] * is_after).ravel()

    return noise


def speed_of_each_run(gap: float) -> Noise:
    """A machine with two speeds that lie ``gap`` apart; each run has one of them, whatever the others have."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        is_slow = stream.random(len(is_baseline)) < 0.5
        return gaussian(stream, is_baseline, ratio_sd) + math.log1p(gap) * is_slow

    return noise


def uneven(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
    """Heteroscedastic: the scatter of a run is itself log-normal around what was asked for (sigma 0.7)."""
    scatters = stream.lognormal(0, 0.7, len(is_baseline))
    return gaussian(stream, is_baseline, ratio_sd) * scatters


NOISES: Final[dict[str, Noise]] = {
    "gaussian": gaussian,
    "heavy tail": heavy_tail,
    "linear drift": linear_drift,
    "random walk": random_walk,
    "AR(1)": autoregressive,
}

BAD_MACHINES: Final[dict[str, Noise]] = {
    "two speeds, 8 %, 0.1": regimes(0.08, 0.1),
    "two speeds, 10 %, 0.2": regimes(0.10, 0.2),
    "two speeds, 15 %, 0.3": regimes(0.15, 0.3),
    "outliers, 10 % by 30 %": outliers(0.1, 0.3),
    "outliers, 10 % by 10 %": outliers(0.1, 0.1),
    "noisy baseline, 3 %": noisy_baseline(0.03),
    "noisy baseline, 14 %": noisy_baseline(0.14),
    "uneven": uneven,
    "one clock step": clock_steps(1),
    "two clock steps": clock_steps(2),
    "clock, 5 % in half of the blocks": changing_clock(0.5, 0.05),
    "clock, 8 % in three of ten blocks": changing_clock(0.3, 0.08),
    "each run at one of two speeds, 8 %": speed_of_each_run(0.08),
}
"""Noise of machines that a mean does not get along with; two speeds: how far apart, and the chance of a change."""

ALL: Final[dict[str, Noise]] = NOISES | BAD_MACHINES
