"""The log of SGLang's LenVM fork: a JSON object for each call of its sampler, or averages among the server's lines.

A line of the step log has host time in the sampler, in milliseconds, without waiting for the device: the first call
that blocks is charged with the device work queued before it. It has neither the time of a step nor its whole
duration. Four keys are required, ``t_<section>_ms`` are sections, all others are passed on unchanged. The file is
appended to: a restarted server counts from 1 again, and a killed one leaves half a line, which the next one
continues.

Revisions of the fork, by what their servers write:

V1  a line for each step
V2  averages in the server's log, no lines
V3  the lines of V1, and whether a step took the fused path
V4  the lines of V1 with some thirty more keys
V0  nothing

The averages of V2 are those since its start, and the server waits for the device around each section:

    [sampler_timing] calls=400 guided=392 sampler_forward=13.220ms lvm_apply=12.850ms/97.2% ...
    [lvm_timing] calls=392 skipped=8 gpu_path=392 fused=63 avg_send_rows=... apply_total=12.850ms ...

The average of a key is over the calls in which it occurred, but a line has only the number of all calls. Between
two lines, therefore, only the key that occurs in every call has a mean of its own:

    mean(a, b) = (avg_b n_b - avg_a n_a) / (n_b - n_a), to within 0.0005 ms (n_a + n_b) / (n_b - n_a)

because averages are printed with three decimals.
"""

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.files import read_jsonl
from benchctl.records.record import RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.units import NS_PER_MS
from benchctl.untrusted.files import DECODING_ERRORS

ALL: Final = ("V0", "V1", "V2", "V3", "V4")
"""Revisions of the fork."""
SAMPLER: Final = "sampler_total"
LOAD: Final = "value_model_load"
LEAST_LOAD_MS: Final = 250.0
"""From here on, time of the first guided call outside of its sections is the loading of the value model; ordinarily
it is below a millisecond."""
_ONLY_V4: Final = frozenset({"lvm_guided_rows", "lvm_n_candidates", "lvm_forward_rows", "lvm_gpu_guidance_path"})
_ONLY_V4_SECTIONS: Final = frozenset({"preprocess_logits", "guided_override", "lvm_get_inproc"})
_OUTER: Final = "lvm_apply_outer"
_INNER: Final = ("lvm_build_pending", "lvm_forward", "lvm_apply_guidance")
_NUM_START_UP: Final = 8
"""Tokens that SGLang's own first request asks for, greedily and one at a time."""
_WHOLE_OF: Final = {"sampler_timing": "sampler_forward", "lvm_timing": "apply_total"}
"""The key of each line of averages that occurs in every call."""
_PAIR: Final = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?)(ms)?(?:/-?\d+(?:\.\d+)?%)?(?=\s|$)")
_MOST_COUNT: Final = 1 << 53
"""Above every count and every time in ms; a damaged line may have anything."""
_ROUNDING_MS: Final = 0.0005
Record = TypeVar("Record")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_COUNT)]
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]
"""Up to a day, which no call of a sampler takes."""


class TimingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the sampler. ``sections_ms`` by name without ``t_`` and ``_ms``; ``other`` is the rest."""

    step: _Count
    batch_size: _Count
    is_greedy: bool
    sections_ms: dict[str, _Ms]
    other: dict[str, Any]

    @property
    def is_active(self) -> bool:
        """True if probabilities were replaced, which also happens without a scored row."""
        return self.other.get("lvm_active") is True

    def count(self, *names: str) -> int | None:
        """The first of these counts that the line has."""
        value = next((self.other[name] for name in names if name in self.other), None)
        return int(value) if isinstance(value, int | float) and 0 <= value < _MOST_COUNT else None


class Damage(NamedTuple):
    """Lines without a whole record other than the last, and whether the last line has no end."""

    num_lines: int
    is_cut: bool


Lives: TypeAlias = Sequence[Sequence[TimingRecord]]
"""The records of each server's life in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """A line of averages since the start of the server, in ms by section."""

    source: str
    calls: int
    means_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The calls between two lines: their mean time in the section that all of them have, and its rounding error."""

    source: str
    first_call: int
    last_call: int
    mean_ms: float
    rounding_ms: float


def record_from(line: bytes | str) -> TimingRecord | None:
    """The record of a line; None for a damaged line."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        times = {name: value for name, value in fields.items() if name.startswith("t_") and name.endswith("_ms")}
        own = {name: fields.get(name) for name in ("step", "batch_size", "is_greedy")}
        sections_ms = {name[2:-3]: value for name, value in times.items()}
        other = {name: value for name, value in fields.items() if name not in times and name not in own}
        record = msgspec.convert({**own, "sections_ms": sections_ms, "other": other}, TimingRecord)
    except DECODING_ERRORS:
        return None
    return record if SAMPLER in record.sections_ms else None


def read_damaged(
    lines: Iterable[bytes], record_of: Callable[[bytes], Record | None], start: bytes | None = None
) -> tuple[list[Record], Damage]:
    """The records in these lines, given with their line ends. Damaged lines are counted, not raised.

    A record that begins with ``start`` behind half a line is taken: a new server writes on where a killed one
    ended.
    """
    records: list[Record] = []
    num_damaged, is_cut = 0, False
    for line in lines:
        if not line.strip():
            continue
        record = record_of(line)
        if record is None:
            is_cut = not line.endswith(b"\n")
            num_damaged += not is_cut
            offset = line.rfind(start) if start is not None else 0
            record = record_of(line[offset:]) if offset > 0 else None
        if record is not None:
            records.append(record)
    return records, Damage(num_damaged, is_cut)


def read_timing(lines: Iterable[bytes]) -> tuple[Lives, Damage]:
    """The log in these lines, given with their line ends."""
    records, damage = read_damaged(lines, record_from, b'{"step"')
    lives: list[list[TimingRecord]] = []
    for record in records:
        if not lives or record.step <= lives[-1][-1].step:
            lives.append([])
        lives[-1].append(record)
    return lives, damage


def last_lives(lives: Lives, output_tokens: int | None) -> Lives:
    """The lives, counted from the end, that it takes to sample ``output_tokens``; all lives if that is None.

    Each row of a batch yields at most one token, so fewer rows than tokens cannot be the whole run.
    """
    totals = enumerate(accumulate(sum(record.batch_size for record in life) for life in reversed(lives)), start=1)
    enough = (count for count, num_rows in totals if output_tokens is not None and num_rows >= output_tokens)
    return lives[-next(enough, len(lives)) :]


def num_start_up(life: Sequence[TimingRecord], *, is_greedy_run: bool) -> int:
    """Number of records at the beginning of a life that are those of the server's own first request.

    They are those before the first sampled batch; in a greedy run, at most as many as that request asks for.
    """
    leading = sum(1 for _ in takewhile(lambda record: record.is_greedy and record.batch_size == 1, life))
    return min(leading, _NUM_START_UP) if is_greedy_run or leading == len(life) else leading


def load_ms(life: Sequence[TimingRecord]) -> tuple[int, float] | None:
    """Index of the record of a life that includes the loading of the value model, and its milliseconds; None
    without.

    The loading is the time outside of the sections of the first call that surrounds guidance.
    """
    for index, record in enumerate(life):
        if _OUTER in record.sections_ms:
            unnamed = record.sections_ms[_OUTER] - sum(record.sections_ms.get(name, 0.0) for name in _INNER)
            if unnamed >= LEAST_LOAD_MS:
                return index, unnamed
            if any(name in record.sections_ms for name in _INNER):
                return None
    return None


def step_records(
    life: Sequence[TimingRecord], spans_ns: Iterable[tuple[int, int]], *, first_step: int = 1
) -> Iterator[StepRecord]:
    """The records of one server's life as steps; ``spans_ns`` has the start and duration of each.

    The log does not separate prompts from output, so every step counts as decoding, and neither prompt nor output
    tokens are known. V1 and V3 do not count candidates.
    """
    load = load_ms(life)
    for index, (record, (start_ns, dur_ns)) in enumerate(zip(life, spans_ns, strict=True)):
        sections = {name: round(time_ms * NS_PER_MS) for name, time_ms in record.sections_ms.items()}
        if load is not None and load[0] == index:
            sections[LOAD] = round(load[1] * NS_PER_MS)
        guided_rows = record.count("lvm_forward_rows", "lvm_n_reqs_with_guidance") or 0
        fused = record.count("lvm_fused_path")  # V3 records it, V4 always takes it, V1 has none
        if fused is None and record.count("lvm_fused_total_extend_tokens"):
            fused = 1
        yield StepRecord(
            step=first_step + index,
            start_ns=start_ns,
            dur_ns=dur_ns,
            clock="host",
            phase="decode",
            num_seqs=record.batch_size,
            is_greedy=record.is_greedy,
            guided_rows=guided_rows,
            candidates=record.count("lvm_n_candidates", "lvm_candidate_tokens") if guided_rows else 0,
            fused=None if fused is None else bool(fused),
            sections_ns=sections,
        )


def revisions_of(records: Iterable[TimingRecord], log_lines: Iterable[str] = ()) -> tuple[str, ...]:
    """The revisions that fit a server's output, in their order; at least one.

    An early V3 without the fused path writes what V1 writes, and unguided lines of V4 may look like that, too.
    """
    candidates = {_revisions_of_record(record) for record in records}
    if candidates:
        return min(candidates, key=len)
    lines = list(log_lines)
    if read_averages(lines):
        return ("V2",)
    return ("V3",) if any("LENVM_STRIDE=" in line for line in lines) else ("V0", "V2")


def _revisions_of_record(record: TimingRecord) -> tuple[str, ...]:
    """The revisions that write such a line."""
    if _ONLY_V4 & record.other.keys() or _ONLY_V4_SECTIONS & record.sections_ms.keys():
        return ("V4",)
    if "lvm_fused_path" in record.other:
        return ("V3",)
    return ("V1", "V3") if "lvm_forward" in record.sections_ms else ("V1", "V3", "V4")


def read_averages(lines: Iterable[str]) -> tuple[Averages, ...]:
    """The lines of averages in a server's log, in their order; all others, and those cut short, are skipped."""
    averages = []
    for line in lines:
        if (match := re.search(r"\[(sampler_timing|lvm_timing)\]\s+(.*)", line)) is None:
            continue
        pairs = [pair for pair in _PAIR.findall(match[2]) if abs(float(pair[1])) < _MOST_COUNT]
        means_ms = {name: float(value) for name, value, unit in pairs if unit}
        calls = next((int(float(value)) for name, value, unit in pairs if name == "calls" and not unit), None)
        if calls is not None:
            averages.append(Averages(source=match[1], calls=calls, means_ms=means_ms))
    return tuple(averages)


def windows_of(averages: Sequence[Averages]) -> Iterator[Window]:
    """The calls between successive lines of one kind; a restarted server begins anew."""
    for source, whole in _WHOLE_OF.items():
        lines = [line for line in averages if line.source == source and whole in line.means_ms]
        before = Averages(source=source, calls=0, means_ms={whole: 0.0})
        for earlier, later in pairwise([before, *lines]):
            first = earlier if later.calls > earlier.calls else before
            num_calls = later.calls - first.calls
            if num_calls <= 0:
                continue
            yield Window(
                source=source,
                first_call=first.calls + 1,
                last_call=later.calls,
                mean_ms=(later.means_ms[whole] * later.calls - first.means_ms[whole] * first.calls) / num_calls,
                rounding_ms=_ROUNDING_MS * (later.calls + first.calls) / num_calls,
            )


Stamped: TypeAlias = tuple[int, TimingRecord]
"""Arrival of a line, in nanoseconds of the monotonic clock, and its content."""


class _StampedLine(msgspec.Struct, frozen=True):
    t_ns: int
    line: str


def read_lenvm_steps(log: Path, *requests: Path) -> Iterator[StepRecord]:
    """The steps of a run, from its stamped lines: each with its arrival time, which ``stamped.py`` takes.

    ``requests`` are the files of its requests, one for each load.

    A line arrives when its sampler has returned, so the step ends there. It starts where the previous one ended,
    or, if no request was in flight in between, when the first one was sent, on the same clock. Queueing before the
    scheduler is therefore part of the first step of a burst. Raises RecordError at the first line that is damaged,
    with those before it yielded.
    """
    stamped, damage = stamped_records(log)
    starts = busy_starts(record for path in requests for record in read_jsonl(path, RequestRecord))
    yield from step_records([record for _, record in stamped], spans(stamped, starts))
    if damage is not None:
        raise damage


def stamped_records(path: Path) -> tuple[list[Stamped], RecordError | None]:
    """The readable beginning of a log of stamped lines, and the error in the rest."""
    records: list[Stamped] = []
    try:
        for number, stamped in enumerate(read_jsonl(path, _StampedLine), start=1):
            if (record := record_from(stamped.line)) is None:
                return records, RecordError(
                    f"{path}:{number}: this line is not a step: {stamped.line[:60]!r}; it may be another "
                    "revision of the fork than this benchctl knows"
                )
            records.append((stamped.t_ns, record))
    except RecordError as error:
        return records, error
    return records, None


def busy_starts(requests: Iterable[RequestRecord]) -> list[int]:
    """Times at which a request was sent while none was in flight, ascending."""
    sent = sorted((r.sent_ns, r.done_ns or r.sent_ns) for r in requests if r.sent_ns is not None)
    until = accumulate((done for _, done in sent), max, initial=-1)
    return [start for (start, _), busy_until in zip(sent, until, strict=False) if start > busy_until]


def spans(stamped: Sequence[Stamped], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and duration of each step; ``starts`` are those of the server's busy times.

    A line arrives after its step, and late if its reader was delayed: then the sampler of the next step shows how
    early the step must have ended.
    """
    last_end_ns = None
    for end_ns, record in zip(_ends(stamped), (record for _, record in stamped), strict=True):
        sampler_start_ns = end_ns - _sampler_ns(record)
        index = bisect.bisect_right(starts, end_ns) - 1
        earlier_ns = [ns for ns in (last_end_ns, starts[index] if index >= 0 else None) if ns is not None]
        # Its sampler is part of a step, also where a request of ours was sent while the server asked itself.
        start_ns = min(max(earlier_ns, default=sampler_start_ns), sampler_start_ns)
        last_end_ns = end_ns
        yield start_ns, end_ns - start_ns


def _ends(stamped: Sequence[Stamped]) -> list[int]:
    """Latest possible end of each step: its line had arrived, and the next one's sampler had not begun."""
    ends: list[int] = []
    latest_ns: int | None = None
    for t_ns, record in reversed(stamped):
        ends.append(t_ns if latest_ns is None else min(t_ns, latest_ns))
        latest_ns = ends[-1] - _sampler_ns(record)
    return ends[::-1]


def _sampler_ns(record: TimingRecord) -> int:
    return round(record.sections_ms[SAMPLER] * NS_PER_MS)
