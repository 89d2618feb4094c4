"""Seeded chance: each use has a random stream of its own, so that one cannot disturb another."""

import math
import random
from collections.abc import Iterator
from itertools import cycle, repeat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the simulator starts without pydantic
    from benchctl.profile.model import Length, LengthRange

_SEED_BITS: Final = 31
"""Every engine takes a seed of this size."""


def named_stream(seed: int, name: str) -> random.Random:
    """The stream ``name`` of a profile's seed, the same on every machine."""
    return random.Random(f"{seed}:{name}")  # noqa: S311  # repeatable on purpose; nothing here is a secret


def distinct_seeds(stream: random.Random, num_bits: int = _SEED_BITS) -> Iterator[int]:
    """Seeds of requests, none twice: equal seeds would give equal samples of a prompt."""
    used: set[int] = set()
    while True:
        seed = stream.getrandbits(num_bits)
        if seed not in used:
            used.add(seed)
            yield seed


def draw_lengths(length: "Length", stream: random.Random) -> Iterator[int]:
    """Lengths in tokens without end: those of a list in turn, or each drawn by ``draw_length``."""
    if isinstance(length, tuple):
        return cycle(length)
    return (draw_length(length, stream) for _ in repeat(None))


def draw_length(length: "int | LengthRange", stream: random.Random) -> int:
    """One length in tokens, fixed or drawn log-normally.

    A range is log-normal: ``exp(mu + sigma z)`` with ``sigma^2 = ln(1 + cv^2)`` and ``mu = ln(mean) - sigma^2/2``,
    which has the given mean and coefficient of variation (the moments of the log-normal distribution), rounded
    to nearest and then moved to the nearer end of [min, max] where it lies outside. Cutting keeps the number of
    draws at one each, so that a longer request set extends a shorter one; it moves the mean where the range is
    narrow.
    """
    if isinstance(length, int):
        return length
    variance = math.log1p(length.cv**2)
    num_tokens = stream.lognormvariate(math.log(length.mean) - variance / 2, math.sqrt(variance))
    return min(max(round(num_tokens), length.min), length.max)
