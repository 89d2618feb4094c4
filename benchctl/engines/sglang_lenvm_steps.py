"""Steps of a LenVM server: the fork's own lines, each with its arrival time.

``inside/sglang_lenvm/stamped.py`` takes that time. A line arrives when its sampler has returned, so the step ends
there. It starts where the previous one ended, or, if no request was in flight in between, when the first one was
sent (``requests.jsonl``, on the same clock). Queueing before the scheduler is therefore part of the first step of
a burst.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from benchctl.engines.engine import raw_step_log
from benchctl.errors import RecordError
from benchctl.interop.lenvm_log import SAMPLER, TimingRecord, record_from, step_records
from benchctl.records.files import read_jsonl
from benchctl.records.record import RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.units import NS_PER_MS

Stamped = tuple[int, TimingRecord]
"""Arrival of a line, in nanoseconds of the monotonic clock, and its content."""


class _StampedLine(msgspec.Struct, frozen=True):
    t_ns: int
    line: str


def read_lenvm_steps(directory: Path) -> Iterator[StepRecord]:
    """The steps of a run. Raises RecordError at the first line that is damaged, with those before it yielded."""
    stamped, damage = stamped_records(directory)
    starts = busy_starts(read_jsonl(directory / "requests.jsonl", RequestRecord))
    yield from step_records([record for _, record in stamped], spans(stamped, starts))
    if damage is not None:
        raise damage


def stamped_records(directory: Path) -> tuple[list[Stamped], RecordError | None]:
    """The readable beginning of a run's log, and the error in the rest."""
    path, records = raw_step_log(directory), list[Stamped]()
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
