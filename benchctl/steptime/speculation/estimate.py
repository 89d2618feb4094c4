"""Numbers with the interval that counts leave them."""

import math
from dataclasses import dataclass

import numpy as np

from benchctl.steptime.speculation.acceptance import LEVEL, Draws


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval of 95 % where it follows from counts; bounds are None where it does not."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def log_half_width(self) -> float | None:
        """Half the interval as a logarithm; None without a positive one."""
        if self.low is None or self.high is None or self.low <= 0:
            return None
        return math.log(self.high / self.low) / 2

    def times(self, factor: float) -> "Estimate":
        """The estimate of a positive multiple."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


def estimate(value: float, draws: Draws | None) -> Estimate:
    """The value with the quantiles of its draws.

    Draw i of n, in order, stands for the level (i - 1/2) / n. The interval always contains the value: where all
    drafts were accepted, the posterior's quantiles would not.
    """
    if draws is None:
        return Estimate(value)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="hazen")
    return Estimate(value, min(float(low), value), max(float(high), value))


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """The quotient of two independent estimates: half-widths of logarithms add up in squares."""
    value, widths = above.value / below.value, (above.log_half_width, below.log_half_width)
    if widths[0] is None or widths[1] is None:
        return Estimate(value)
    factor = math.exp(math.hypot(widths[0], widths[1]))
    return Estimate(value, value / factor, value * factor)
