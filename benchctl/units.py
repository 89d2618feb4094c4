"""Factors between base units, the only place that holds them.

Inside benchctl a quantity is in base units and says so in its name (``_ns``, ``_s``, ``_bytes``, ``_frac``);
``ms`` and ``%`` exist where people read them.
"""

from typing import Final

NS_PER_S: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000
NS_PER_US: Final = 1_000
MS_PER_S: Final = 1_000

GIGA: Final = 1e9
TERA: Final = 1e12
PETA: Final = 1e15

MIB: Final = 1 << 20
GIB: Final = 1 << 30

HZ_PER_MHZ: Final = 1_000_000
MILLI_PER_UNIT: Final = 1_000


def ms_from_ns(duration_ns: float) -> float:
    """Nanoseconds to milliseconds."""
    return duration_ns / NS_PER_MS


def s_from_ns(duration_ns: float) -> float:
    """Nanoseconds to seconds."""
    return duration_ns / NS_PER_S


def ns_from_s(duration_s: float) -> int:
    """Seconds to whole nanoseconds, rounded to nearest."""
    return round(duration_s * NS_PER_S)
