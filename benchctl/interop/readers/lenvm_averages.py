"""Times of the sampler in the log of a V2 server of SGLang's LenVM fork: averages since its start.

    [sampler_timing] calls=400 guided=392 sampler_forward=13.220ms lvm_apply=12.850ms/97.2% ...
    [lvm_timing] calls=392 skipped=8 gpu_path=392 fused=63 avg_send_rows=... apply_total=12.850ms ...

The server waits for the device around each section, so these are times of host and device together, and the waiting
slows the server. The average of a key is over the calls in which it occurred, but a line has only the number of all
calls. Between two lines, therefore, only the key that occurs in every call has a mean of its own:

    mean(a, b) = (avg_b n_b - avg_a n_a) / (n_b - n_a), to within 0.0005 ms (n_a + n_b) / (n_b - n_a)

because averages are printed with three decimals.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

WHOLE_OF: Final = {"sampler_timing": "sampler_forward", "lvm_timing": "apply_total"}
"""The key of each line that occurs in every call."""
_LINE: Final = re.compile(r"\[(sampler_timing|lvm_timing)\]\s+(.*)")
_PAIR: Final = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?)(ms)?(?:/-?\d+(?:\.\d+)?%)?(?=\s|$)")
_MOST: Final = 2.0**53
"""Above every count and every time in ms; a damaged line may have anything."""
_ROUNDING_MS: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """One line. ``means_ms`` are averages since the start by section, ``numbers`` the counts of the line."""

    source: str
    calls: int
    means_ms: Mapping[str, float]
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The calls between two lines: their mean time in the section that all of them have, and its rounding error."""

    source: str
    first_call: int
    last_call: int
    mean_ms: float
    rounding_ms: float


def read_averages(lines: Iterable[str]) -> tuple[Averages, ...]:
    """The lines of averages in a server's log, in their order; all others are skipped."""
    return tuple(averages for line in lines if (averages := _averages(line)) is not None)


def _averages(line: str) -> Averages | None:
    match = _LINE.search(line)
    if match is None:
        return None
    pairs = [pair for pair in _PAIR.findall(match[2]) if abs(float(pair[1])) < _MOST]
    numbers = {name: float(value) for name, value, unit in pairs if not unit}
    if "calls" not in numbers:  # a line that was cut
        return None
    means = {name: float(value) for name, value, unit in pairs if unit}
    return Averages(source=match[1], calls=int(numbers["calls"]), means_ms=means, numbers=numbers)


def windows_of(averages: Sequence[Averages]) -> Iterator[Window]:
    """The calls between successive lines of one kind; a restarted server begins anew."""
    for source, whole in WHOLE_OF.items():
        lines = [line for line in averages if line.source == source and whole in line.means_ms]
        before = Averages(source=source, calls=0, means_ms={whole: 0.0}, numbers={})
        for earlier, later in pairwise([before, *lines]):
            first = earlier if later.calls > earlier.calls else before
            num_calls = later.calls - first.calls
            if num_calls <= 0:
                continue
            total_ms = later.means_ms[whole] * later.calls - first.means_ms[whole] * first.calls
            yield Window(
                source=source,
                first_call=first.calls + 1,
                last_call=later.calls,
                mean_ms=total_ms / num_calls,
                rounding_ms=_ROUNDING_MS * (later.calls + first.calls) / num_calls,
            )
