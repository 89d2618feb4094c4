"""Sizes of KV caches: equal where both servers were told a size, alike where each chose its own.

Two vLLM servers of equal options that size their caches by the memory that they find differ by a few blocks of
many thousands from start to start. More than that is another amount of memory, and with it other preemptions and
batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

KV_SIZES: Final = frozenset(
    {"server.num_gpu_blocks", "server.kv_cache_size_tokens", "server.kv_cache_max_concurrency"}
)
"""What vLLM reports of the size of its KV cache."""
_STATED: Final = ("server.kv_cache_memory_bytes", "server.num_gpu_blocks_override")
_LIKE: Final = 1.02
"""Largest ratio of two sizes that servers of equal options choose. vLLM keeps 150 MiB for the inaccuracy of its own
measurement of free memory, which is 0.6 % of a cache of 25 GiB."""


_Sides: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


def alike_sizes(key: str, sides: _Sides, runs: Iterable[Mapping[str, str]]) -> _Sides:
    """The values of both sides, each without variation that means nothing; equal ones where the sides are alike.

    Only sizes that no option states vary so; ``runs`` are the settings of all runs. A size that one server does not
    report is unknown, and no difference.
    """
    if key not in KV_SIZES:
        return sides
    left, right = (tuple(filter(_is_number, side)) for side in sides)
    if not left or not right:
        return (), ()
    if any(is_stated(settings) for settings in runs):
        return left, right
    if _are_alike((*left, *right)):
        return left[:1], left[:1]
    return (left[:1] if _are_alike(left) else left, right[:1] if _are_alike(right) else right)


def is_stated(settings: Mapping[str, str]) -> bool:
    """True for a server that was told the size of its KV cache."""
    return any(settings.get(option, "null") != "null" for option in _STATED)


def _are_alike(values: Sequence[str]) -> bool:
    numbers = [float(value) for value in values]
    return min(numbers) > 0 and max(numbers) <= _LIKE * min(numbers)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
