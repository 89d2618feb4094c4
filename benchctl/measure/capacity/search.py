"""The largest load under objectives: doubled or halved until it is enclosed, then bisected.

That one load above the largest breaks an objective is seen; that every larger one does is assumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

_WIDTH: Final = 1.02
"""Rates are bisected until the enclosing ones differ by at most this factor."""
_MOST_DOUBLINGS: Final = 12


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that holds, and the smallest tried above it that does not; None where none was seen."""

    holds: float | None
    breaks: float | None


def enclosed(sizes: Sequence[float], holds: Sequence[bool]) -> Largest:
    """What a grid says: the largest size below the first that breaks an objective, and that one."""
    good, bad = None, None
    for size, is_good in sorted(zip(sizes, holds, strict=True)):
        if not is_good:
            bad = size
            break
        good = size
    return Largest(good, bad)


def find_largest(tries: Callable[[float], bool], start: Largest, *, is_whole: bool) -> Largest:
    """Narrow ``start`` down by calling ``tries``, which tells if a size holds the objectives."""
    good, bad = start.holds, start.breaks
    for _ in range(_MOST_DOUBLINGS):
        if good is not None and bad is not None:
            break
        size = good * 2 if good is not None else (bad or 1.0) / 2
        if is_whole and (size := int(size)) < 1:
            return Largest(None, bad)
        if tries(size):
            good = size
        else:
            bad = size
    while good is not None and bad is not None and not _is_narrow(good, bad, is_whole=is_whole):
        size = (good + bad) // 2 if is_whole else sqrt(good * bad)
        if tries(size):
            good = size
        else:
            bad = size
    return Largest(good, bad)


def _is_narrow(good: float, bad: float, *, is_whole: bool) -> bool:
    return bad - good <= 1 if is_whole else bad <= good * _WIDTH
