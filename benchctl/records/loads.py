"""The loads of a run whose server got several: which count, the verdict they make, the record of each alone.

Several loads are the same load again, or, of a ladder, its load points.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec

from benchctl.records.directory import OF_POINT
from benchctl.records.record import INTERRUPTED, LoadRecord, PlannedRun, RunFailure, RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import SUSPECT_CODES

_COUNTS: Final = ("num_sent", "num_completed", "num_failed")
_LEFT_OUT: Final = "load-left-out"


def counting(loads: Sequence[LoadRecord]) -> tuple[LoadRecord, ...]:
    """The loads that count: those that are done; of a run without any, those that are suspect."""
    done = tuple(load for load in loads if load.state == "done")
    return done or tuple(load for load in loads if load.state == "suspect")


def point_id(run: PlannedRun, number: int) -> str:
    """The id of a load point of a ladder, by its position from 1: ``003-b1-guided~2``. No directory has it."""
    return f"{run.run_id}{OF_POINT}{number}"


def server_id(run: PlannedRun) -> str:
    """The id of the run whose server got this load: that of the run itself, unless it is a load point."""
    return run.run_id.partition(OF_POINT)[0]


def record_of_load(record: RunRecord, load: LoadRecord) -> RunRecord:
    """The record of a run as if this had been its only load. Only the first load comes directly after a warm-up.

    A load point of a ladder is a run of its own, with an id of its own and the warnings of its server as well; one
    that was not sent is as far as its server.
    """
    times = msgspec.structs.replace(
        record.times,
        warmup_start_ns=record.times.warmup_start_ns if load.number == 1 else None,
        opening_ns=load.opening_ns,
        first_send_ns=load.first_send_ns,
        last_token_ns=load.last_token_ns,
    )
    own = {name: getattr(load, name) for name in ("state", "warnings", *_COUNTS)}
    if record.ladder:
        run_id, of_server = point_id(record, load.number), [w for w in record.warnings if w.code != _LEFT_OUT]
        of_point = [msgspec.structs.replace(w, where=run_id) for w in load.warnings]
        own |= {
            "run_id": run_id,
            "cell": record.cell | load.cell,
            "failure": load.failure,
            "warnings": (*of_server, *of_point),
        }
        if load.state == "planned" and record.state in {"running", "failed"}:
            own |= {"state": record.state, "failure": record.failure}
        elif load.state == "done" and any(each.code in SUSPECT_CODES for each in of_server):
            own["state"] = "suspect"
    return msgspec.structs.replace(record, loads=(), times=times, **own)


def concluded(record: RunRecord, failure: RunFailure | None) -> RunRecord:
    """The record of a run with several loads that has ended, regularly or by ``failure``.

    A failure, or the end of the process, costs the load in which it came: those before it count. The run is
    ``suspect`` where no load is done, or where a warning says so of the server; it is ``failed`` where no load
    counts, and where it failed after its last load. One with a ladder is ``suspect`` where any point is not done,
    and ``failed`` where it was interrupted, so that all of them are measured again, on one server.
    """
    loads, left = list(record.loads), [load for load in record.loads if load.state == "planned"]
    ended, is_interrupted = counting(loads), failure is not None and failure.cause == INTERRUPTED
    is_lost = bool(record.ladder) if is_interrupted else failure is not None and not left
    if not ended or is_lost:
        of_loads = (load.failure for load in loads if load.failure is not None)
        return msgspec.structs.replace(record, state="failed", failure=failure or next(of_loads, None))
    warnings = [*record.warnings, *(() if record.ladder else _common_warnings(ended, record))]
    if left and failure is not None:
        loads[loads.index(left[0])] = msgspec.structs.replace(left[0], state="failed", failure=failure)
    warnings += [
        _left_out(f"{_numbered([load.number], record)} is left out: {_reason(load)}", record)
        for load in loads
        if load not in ended and load.state != "planned"
    ]
    if unsent := [load.number for load in loads if load.state == "planned"]:
        verb = "was" if len(unsent) == 1 else "were"
        warnings.append(_left_out(f"{_numbered(unsent, record)} {verb} not measured", record))
    deciding = loads if record.ladder else ended[:1]
    is_suspect = any(each.code in SUSPECT_CODES for each in record.warnings)
    state = "suspect" if is_suspect or any(load.state != "done" for load in deciding) else "done"
    counts = {name: sum(getattr(load, name) or 0 for load in loads) for name in _COUNTS}
    last_ns = max((load.last_token_ns for load in loads if load.last_token_ns is not None), default=None)
    first = loads[0]
    times = msgspec.structs.replace(
        record.times, opening_ns=first.opening_ns, first_send_ns=first.first_send_ns, last_token_ns=last_ns
    )
    return msgspec.structs.replace(
        record,
        state=state,
        failure=None,
        times=times,
        loads=tuple(loads),
        warnings=tuple(warnings),
        **counts,
    )


def _left_out(message: str, record: RunRecord) -> ResultWarning:
    return ResultWarning(code=_LEFT_OUT, message=message, where=record.run_id)


def _numbered(numbers: Collection[int], record: RunRecord) -> str:
    noun = "load" if len(numbers) == 1 else "loads"
    return f"{noun} {', '.join(map(str, numbers))} of {len(record.loads)}"


def _reason(load: LoadRecord) -> str:
    if load.failure is not None:
        return f"it failed ({load.failure.cause}): {load.failure.message}"
    return "; ".join(f"{each.code}: {each.message}" for each in load.warnings if each.code in SUSPECT_CODES)


def _common_warnings(loads: Sequence[LoadRecord], record: RunRecord) -> Iterator[ResultWarning]:
    """One warning for each code of the loads that count, with the numbers of those that have it."""
    by_code: dict[str, dict[int, ResultWarning]] = defaultdict(dict)
    for load in loads:
        for each in load.warnings:
            by_code[each.code].setdefault(load.number, each)
    for of_code in by_code.values():
        first = next(iter(of_code.values()))
        yield msgspec.structs.replace(first, message=f"{_numbered(of_code, record)}: {first.message}")
