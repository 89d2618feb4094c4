"""Run-to-run variation of step times, of the published size.

Five identical baselines of the k sweep have a coefficient of variation of 14 %, four guided runs with k >= 2 one
of 1.8 %. Each server life draws one log-normal factor of mean 1 and that variation; each step a small one on top.
"""

import math
from collections.abc import Callable
from typing import Final, TypeAlias

from benchctl.workload.seeded import named_stream

_BASELINE_CV: Final = 0.14
_GUIDED_CV: Final = 0.018
_STEP_CV: Final = 0.02

NoiseSource: TypeAlias = Callable[[], float]
"""Draws the factor of the next step."""


def published_noise(seed: int, *, has_value_model: bool) -> NoiseSource:
    """Factors of one server life. Streams: ``<seed>:server`` for the life, ``<seed>:steps`` for the steps."""
    sigma, mu = _lognormal(_GUIDED_CV if has_value_model else _BASELINE_CV)
    life = named_stream(seed, "server").lognormvariate(mu, sigma)
    step_sigma, step_mu = _lognormal(_STEP_CV)
    draw = named_stream(seed, "steps").lognormvariate
    return lambda: life * draw(step_mu, step_sigma)


def _lognormal(cv: float) -> tuple[float, float]:
    """Sigma and mu of the log-normal distribution of mean 1: s^2 = ln(1 + cv^2), mu = -s^2 / 2."""
    variance = math.log1p(cv * cv)
    return math.sqrt(variance), -variance / 2
