"""Numbers as tables show them."""

from typing import Final

from benchctl.analysis.metrics.bounds import MARK

UNKNOWN: Final = "-"


def four_digits(value: float | None) -> str:
    """Four significant digits, without an exponent where people read."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:#.4g}" if abs(value) >= 0.01 else f"{value:.2g}"


def marked(text: str, does_rest_on_bounds: object) -> str:
    """A number with the mark that it rests on arrivals which are only known between bounds, where it does."""
    return f"{text} {MARK}" if does_rest_on_bounds else text
