"""Numbers and times as the page writes them."""

import re
from typing import Final

from benchctl.analysis.compare.metric_comparison import spread_of_blocks

UNKNOWN: Final = "n/a"
_NEGATIVE: Final = re.compile(r"[\[(]?-[\d.]+[%,;\])]*$")


def minus(text: str) -> str:
    """Hyphens before digits as minus signs, which are as wide as a plus."""
    return text.replace("-", "\N{MINUS SIGN}") if any(c.isdigit() for c in text) else text


def minus_in_numbers(sentence: str) -> str:
    """True minus signs in numbers such as ``-3.1%`` and ``[-2.1,``, and nowhere else."""
    words = sentence.split(" ")
    return " ".join(minus(word) if _NEGATIVE.match(word) else word for word in words)


def number(value: float | None) -> str:
    """Four significant digits, without an exponent where people read."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 10_000:
        return minus(f"{value:,.0f}")
    is_whole = abs(value - round(value)) <= 1e-9 * abs(value)
    return minus(f"{value:.0f}" if is_whole else f"{value:#.4g}".rstrip("."))


def spread(blocks: tuple[float | None, ...]) -> str:
    """Scatter over blocks as ``± 0.6%``; nothing where it is zero or unknown."""
    found = spread_of_blocks(blocks)
    return f"± {found * 100:.1f}%" if found else ""


def probability(p_value: float) -> str:
    """Three digits, or below what."""
    return f"{p_value:.3f}" if p_value >= 0.0005 else "<0.001"


def size(num_bytes: int | None) -> str:
    """GiB with one digit."""
    return UNKNOWN if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
