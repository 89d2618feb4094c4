"""Ratios of two times that are measured in turns, because the clocks of a device drift.

Standard library only.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""An interval covers the median with this probability at least."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Milliseconds of both sides, round by round, and the ratio of the second to the first."""

    base_ms: tuple[float, ...]
    guided_ms: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(guided / base for base, guided in zip(self.base_ms, self.guided_ms, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        return median_interval(self.ratios)


def paired_rounds(base: Callable[[], float], guided: Callable[[], float], rounds: int) -> Paired:
    """Both sides once in each round, in an order that turns from round to round; one round before, not counted."""
    base(), guided()
    base_ms, guided_ms = [], []
    for number in range(rounds):
        if number % 2:
            guided_ms.append(guided())
            base_ms.append(base())
        else:
            base_ms.append(base())
            guided_ms.append(guided())
    return Paired(base_ms=tuple(base_ms), guided_ms=tuple(guided_ms))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Order statistics between which the median lies with ``LEVEL`` at least, of any distribution; None of too few.

    The number of values below the median is binomial with one half.
    """
    count = len(values)
    below, left_out = 0.0, 0
    while True:
        below += math.comb(count, left_out) / 2**count
        if 2 * below > 1 - LEVEL:
            break
        left_out += 1
    ordered = sorted(values)
    return (ordered[left_out - 1], ordered[-left_out]) if left_out else None


def interval_text(interval: tuple[float, float] | None, digits: int = 3) -> str:
    return "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def judged(paired: Paired, mark: float) -> str:
    """Whether a ratio is at most ``mark``: met, missed, or undecided where the interval holds the mark."""
    if paired.interval is None:
        return f"{'met' if paired.ratio <= mark else 'missed'} by the median; too few rounds for an interval"
    low, high = paired.interval
    if low <= mark < high:
        return "undecided"
    return "met" if high <= mark else "missed"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *["--:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, rule, *rows))
