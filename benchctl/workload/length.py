"""Token lengths that a profile asks for: fixed, or drawn log-normally."""

import math
import random

from benchctl.profile.workload import Length


def draw_length(length: Length, stream: random.Random) -> int:
    """One length in tokens.

    A range is log-normal: ``exp(mu + sigma z)`` with ``sigma^2 = ln(1 + cv^2)`` and ``mu = ln(mean) - sigma^2/2``,
    which has the given mean and coefficient of variation (the moments of the log-normal distribution), rounded
    to nearest and then moved to the nearer end of [min, max] where it lies outside. Cutting keeps the number of
    draws at one each, so that a longer request set extends a shorter one; it moves the mean where the range is
    narrow.
    """
    if isinstance(length, int):
        return length
    variance = math.log1p(length.cv**2)
    drawn = stream.lognormvariate(math.log(length.mean) - variance / 2, math.sqrt(variance))
    return min(max(round(drawn), length.min), length.max)
