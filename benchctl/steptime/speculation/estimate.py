"""Numbers with the interval that counts leave them."""

from dataclasses import dataclass

import numpy as np

from benchctl.steptime.speculation.acceptance import LEVEL, Draws


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval of 95 % where it follows from counts; bounds are None where it does not."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(value: float, draws: Draws | None) -> Estimate:
    """The value with the quantiles of its draws.

    The interval always contains the value: where all drafts were accepted, the posterior's quantiles would not.
    """
    if draws is None:
        return Estimate(value)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))
