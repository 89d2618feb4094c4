"""Seeded chance: each use has a random stream of its own, so that one cannot disturb another."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, cycle, repeat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the simulator starts without pydantic
    from benchctl.profile.model import Length, LengthRange

TOKENS_PER_BLOCK: Final = 512
"""As in the traces of Mooncake."""
_NUMBERS: Final = range(1 << 16)
"""Numbers that stand for tokens; the size of any vocabulary would do."""
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
    return cycle(length) if isinstance(length, tuple) else (draw_length(length, stream) for _ in repeat(None))


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
    return min(max(round(lognormal(length.mean, length.cv, stream)), length.min), length.max)


def lognormal(mean: float, cv: float, stream: random.Random) -> float:
    """A log-normal value of this mean and coefficient of variation."""
    variance = math.log1p(cv**2)
    return stream.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def numbers_of_prompt(num_tokens: int, index: int, seed: int) -> tuple[int, ...]:
    """The numbers of a prompt of ``num_tokens`` tokens, its own for each ``index``.

    The first is the index, so that no two prompts share a prefix that a server could cache; the others are drawn
    from a stream of this prompt alone.
    """
    return (index, *named_stream(seed, f"text:{index}").choices(_NUMBERS, k=num_tokens - 1))


def prefix_numbers(group: int, num_tokens: int, seed: int) -> tuple[int, ...]:
    """The numbers of the prefix of a group; a shorter one is the beginning of a longer one."""
    return (group, *named_stream(seed, f"prefix:{group}").choices(_NUMBERS, k=num_tokens))[:num_tokens]


def blocks_problem(block_ids: Sequence[int], num_tokens: int) -> str | None:
    """The sentence about more blocks than a prompt has."""
    num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
    if len(block_ids) <= num_blocks:
        return None
    return f"{len(block_ids)} hash_ids for {num_tokens} tokens, which are {num_blocks} of {TOKENS_PER_BLOCK}"


def numbers_of_blocks(block_ids: Sequence[int], num_tokens: int, index: int, seed: int) -> tuple[int, ...]:
    """Numbers of a prompt of ``num_tokens`` tokens: those of its blocks, the last of them cut, then its own."""
    shared = tuple(chain.from_iterable(_numbers_of_block(block_id, seed) for block_id in block_ids))[:num_tokens]
    rest = num_tokens - len(shared)
    return (*shared, *numbers_of_prompt(rest, index, seed)) if rest else shared


@lru_cache(maxsize=8192)
def _numbers_of_block(block_id: int, seed: int) -> tuple[int, ...]:
    return (block_id, *named_stream(seed, f"block:{block_id}").choices(_NUMBERS, k=TOKENS_PER_BLOCK - 1))
