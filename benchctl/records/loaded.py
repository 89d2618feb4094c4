"""A result directory in memory: every run with its records, and a warning for each damaged file."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.directory import RequestSets, RunDirectory, open_results
from benchctl.records.files import damaged_line, line_blocks, read_jsonl, records_in
from benchctl.records.loads import counting, point_id, record_of_load
from benchctl.records.record import (
    ChoiceRecord,
    LoadRecord,
    Manifest,
    Plan,
    PlannedRun,
    PreparedRequest,
    RequestRecord,
    RunRecord,
)
from benchctl.records.schema import (
    SCHEMA_VERSION,
    ClientSample,
    GpuSample,
    HostSample,
    PrometheusSample,
    ResultWarning,
)
from benchctl.records.writers import current_manifest, settled
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.untrusted.files import DECODING_ERRORS, is_file
from benchctl.untrusted.text import visible_value

if TYPE_CHECKING:
    from benchctl.records.columns import StepColumns

T = TypeVar("T", bound=msgspec.Struct)
DAMAGED_LINE: Final = "damaged-line"
"""Code of the warning that a file of a run ends with a line that cannot be read."""
_SLACK_NS: Final = {"kernel": NS_PER_S, "loop": NS_PER_MS, "whole": NS_PER_MS}
"""Disorder that counts as none, by the source of the stamps: those of the kernel are mapped from the wall clock,
and where it was set some of them are times of a read."""
_END: Final = b"-9000000000000000000"
"""Ends each of many lists that are read as one: below every number of a record."""
_OF_CHUNKS: Final = ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars")
_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(ChoiceRecord) if field.name in _OF_CHUNKS}
_like: Final = partial(msgspec.defstruct, module=__name__, frozen=True, kw_only=True, omit_defaults=True)
_Choice = _like(
    "_Choice", [(name, msgspec.Raw, field.default) for name, field in _FIELDS.items()], bases=(ChoiceRecord,)
)
"""A choice as it is decoded: the numbers of its chunks are text, which becomes arrays in a fraction of the time."""
_Request = _like("_Request", [("choices", GenericAlias(tuple, (_Choice, ...)), ())], bases=(RequestRecord,))
_DECODE_LINES: Final = msgspec.json.Decoder(_Request).decode_lines


def _no_steps() -> "StepColumns":
    from benchctl.records.columns import columns_from  # noqa: PLC0415 - numpy, where there are steps

    return columns_from(())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """One run in memory. ``warnings`` holds those of the run, and one for each damaged file."""

    record: RunRecord
    requests: tuple[RequestRecord, ...] = ()
    """Numbers of their chunks are arrays: tuples take four times the memory and more."""
    columns: "StepColumns" = field(default_factory=_no_steps)
    """The steps of the load."""
    warmup_columns: "StepColumns" = field(default_factory=_no_steps)
    """The steps of the warm-up."""
    gpu: tuple[GpuSample, ...] = ()
    host: tuple[HostSample, ...] = ()
    prometheus: tuple[PrometheusSample, ...] = ()
    warnings: tuple[ResultWarning, ...] = ()
    is_damaged: bool = False
    """The run is in state ``done`` and holds a line that cannot be read."""
    client: tuple[ClientSample, ...] = ()
    """Health of the load generator; empty in directories of older versions."""
    load: int | None = None
    """Number of the load, if this is one of several that a server got."""
    several: tuple["LoadedRun", ...] = ()
    """Those of several loads that count; all records of the run are theirs, one load after the other."""

    @property
    def loads(self) -> tuple["LoadedRun", ...]:
        """The loads of the run that count, in order, each as a run of its own; of a single load the run itself."""
        return self.several or (self,)

    @property
    def suffix(self) -> str:
        """The end of the names of this load's files: nothing of the first, ``-2`` of the second."""
        return "" if self.load in (None, 1) else f"-{self.load}"

    @property
    def damage(self) -> tuple[str, ...]:
        """The damaged lines of a run in state ``done``, with file and line."""
        damaged = (warning.message for warning in self.warnings if warning.code == DAMAGED_LINE)
        return tuple(damaged) if self.is_damaged else ()


def load_run(directory: RunDirectory, record: RunRecord | None = None) -> LoadedRun:
    """Read one run, which has this record, as far as it is readable, with all of its loads that count.

    A damaged line ends its file: the lines before it are read, and a warning names file and line. A run in state
    ``done`` is then marked as damaged and must not be compared.
    """
    from benchctl.records.columns import joined  # noqa: PLC0415 - numpy

    record = record or directory.read()
    loads = _read_each(directory, record, counting(record.loads))
    if not loads:
        return read_load(directory, record)
    damage = [each for load in loads for each in load.warnings if each.code == DAMAGED_LINE]
    return LoadedRun(
        record=record,
        requests=tuple(chain.from_iterable(load.requests for load in loads)),
        columns=joined([load.columns for load in loads]),
        warmup_columns=joined([load.warmup_columns for load in loads]),
        gpu=tuple(chain.from_iterable(load.gpu for load in loads)),
        host=tuple(chain.from_iterable(load.host for load in loads)),
        prometheus=tuple(chain.from_iterable(load.prometheus for load in loads)),
        client=tuple(chain.from_iterable(load.client for load in loads)),
        warnings=(*record.warnings, *damage),
        is_damaged=record.state == "done" and any(load.is_damaged for load in loads),
        several=tuple(loads),
    )


def load_points_of(directory: RunDirectory) -> tuple[LoadedRun, ...]:
    """Read the load points of a run with a ladder, each as a run of its own, sent or not; else the run.

    See ``load_run`` for damaged lines.
    """
    record = directory.read()
    is_ladder = record.ladder and record.loads
    return tuple(_read_each(directory, record, record.loads)) if is_ladder else (load_run(directory, record),)


def _read_each(directory: RunDirectory, record: RunRecord, loads: Iterable[LoadRecord]) -> list[LoadedRun]:
    return [
        replace(read_load(directory.of_load(load.number), record_of_load(record, load)), load=load.number)
        for load in loads
    ]


def read_load(directory: RunDirectory, record: RunRecord) -> LoadedRun:
    """Read the files of one load of a run, which has this record, or of its only one: see ``load_run``."""
    from benchctl.records.columns import read_steps  # noqa: PLC0415 - numpy

    damage: list[RecordError] = []
    columns, warmup_columns, error = read_steps(directory.step_log, within=directory.root)
    requests = _read_requests(directory, damage)
    damage += [] if error is None else [error]
    return LoadedRun(
        record=record,
        requests=requests,
        columns=columns,
        warmup_columns=warmup_columns,
        gpu=_samples(directory, "gpu", GpuSample, damage),
        host=_samples(directory, "host", HostSample, damage),
        prometheus=_samples(directory, "prometheus", PrometheusSample, damage),
        client=_samples(directory, "client", ClientSample, damage),
        warnings=(
            *record.warnings,  # after all reading, which collects the damage
            *(ResultWarning(code=DAMAGED_LINE, message=str(each), where=record.run_id) for each in damage),
        ),
        is_damaged=bool(damage) and record.state == "done",
    )


def _samples(directory: RunDirectory, name: str, kind: type[T], damage: list[RecordError]) -> tuple[T, ...]:
    """The records of ``<name>.jsonl`` up to its first damaged line, which is added to ``damage``."""
    records: list[T] = []
    try:
        records.extend(read_jsonl(directory.log(name), kind, within=directory.root))
    except RecordError as error:
        damage.append(error)
    return tuple(records)


def _read_requests(directory: RunDirectory, damage: list[RecordError]) -> tuple[RequestRecord, ...]:
    """The requests up to the first damaged or unlawful line, which is added to ``damage``."""
    requests: list[RequestRecord] = []
    log, num_lines, damaged = directory.request_log, 0, None
    try:
        for lines in line_blocks(log, within=directory.root):
            num_here = lines.count(b"\n")
            block, damaged = _requests_in(lines, num_here, log, num_lines)
            num_lines += num_here
            for request in block:
                if problem := request_problem(request):
                    name = visible_value(request.request_id)
                    raise damaged_line(log, len(requests) + 1, f"request {name}: {problem}")
                requests.append(request)
            if damaged is not None:
                raise damaged
    except RecordError as error:
        damage.append(error)
    return tuple(requests)


def _requests_in(
    lines: bytes, num_lines: int, path: Path, num_before: int
) -> tuple[Sequence[RequestRecord], RecordError | None]:
    """The requests of a block as ``records_in`` reads them, the numbers of their chunks in arrays."""
    with suppress(*DECODING_ERRORS):
        requests: list[Any] = _DECODE_LINES(lines)
        choices = [choice for request in requests for choice in request.choices]
        for name in _OF_CHUNKS:
            _unpack(choices, name)
        if len(requests) == num_lines:
            return requests, None
    return records_in(lines, msgspec.json.Decoder(RequestRecord), path, num_before)


def _unpack(choices: Sequence[ChoiceRecord], name: str) -> None:
    """Turn the text of a list of numbers of each choice into an array.

    Raises one of ``DECODING_ERRORS`` for anything but whole numbers within the limits of their field,
    and times in order.
    """
    import numpy as np  # noqa: PLC0415 - after the load

    values = [(choice, getattr(choice, name)) for choice in choices]
    lists = [(choice, bytes(value)) for choice, value in values if isinstance(value, msgspec.Raw)]
    if not all(text.startswith(b"[") for _, text in lists):
        raise ValueError("a value other than a list")
    joined = b",".join([text[1:-1] + b"," + _END if len(text) > 2 else _END for _, text in lists])
    numbers = np.fromstring(joined, np.int64, sep=",") if joined else np.empty(0, np.int64)
    is_end = numbers == int(_END)
    ends = np.flatnonzero(is_end)
    if len(ends) != len(lists):
        raise ValueError("a list of other values than whole numbers")
    if name == "chunk_ns" and ((numbers[1:] < numbers[:-1]) & ~is_end[1:]).any():
        raise ValueError("times that are not in order")
    numbers = numbers[~is_end]
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    msgspec.convert((least, most), _FIELDS[name].type)
    typed = numbers if name == "chunk_ns" else numbers.astype(np.min_scalar_type(most))
    code, content, bounds = typed.dtype.char.replace("l", "q"), typed.tobytes(), ends - np.arange(len(ends))
    spans = pairwise([0, *(typed.itemsize * bounds).tolist()])
    for (choice, _), (start, end) in zip(lists, spans, strict=True):
        msgspec.structs.force_setattr(choice, name, array(code, content[start:end]))


def request_problem(record: RequestRecord) -> str | None:
    """The law that a request breaks: it is sent, then its chunks come one after the other, then it is done.

    Laws of single fields are their types. The times of a ``_Choice`` are in order.
    """
    slack_ns = _SLACK_NS[record.stamps]
    if _is_after(record.sent_ns, record.done_ns, 0):
        return f"done_ns is {record.done_ns}, before sent_ns, {record.sent_ns}"
    for choice in record.choices:
        times = choice.chunk_ns
        for name in _OF_CHUNKS:
            if (numbers := getattr(choice, name)) and len(numbers) != len(times):
                return f"{name} has {len(numbers)} numbers for {len(times)} chunks"
        if times and _is_after(record.sent_ns, times[0], slack_ns):
            return f"chunk_ns begins with {times[0]}, before sent_ns, {record.sent_ns}"
        if times and _is_after(times[-1], record.done_ns, slack_ns):
            return f"chunk_ns ends with {times[-1]}, after done_ns, {record.done_ns}"
        for earlier, later in pairwise(() if isinstance(choice, _Choice) else times):
            if earlier - later > slack_ns:
                return f"chunk_ns has {later} after {earlier}"
    return None


def _is_after(first_ns: int | None, second_ns: int | None, slack_ns: int) -> bool:
    """True if both times are known and the first is more than ``slack_ns`` after the second."""
    return first_ns is not None and second_ns is not None and first_ns - second_ns > slack_ns


@dataclass(frozen=True, slots=True)
class LoadedResults:
    """An experiment in memory, as the reading half needs it."""

    path: Path
    manifest: Manifest
    profile_yaml: str
    """The resolved profile as written; ``profile.load.parse_profile`` reads it."""
    plan: Plan
    """Without the blocks that a stopping rule made unnecessary; a ladder is planned as its load points."""
    sets: RequestSets
    runs: tuple[LoadedRun, ...]
    """Runs that were begun, in plan order, with one for each load point of a ladder."""

    @property
    def requests(self) -> tuple[PreparedRequest, ...]:
        """The request set, of several one after the other; ``sets`` has that of a load point."""
        return self.sets.requests


def load_results(path: Path, damage: list[str] | None = None) -> LoadedResults:
    """Read a whole result directory; see ``load_run`` for damaged lines.

    Raises RecordError for a file that cannot be read. With a list of ``damage``, such files are left out and the
    list takes the messages, also those about damaged lines.
    """
    results = open_results(path)
    plan, profile_yaml = Plan(schema_version=SCHEMA_VERSION, runs=()), ""
    sets, runs = RequestSets.single(()), list[LoadedRun]()
    with _collecting(damage):
        plan = results.due_plan()
    from benchctl.second_process import two_readers  # noqa: PLC0415 - multiprocessing

    planned_runs = {results.run(planned.run_id): planned for planned in plan.runs}
    begun = [run for run in planned_runs if run.is_begun()]
    logs = [log for run in begun for name in ("steps", "requests") for log in run.path.glob(f"{name}*.jsonl")]
    logs = [log for log in logs if is_file(log, within=results.path)]
    with two_readers(load_points_of, begun, sum(log.stat().st_size for log in logs)) as load:
        for run in begun:
            with _collecting(damage):
                points = load(run)
                _check_points([point.record for point in points], planned_runs[run], run.path)
                runs += points
                if damage is not None:
                    damage += chain.from_iterable(point.damage for point in points)
    with _collecting(damage):
        profile_yaml = results.profile_yaml()
    with _collecting(damage):
        sets = results.request_sets()
    manifest = current_manifest(results)
    return LoadedResults(
        path=results.path,
        manifest=manifest,
        profile_yaml=profile_yaml,
        plan=msgspec.structs.replace(plan, runs=tuple(chain.from_iterable(map(_points_of, plan.runs)))),
        sets=sets,
        runs=tuple(run if manifest.state == "running" else _ended(run) for run in runs),
    )


def _points_of(run: PlannedRun) -> Sequence[PlannedRun]:
    """The load points of a planned run; itself without a ladder."""
    return [
        msgspec.structs.replace(run, run_id=point_id(run, i), cell=run.cell | cell)
        for i, cell in enumerate(run.ladder, start=1)
    ] or [run]


def _check_points(records: Sequence[RunRecord], planned: PlannedRun, path: Path) -> None:
    """Raise RecordError where the load points of a run are not those of its plan."""
    read, due = ([(each.run_id, each.cell) for each in points] for points in (records, _points_of(planned)))
    if (planned.ladder or records[0].ladder) and read != due:
        raise RecordError(f"{path / 'run.json'}: its load points are not those of the plan; restore the file")


@contextmanager
def _collecting(damage: list[str] | None) -> Iterator[None]:
    """Collects the message of a file that cannot be read, where there is a list for it."""
    try:
        yield
    except RecordError as error:
        if damage is None:
            raise
        damage.append(str(error))


def _ended(run: LoadedRun) -> LoadedRun:
    """The run of an experiment that nobody measures: it is not running any more."""
    if run.record.state != "running":
        return run
    record = settled(run.record)
    others = [warning for warning in run.warnings if warning not in run.record.warnings]
    return replace(run, record=record, warnings=(*record.warnings, *others))
