"""Arithmetic with values that may be unknown (None): a result with an unknown part is unknown, never smaller."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from benchctl.units import ms_from_ns

N = TypeVar("N", int, float)


def known_values(values: Iterable[N | None]) -> list[N]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def total(values: Sequence[N | None]) -> N | None:
    """The sum; unknown if there are no values or any is unknown."""
    parts = known_values(values)
    return sum(parts) if parts and len(parts) == len(values) else None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known."""
    parts = known_values(values)
    return fmean(parts) if parts else None


def ms_or_none(duration_ns: float | None, factor: float = 1.0) -> float | None:
    """A duration in ms, multiplied by ``factor``; unknown if it is unknown."""
    return None if duration_ns is None else ms_from_ns(duration_ns * factor)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """Numerator over denominator; unknown if either is, or if the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator
