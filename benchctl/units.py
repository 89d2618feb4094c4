"""Factors between units; no other module defines them.

Quantities are in base units, and their names say which (``_ns``, ``_s``, ``_bytes``, ``_frac``); milliseconds and
percent are for readers.
"""

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
