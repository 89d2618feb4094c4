"""Factors between units, and numbers as text: no other module defines either.

Quantities are in base units, and their names say which (``_ns``, ``_s``, ``_bytes``, ``_frac``); milliseconds and
percent are for readers. Digits, signs and units that readers see are decided here: tables, messages, sentences and
the page take their numbers from these functions, so that one number looks the same wherever it appears.
"""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Final

NS_PER_S: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000
NS_PER_US: Final = 1_000
US_PER_S: Final = 1_000_000
MS_PER_S: Final = 1_000

SECONDS_PER_MINUTE: Final = 60
SECONDS_PER_HOUR: Final = 3600
SECONDS_PER_DAY: Final = 86_400

GIGA: Final = 1e9
TERA: Final = 1e12
PETA: Final = 1e15

MIB: Final = 1 << 20
GIB: Final = 1 << 30

HZ_PER_MHZ: Final = 1_000_000
MILLI_PER_UNIT: Final = 1_000


def us_from_ms(duration_ms: float) -> float:
    """Milliseconds to microseconds."""
    return duration_ms * US_PER_S / MS_PER_S


def us_from_ns(duration_ns: float) -> float:
    """Nanoseconds to microseconds."""
    return duration_ns / NS_PER_US


def ms_from_ns(duration_ns: float) -> float:
    """Nanoseconds to milliseconds."""
    return duration_ns / NS_PER_MS


def s_from_ns(duration_ns: float) -> float:
    """Nanoseconds to seconds."""
    return duration_ns / NS_PER_S


def ns_from_s(duration_s: float) -> int:
    """Seconds to whole nanoseconds, rounded to nearest."""
    return round(duration_s * NS_PER_S)


UNKNOWN: Final = "-"
"""Stands for an unknown number in tables."""
NOT_AVAILABLE: Final = "n/a"
"""Stands for an unknown number in comparisons."""
MINUS: Final = "\N{MINUS SIGN}"


def four_digits(value: float | None) -> str:
    """Four significant digits without an exponent; whole numbers from 1,000 on."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:#.4g}" if abs(value) >= 0.01 else f"{value:.2g}"


def signed_four_digits(value: float) -> str:
    """``four_digits`` with its sign, plus included."""
    return f"{'-' if value < 0 else '+'}{four_digits(abs(value))}"


def three_digits(value: float) -> str:
    """Three significant digits, trailing zeros included: ``1.50``."""
    return f"{value:#.3g}".rstrip(".")


def signed_three_digits(value: float) -> str:
    """Three significant digits with a sign, and at most three decimals."""
    if abs(value) < 5e-4:
        return "+0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:+.{min(decimals, 3)}f}"


def in_a_row(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def short_number(value: float) -> str:
    """Three significant digits without an exponent, thousands grouped; for labels inside pictures."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def whole(value: float | None) -> str:
    """A count without decimals."""
    return UNKNOWN if value is None else f"{value:.0f}"


def percentage(fraction: float, digits: int = 3) -> str:
    """A fraction with that many significant digits: ``2.5%``."""
    return f"{float(f'{fraction * 100:.{digits}g}'):g}%"


def fraction(text: str) -> float:
    """``2.5%`` or ``0.025`` as a number. Raises ValueError for any other text."""
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def percentage_change(change_frac: float) -> str:
    """A relative change with its sign: ``+14.3%``, below one percent ``+0.43%``."""
    return f"{change_frac * 100:+.1f}%" if abs(change_frac) >= 0.01 else f"{change_frac * 100:+.2f}%"


def change_of_ratio(ratio: float) -> str:
    """A ratio as a relative change, with fewer decimals the larger it is: ``+458%``, ``-1.3%``, ``+0.02%``."""
    change_percent = (ratio - 1) * 100
    decimals = 0 if abs(change_percent) >= 10 else 1 if abs(change_percent) >= 1 else 2
    return f"{change_percent:+.{decimals}f}%"


def scatter(scatter_frac: float | None) -> str:
    """Relative scatter over blocks as ``± 0.6%``; empty where it is zero or unknown."""
    return f"± {scatter_frac * 100:.1f}%" if scatter_frac else ""


def p_value(probability: float) -> str:
    """Three decimals, or ``<0.001``."""
    return f"{probability:.3f}" if probability >= 0.0005 else "<0.001"


def gib(num_bytes: int | None) -> str:
    """GiB with one decimal: ``79.6 GiB``."""
    return NOT_AVAILABLE if num_bytes is None else f"{num_bytes / GIB:.1f} GiB"


def megabytes(num_bytes: int) -> str:
    """MB with one decimal: ``12.3 MB``."""
    return f"{num_bytes / 1e6:,.1f} MB"


def milliseconds(duration_ns: float | None) -> str:
    """Milliseconds with three significant digits, without the unit."""
    return "unknown" if duration_ns is None else f"{ms_from_ns(duration_ns):.3g}"


def duration(seconds: float) -> str:
    """A duration in the unit that suits it: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def count_of(number: int, noun: str) -> str:
    """``1 block``, ``8 blocks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def range_of(numbers: Sequence[float], form: str | Callable[[float], str] = "") -> str:
    """``8``, or ``6 to 8`` where the numbers differ in this form, a format or a function that writes one."""
    low, high = (form(end) if callable(form) else f"{end:{form}}" for end in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def first_of(items: Sequence[str], limit: int) -> str:
    """The first ``limit`` items and the number of the others: ``a, b and 4 more``."""
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def capitalized(sentence: str) -> str:
    """The sentence with a capital first letter; the rest stays as it is."""
    return sentence[:1].upper() + sentence[1:]


def shortened(text: str, length: int) -> str:
    """The text, cut to ``length`` characters with an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def shortened_inside(text: str, length: int) -> str:
    """The text, cut to ``length`` characters by an ellipsis before its last two thirds, which tell names apart."""
    if len(text) <= length:
        return text
    end = 2 * length // 3
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


_COPIED: Final = re.compile(r"(?<=: )benchctl [^;]*|(?<!\w)'[^'\n]*'(?!\w)")
"""Commands behind a colon, and what stands between quotes."""
_GLUE: Final = "\x1f"
"""Stands for a blank at which no line ends."""


def folded(text: str, width: int) -> str:
    """The text in lines of at most ``width`` characters, those that continue one with an indent.

    Words, and with them paths, stay whole, and so do commands to copy.
    """
    return "\n".join(line if len(line) <= width else _folded_line(line, width) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    indent = " " * (2 + len(line) - len(line.lstrip(" ")))
    glued = _COPIED.sub(lambda copied: copied.group().replace(" ", _GLUE), line)
    lines = textwrap.wrap(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_GLUE, " ")


def minus(text: str) -> str:
    """The text with true minus signs for hyphens, if it holds a digit."""
    return text.replace("-", MINUS) if any(character.isdigit() for character in text) else text


def minus_in_numbers(sentence: str) -> str:
    """The sentence with true minus signs in numbers such as ``-3.1%`` and ``[-2.1,``, and nowhere else."""
    words = sentence.split(" ")
    return " ".join(minus(word) if re.match(r"[\[(]?-[\d.]+[%,;\])]*$", word) else word for word in words)
