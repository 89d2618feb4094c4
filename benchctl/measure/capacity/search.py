"""The largest load under objectives: doubled or halved until it is enclosed, then bisected.

That one load above the largest breaks an objective is seen; that every larger one does is assumed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Final

_WIDTH: Final = 1.02
"""Rates are bisected until the enclosing ones differ by at most this factor."""
_MOST_TRIES: Final = 40
_FIRST: Final = 2.0


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that holds the objectives, and the smallest seen to break them; None where there is none."""

    holds: float | None
    breaks: float | None


def enclosed(outcomes: Mapping[float, bool | None]) -> Largest:
    """The result of a grid: the largest size below the first that breaks an objective, and that one.

    ``outcomes`` says of each size if it holds the objectives; None where its load was too short to tell.
    """
    good, bad = None, None
    for size in sorted(outcomes):
        if outcomes[size] is False:
            bad = size
            break
        if outcomes[size]:
            good = size
    return Largest(good, bad)


def find_largest(tries: Callable[[float], bool | None], start: Largest, *, is_whole: bool) -> Largest:
    """Narrow ``start`` down by calling ``tries``, which says of a size what ``enclosed`` takes."""
    good, bad = start.holds, start.breaks
    for _ in range(_MOST_TRIES):
        size = _next_size(good, bad, is_whole=is_whole)
        outcome = None if size is None else tries(size)
        if outcome is None:
            break
        good, bad = (size, bad) if outcome else (good, size)
    return Largest(good, bad)


def _next_size(good: float | None, bad: float | None, *, is_whole: bool) -> float | None:
    """The size to try next; None where nothing is left to find."""
    if good is None:
        size = (bad or _FIRST) / 2
        return None if is_whole and size < 1 else size // 1 if is_whole else size
    if bad is None:
        return good * 2
    if is_whole:
        return None if bad - good <= 1 else (good + bad) // 2
    return None if bad <= good * _WIDTH else sqrt(good * bad)
