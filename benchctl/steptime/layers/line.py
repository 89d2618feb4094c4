"""Piecewise linear interpolation over one measured axis."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from benchctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by straight lines, of which the outer two go on; ``xs`` ascends.

    Below the first point a line stays at its value or falls, above the last it stays or rises: the time of less
    work is not longer. One point alone makes a constant.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Line":
        """The line through points in any order. Raises UsageError without a point, or with two of one place."""
        ordered = sorted(points)
        xs = tuple(x for x, _ in ordered)
        if not xs or len(set(xs)) < len(xs):
            raise UsageError(
                f"a measured line has {len(xs)} points at {len(set(xs))} places; it needs at least one point, and "
                "one for each place: remove repeated rows"
            )
        return cls(xs, tuple(y for _, y in ordered))

    def at(self, x: float) -> float:
        """The value at ``x``."""
        if len(self.xs) == 1:
            return self.ys[0]
        low, high, share = bracket(self.xs, x)
        low_y, high_y = self.ys[low], self.ys[high]
        if share < 0:
            return max(low_y + min(share * (high_y - low_y), 0.0), 0.0)
        if share > 1:
            return high_y + max((share - 1) * (high_y - low_y), 0.0)
        return low_y + share * (high_y - low_y)


@dataclass(frozen=True, slots=True)
class Surface:
    """Lines over y, side by side at places on x; between two of them time is linear in x as well."""

    lines: tuple[tuple[float, Line], ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float, float]]) -> "Surface":
        """The surface through points (x, y, time). Raises UsageError without a point, or with two of one place."""
        of_x: dict[float, list[tuple[float, float]]] = {}
        for x, y, time_us in points:
            of_x.setdefault(x, []).append((y, time_us))
        if not of_x:
            Line.through(())
        return cls(tuple((x, Line.through(of_x[x])) for x in sorted(of_x)))

    def at(self, x: float, y: float) -> float:
        """The value at ``x`` and ``y``."""
        return Line.through((mark, line.at(y)) for mark, line in self._around(x)).at(x)

    def _around(self, x: float) -> tuple[tuple[float, Line], ...]:
        if len(self.lines) == 1:
            return self.lines
        low, high, _ = bracket(tuple(mark for mark, _ in self.lines), x)
        return self.lines[low], self.lines[high]


def bracket(xs: tuple[float, ...], x: float) -> tuple[int, int, float]:
    """Two neighbours of ``x`` among at least two places, and its share of the way between them.

    The share is below 0 or above 1 beyond the ends, where the outer two places are the neighbours.
    """
    high = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low = high - 1
    return low, high, (x - xs[low]) / (xs[high] - xs[low])
