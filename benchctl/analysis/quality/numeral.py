r"""Numbers as people and models write them, parsed exactly.

``plain`` turns LaTeX and typography into plain characters; ``numerals`` finds the numbers in the result:
``70,000``, ``$-3.50``, ``20%``, ``3/4``, ``1 1/2``, ``2.5e3``, ``3 \times 10^{4}``. Values are fractions, so that
5.00 is 5 and 0.1 is a tenth. Nothing is evaluated, and the time is linear in the length of the input.
"""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

MAX_DIGITS: Final = 300
"""Of one numeral; longer ones are ignored. A model that repeats a digit to its limit has answered nothing."""

_THIN: Final = "\u2009"
_TYPOGRAPHY: Final = (
    dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
    | dict.fromkeys(map(ord, "\u00a0\u202f"), _THIN)
    | {0xFF10 + digit: str(digit) for digit in range(10)}
    | {0xD7: "*", 0xFF0C: ",", 0xFF0E: ".", 0xFF04: "$", 0xFF05: "%", 0x2044: "/"}
)
_VULGAR: Final = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_PART: Final = r"\{\s*(-?[0-9.,]{1,60})\s*\}"
_LATEX: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>\n]*>>", ""),  # GSM8K's calculator
        (r"\*\*|__|`", ""),
        (r"\\!|\\displaystyle|\{\}", ""),
        (r"\\,", _THIN),
        (r"\{,\}", ","),
        (r"\\[;: ]|~|\\q?quad\b|\\left\b|\\right\b|\\[()\[\]]", " "),
        (r"\\([$%&#])", r"\1"),
        (r"\^\s{0,3}\{?\s{0,3}(?:\\circ|\\degree)\s{0,3}\}?|°", " "),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s{0,3}\{([^{}]{0,200})\}", r" \1 "),
        (r"(?<=[0-9])\\[dtc]?frac(?![a-z])", r" \\frac"),
        (rf"\\[dtc]?frac\s{{0,3}}{_PART}\s{{0,3}}{_PART}", r"\1/\2"),
        (r"\\[dtc]?frac\s{0,3}([0-9])\s{0,3}([0-9])", r"\1/\2"),
        (r"\\(?:times|cdot)\b", "*"),
        (r"\\(?:approx|simeq)\b|≈", "="),
        (r"(?<=[A-Za-z])\s{0,3}\^\s{0,3}(?:\{[0-9]{1,3}\}|[0-9])", ""),  # of a unit: cm^2
        (r"\b(?:USD|US|EUR|GBP|INR|Rs\.?)\s{0,3}(?=[$€£₹]?\s{0,3}-?[0-9.])", ""),
    )
)
"""In this order; each pattern matches within a bounded distance."""

_DECIMAL: Final = rf"(?:[0-9]{{1,3}}(?:[,{_THIN}][0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMERAL: Final = re.compile(
    rf"""(?<![0-9A-Za-z_.^])
    (?P<sign>(?:(?<![)\]}}])[-+])?)(?P<currency>[$€£¥₹]?)\s{{0,3}}(?P<inner_sign>-?)
    (?:(?P<whole>[0-9]{{1,20}})\s{{1,3}}(?P<over>[0-9]{{1,20}})/(?P<under>[0-9]{{1,20}})
      |(?P<number>{_DECIMAL})(?:\s{{0,3}}/\s{{0,3}}(?P<divisor>[0-9]{{1,20}}(?:\.[0-9]{{1,20}})?))?)
    (?:[eE](?P<exponent>[-+]?[0-9]{{1,20}})(?![0-9A-Za-z])
      |\s{{0,3}}[x*]\s{{0,3}}10\s{{0,3}}\^\s{{0,3}}\{{?\s{{0,3}}(?P<power>-?[0-9]{{1,20}})\s{{0,3}}\}}?)?
    (?P<after>\s{{0,3}}%|\s{{0,3}}(?:thousand|million|billion|trillion)\b|)""",
    re.VERBOSE,
)
_SCALES: Final = {
    "%": Fraction(1, 100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}

Readings = tuple[Fraction, ...]
"""Values of one numeral: its number as written and, before a per cent sign or a word such as ``million``, also
multiplied by that, because questions ask for either."""


def plain(text: str) -> str:
    """``text`` without LaTeX and typography, as far as numbers are concerned."""
    text = _VULGAR.sub(_written_out, text.translate(_TYPOGRAPHY))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def numerals(text: str) -> Iterator[Readings]:
    """The numbers of a plain text, from left to right, without impossible ones (a division by 0)."""
    for match in _NUMERAL.finditer(text):
        value = _value(match)
        if value is not None:
            scale = _SCALES.get(match["after"].strip())
            yield (value,) if scale is None else (value, value * scale)


def only_number(text: str) -> Readings | None:
    """The only number of a text, which may have units and words around it, but not a formula.

    Of an equation or a rounding the right side counts. None where there is no number, several different ones, a
    power, or a LaTeX command that ``plain`` does not know.
    """
    content = plain(text)
    _, _, right = content.rpartition("=")
    content = right if any(numerals(right)) else content
    content = content.strip(" \t\n*")  # of emphasis
    numbers = set(numerals(content))
    return numbers.pop() if len(numbers) == 1 and not _is_formula(content) else None


def _is_formula(content: str) -> bool:
    rest = _NUMERAL.sub("", content)
    return "\\" in rest or "^" in rest or "*" in rest


def _written_out(match: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/")


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    if match["whole"] is not None:
        divisor = Fraction(match["under"])
        value = int(match["whole"]) + int(match["over"]) / divisor if divisor else None
    else:
        divisor = Fraction(match["divisor"] or 1)
        value = Fraction(match["number"].replace(",", "").replace(_THIN, "")) / divisor if divisor else None
    power = int(match["exponent"] or match["power"] or 0)
    if value is None or abs(power) > MAX_DIGITS:
        return None
    is_negative = (match["sign"] == "-") != (match["inner_sign"] == "-")
    return (-value if is_negative else value) * Fraction(10) ** power
