"""Numbers as tables show them."""

from typing import Final

UNKNOWN: Final = "-"


def four_digits(value: float | None) -> str:
    """Four significant digits, without an exponent where people read."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:#.4g}" if abs(value) >= 0.01 else f"{value:.2g}"
