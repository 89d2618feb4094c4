"""Questions to the program ``nvidia-smi``, whose fields differ between drivers.

A driver refuses a whole query for one field that it does not know, on standard output and with exit code 2:
``Field "clocks_event_reasons.active" is not a valid field to query.`` Such a field is asked for under its other
names, and then left out. What a device cannot tell stands in brackets: ``[N/A]``, ``[GPU requires reset]``.
"""

import os
import re
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Final

from benchctl.units import MS_PER_S
from benchctl.untrusted.text import visible_line

PROGRAM: Final = "nvidia-smi"
_CALL_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.1
_MAX_LINE: Final = 1 << 16
"""Bytes of a line that is still read; the program's own have some hundred."""
_MOST: Final = 1e12
"""Most of any quantity in the units of the program, far above watts, MiB and MHz of devices; NaN is not below."""
_REASON_CHARS: Final = 200
_INDEX: Final = re.compile(r"[0-9]{1,4}")
_UNKNOWN_FIELD: Final = re.compile(r'[Ff]ield "([^"]*)" is not a valid field to query')

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "index": ("index",),
    "uuid": ("uuid", "gpu_uuid"),
    "memory_total": ("memory.total",),
    "driver": ("driver_version",),
    "name": ("name", "gpu_name"),
    "utilization_frac": ("utilization.gpu",),
    "memory_used_bytes": ("memory.used",),
    "power_w": ("power.draw", "power.draw.average"),
    "sm_clock_hz": ("clocks.sm", "clocks.current.sm"),
    "memory_clock_hz": ("clocks.mem", "clocks.current.memory"),
    "temperature_c": ("temperature.gpu",),
    "throttle_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
"""Names of each quantity in queries, in the order of trial; throttle reasons were renamed in driver 535."""

Row = dict[str, str]
"""The values of one device by quantity, as they are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The fields that this driver knows, by quantity."""

    fields: Mapping[str, str]

    @property
    def argv(self) -> tuple[str, ...]:
        return (PROGRAM, f"--query-gpu={','.join(self.fields.values())}", "--format=csv,noheader,nounits")

    def row(self, line: str) -> Row | None:
        """The values of a line; None for anything but a whole row, such as an error or the half of a line."""
        values = [value.strip() for value in line.split(",", len(self.fields) - 1)]
        row = dict(zip(self.fields, values, strict=False))
        is_whole = len(values) == len(self.fields) and "," not in (values[-1] if "name" not in row else "")
        return row if is_whole and _INDEX.fullmatch(row["index"]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of the program."""

    lines: tuple[str, ...] = ()
    problem: str = ""
    """The reason of a failure, in the program's words or the system's; empty where it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a query, one for each device that answered."""

    query: Query
    rows: tuple[Row, ...] = ()
    unknown: tuple[str, ...] = ()
    """Quantities for which this driver has no field."""
    problem: str = ""
    """The first line other than a row, or the reason of a failure."""


def ask_rows(quantities: Sequence[str], selection: Sequence[str] = ()) -> Rows:
    """Ask for these quantities of the selected devices, and again without each field that the driver refuses."""
    names = {quantity: list(NAMES[quantity]) for quantity in quantities}
    while True:
        query = Query(fields={quantity: left[0] for quantity, left in names.items() if left})
        unknown = tuple(quantity for quantity in quantities if not names[quantity])
        if "index" not in query.fields:
            return Rows(query=query, unknown=unknown, problem="this driver does not number its devices")
        answer = ask((*query.argv, *selection))
        refused = {name for line in (*answer.lines, answer.problem) for name in _UNKNOWN_FIELD.findall(line)}
        if not refused.intersection(query.fields.values()):
            rows = [(line, query.row(line)) for line in answer.lines]
            other = next((line for line, row in rows if row is None), "")
            return Rows(
                query=query,
                rows=tuple(row for _, row in rows if row is not None),
                unknown=unknown,
                problem=_reason(other) or answer.problem,
            )
        names = {quantity: [name for name in left if name not in refused] for quantity, left in names.items()}


def ask(argv: Sequence[str]) -> Answer:
    """Run the program to its end; what it printed before it failed counts."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_CALL_LIMIT_S,
        )
    except FileNotFoundError:
        return Answer(problem=f"no program {PROGRAM} is on the PATH")
    except subprocess.TimeoutExpired:
        return Answer(problem=f"{PROGRAM} did not end within {_CALL_LIMIT_S:g} s")
    except OSError as error:
        return Answer(problem=f"{PROGRAM} cannot be started: {error.strerror}")
    lines = tuple(line for line in done.stdout.splitlines() if line.strip())
    complaint = _reason(done.stderr) or (_reason(lines[-1]) if lines and done.returncode else "")
    if done.returncode and not complaint:
        complaint = f"{PROGRAM} ended with exit code {done.returncode}"
    return Answer(lines=lines, problem=complaint)


class Stream:
    """Inside the context, the program that prints a row of each device again and again."""

    def __init__(self, query: Query, selection: Sequence[str], hz: float) -> None:
        self._query = query
        self._argv = (*query.argv, *selection, "-lms", str(round(MS_PER_S / hz)))
        self.complaint = ""
        """The last line other than a row."""
        self.end = ""
        """How the program ended by itself, if it did."""

    def rows(self, stopped: Event) -> Iterator[Row]:
        """Rows as they come, until ``stopped`` is set or the program ends."""
        with subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as program:
            try:
                for line in _lines(program, stopped):
                    row = self._query.row(line)
                    if row is None:
                        self.complaint = _reason(line)
                    else:
                        yield row
                if not stopped.is_set():
                    words = f": {self.complaint}" if self.complaint else ""
                    self.end = f"{PROGRAM} ended by itself with exit code {program.wait(_CALL_LIMIT_S)}{words}"
            finally:
                program.kill()


def _lines(program: subprocess.Popen[bytes], stopped: Event) -> Iterator[str]:
    """Complete lines of a program's output as they come, until ``stopped`` is set."""
    assert program.stdout is not None  # noqa: S101 - it is a pipe
    descriptor, rest = program.stdout.fileno(), b""
    while not stopped.is_set():
        if not select.select([descriptor], [], [], _POLL_S)[0]:
            continue
        data = os.read(descriptor, 65_536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-_MAX_LINE:]
        yield from (line.decode(errors="replace") for line in lines if line.strip())


def amount(text: str | None) -> float | None:
    """A quantity that is never negative; None for ``[N/A]``, ``ERR!`` and every other text."""
    value = number(text)
    return None if value is None or value < 0 else value


def number(text: str | None) -> float | None:
    """A number that a device may have; None for everything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) <= _MOST else None


def bit_mask(text: str | None) -> int | None:
    """A number in hexadecimal digits; None for everything else."""
    match = re.fullmatch(r"0[xX]([0-9a-fA-F]{1,16})", text or "")
    return None if match is None else int(match[1], 16)


def _reason(text: str) -> str:
    """The first line of a text that says something, for a message."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return visible_line(first, _REASON_CHARS)
