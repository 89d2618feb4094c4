"""Laws between the fields of a record that hold whatever was measured; those of single fields are their types.

A result directory in memory: every run with its records, and a warning for each damaged file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.claims.claims import current_manifest, settled
from benchctl.records.directory import RunDirectory, open_results
from benchctl.records.files import damaged_line, read_jsonl, read_whole
from benchctl.records.record import ChoiceRecord, Manifest, Plan, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import (
    ClientSample,
    Count,
    DurationNs,
    GpuSample,
    HostSample,
    MomentNs,
    PrometheusSample,
    ResultWarning,
    StepRecord,
)
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.untrusted.files import stat_file
from benchctl.untrusted.text import visible_value

_SLACK_NS: Final = {"kernel": NS_PER_S, "loop": NS_PER_MS, "whole": NS_PER_MS}
"""Disorder that counts as none, by the source of the stamps: those of the kernel are mapped from the wall clock,
and where it was set some of them are times of a read."""
LEAST_SLACK_NS: Final = min(_SLACK_NS.values())


def request_problem(record: RequestRecord) -> str | None:
    """The law that a request breaks: it is sent, then its chunks come one after the other, then it is done."""
    slack_ns = _SLACK_NS[record.stamps]
    if is_after(record.sent_ns, record.done_ns, 0):
        return f"done_ns is {record.done_ns}, before sent_ns, {record.sent_ns}"
    for choice in record.choices:
        if problem := _length_problem(choice) or _range_problem(choice):
            return problem
        times: Sequence[int] = choice.chunk_ns  # an array in records from a copy, which was checked as a whole
        if not times:
            continue
        if is_after(record.sent_ns, times[0], slack_ns):
            return f"chunk_ns begins with {times[0]}, before sent_ns, {record.sent_ns}"
        if is_after(times[-1], record.done_ns, slack_ns):
            return f"chunk_ns ends with {times[-1]}, after done_ns, {record.done_ns}"
        if isinstance(times, tuple) and (disorder := _first_disorder(times, slack_ns)) is not None:
            return f"chunk_ns has {disorder[1]} after {disorder[0]}"
    return None


def is_after(first_ns: int | None, second_ns: int | None, slack_ns: int) -> bool:
    """True if both times are known and the first is more than ``slack_ns`` after the second."""
    return first_ns is not None and second_ns is not None and first_ns - second_ns > slack_ns


def _first_disorder(times: Sequence[int], slack_ns: int) -> tuple[int, int] | None:
    return next(((earlier, later) for earlier, later in pairwise(times) if earlier - later > slack_ns), None)


def _length_problem(choice: ChoiceRecord) -> str | None:
    """The field that has not one number for each chunk."""
    for name in ("chunk_late_ns", "chunk_tokens", "chunk_chars"):
        numbers = getattr(choice, name)
        if numbers and len(numbers) != len(choice.chunk_ns):
            return f"{name} has {len(numbers)} numbers for {len(choice.chunk_ns)} chunks"
    return None


def _range_problem(choice: ChoiceRecord) -> str | None:
    """The field of the chunks with a number that it cannot have; those from a copy were checked as a whole."""
    for name, law in CHUNK_LAWS.items():
        numbers: Sequence[int] | None = getattr(choice, name)
        if numbers and isinstance(numbers, tuple) and not law.least <= min(numbers) <= max(numbers) <= law.most:
            return f"{name} has numbers from {min(numbers)} to {max(numbers)}"
    return None


class Law(NamedTuple):
    """The least and the largest value of a field."""

    least: int
    most: int


def law_of(kind: type[msgspec.Struct], field: str) -> Law:
    """The law of a field of whole numbers, one or several in each record: that of its type, 0 and 1 for a flag."""
    types = {each.name: each.type for each in msgspec.structs.fields(kind)}
    return _law(msgspec.inspect.type_info(types[field]))


def _law(info: msgspec.inspect.Type) -> Law:
    if isinstance(info, msgspec.inspect.IntType):
        return Law(-(1 << 63) if info.ge is None else info.ge, (1 << 63) - 1 if info.le is None else info.le)
    if isinstance(info, msgspec.inspect.BoolType):
        return Law(0, 1)
    if isinstance(info, msgspec.inspect.UnionType):
        return next(_law(each) for each in info.types if not isinstance(each, msgspec.inspect.NoneType))
    if isinstance(info, msgspec.inspect.DictType):
        return _law(info.value_type)
    if isinstance(info, msgspec.inspect.VarTupleType):
        return _law(info.item_type)
    raise TypeError(f"{info} holds no whole numbers")


CHUNK_LAWS: Final = {
    "chunk_ns": _law(msgspec.inspect.type_info(MomentNs)),
    "chunk_late_ns": _law(msgspec.inspect.type_info(DurationNs)),
    "chunk_tokens": _law(msgspec.inspect.type_info(Count)),
    "chunk_chars": _law(msgspec.inspect.type_info(Count)),
}
"""Of the fields with a number for each chunk: constraints in their types would make decoding 6 % slower."""


if TYPE_CHECKING:
    from benchctl.records.columns.columns import StepColumns
    from benchctl.records.columns.step_log import StepLog

    Steps: TypeAlias = tuple[StepRecord, ...] | StepLog

T = TypeVar("T", bound=msgspec.Struct)
DAMAGED_LINE: Final = "damaged-line"
"""Code of the warning that a file of a run ends with a line that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Sizes in bytes up to which files of a run are read in the plain way."""

    kept_steps: int = 1 << 13
    """The steps of a log up to this size stay in memory as records, those of a longer one only as columns."""
    few_requests: int = 1 << 16
    """Requests up to this size are decoded about as fast as a copy of their numbers is read."""
    steps_block: int = 1 << 19
    """Bytes of steps decoded at a time: their records take many times the memory of their table."""


DEFAULT_LIMITS: Final = ReadLimits()


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One run in memory. ``warnings`` holds those of the run, and one for each damaged file."""

    record: RunRecord
    requests: tuple[RequestRecord, ...]
    steps: "Steps"
    """All steps, including the warm-up; those of a long log are decoded on each access."""
    gpu: tuple[GpuSample, ...]
    host: tuple[HostSample, ...]
    prometheus: tuple[PrometheusSample, ...]
    warnings: tuple[ResultWarning, ...]
    is_damaged: bool = False
    """The run is in state ``done`` and holds a line that cannot be read."""
    client: tuple[ClientSample, ...] = ()
    """Health of the load generator; empty in directories of older versions."""
    _cached_columns: "dict[bool, StepColumns]" = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # init=False: a copy with other steps (dataclasses.replace) has columns of its own

    @property
    def columns(self) -> "StepColumns":
        """The steps of the load, as arrays; those of a long log are made on each access, to save memory."""
        return self._columns(is_warmup=False)

    @property
    def warmup_columns(self) -> "StepColumns":
        """The steps of the warm-up, as arrays."""
        return self._columns(is_warmup=True)

    def _columns(self, *, is_warmup: bool) -> "StepColumns":
        if not isinstance(self.steps, tuple):
            return self.steps.columns(is_warmup=is_warmup)
        if is_warmup not in self._cached_columns:
            from benchctl.records.columns.columns import columns_from  # noqa: PLC0415 - numpy, where there are steps

            self._cached_columns[is_warmup] = columns_from(self.steps, is_warmup=is_warmup)
        return self._cached_columns[is_warmup]

    @property
    def damage(self) -> tuple[str, ...]:
        """The damaged lines of a run in state ``done``, with file and line."""
        damaged = (warning.message for warning in self.warnings if warning.code == DAMAGED_LINE)
        return tuple(damaged) if self.is_damaged else ()


def load_run(directory: RunDirectory, limits: ReadLimits | None = None) -> LoadedRun:
    """Read one run as far as it is readable.

    A damaged line ends its file: the lines before it are read, and a warning names file and line. A run in state
    ``done`` is then marked as damaged and must not be compared.
    """
    record = directory.read()
    reader = _RunReader(directory, record, limits or DEFAULT_LIMITS)
    return LoadedRun(
        record=record,
        requests=reader.requests(),
        steps=reader.steps(),
        gpu=reader.lines("gpu", GpuSample),
        host=reader.lines("host", HostSample),
        prometheus=reader.lines("prometheus", PrometheusSample),
        client=reader.lines("client", ClientSample),
        warnings=(*record.warnings, *reader.damage),  # after all reading, which collects the damage
        is_damaged=bool(reader.damage) and record.state == "done",
    )


class _RunReader:
    """Reads the files of one run; ``damage`` collects a warning for each damaged one."""

    def __init__(self, directory: RunDirectory, record: RunRecord, limits: ReadLimits) -> None:
        self._directory = directory
        self._record = record
        self._limits = limits
        self.damage: list[ResultWarning] = []

    def lines(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """The records of ``<name>.jsonl`` up to its first damaged line."""
        path = self._directory.path / f"{name}.jsonl"
        whole = read_whole(path, kind, within=self._directory.root)
        if whole is not None:
            return whole
        records: list[T] = []
        try:
            records.extend(read_jsonl(path, kind, within=self._directory.root))
        except RecordError as error:
            self._note(error)
        return tuple(records)

    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests; those of a long file are copied as arrays once the run has ended."""
        path = self._directory.request_log
        if _size_bytes(path, self._directory.root) <= self._limits.few_requests:
            return self._lawful(self.lines("requests", RequestRecord))
        from benchctl.records.columns.columns import read_requests  # noqa: PLC0415 - numpy, for long files

        requests = read_requests(
            path,
            within=self._directory.root,
            recorded=self._record.files.get(path.name),
            writes_copy=self._has_ended,
        )
        return self._lawful(self.lines("requests", RequestRecord) if requests is None else requests)

    def _lawful(self, requests: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
        """The requests up to the first whose times or numbers cannot be."""
        for index, request in enumerate(requests):
            if problem := request_problem(request):
                path = self._directory.request_log
                self._note(damaged_line(path, index + 1, f"request {visible_value(request.request_id)}: {problem}"))
                return requests[:index]
        return requests

    def steps(self) -> "Steps":
        """The steps, in the form that suits the length of their log."""
        path = self._directory.step_log
        if _size_bytes(path, self._directory.root) <= self._limits.kept_steps:
            return self.lines("steps", StepRecord)
        from benchctl.records.columns.step_log import read_step_log  # noqa: PLC0415 - numpy, for long logs

        recorded = self._record.files.get(path.name)
        try:
            steps, error = read_step_log(
                path, within=self._directory.root, recorded=recorded, block_bytes=self._limits.steps_block
            )
        except RecordError as refused:
            self._note(refused)
            return ()
        if error is not None:
            self._note(error)
        elif self._has_ended:
            steps.write_copy()
        return steps

    @property
    def _has_ended(self) -> bool:
        """True once the files of the run are complete, so that copies of them are worth writing."""
        return self._record.state not in {"planned", "running"}

    def _note(self, error: RecordError) -> None:
        self.damage.append(ResultWarning(code=DAMAGED_LINE, message=str(error), where=self._record.run_id))


def copy_long_steps(run: LoadedRun) -> None:
    """Leave a copy of a long step log for later readers while its table is in memory: the log is complete."""
    if not isinstance(run.steps, tuple):
        run.steps.write_copy()


@dataclass(frozen=True, slots=True)
class LoadedResults:
    """An experiment in memory, as the reading half needs it."""

    path: Path
    manifest: Manifest
    profile_yaml: str
    """The resolved profile as written; ``profile.load.parse_profile`` reads it."""
    plan: Plan
    """Without the blocks that a stopping rule made unnecessary."""
    requests: tuple[PreparedRequest, ...]
    runs: tuple[LoadedRun, ...]
    """Runs that were begun, in plan order."""
    archive: Path | None = None
    """The archive from which ``path`` was unpacked into a cache."""

    @property
    def source(self) -> Path:
        """The path that the user knows."""
        return self.archive or self.path


def load_results(path: Path) -> LoadedResults:
    """Read a whole result directory, or an archive of one; see ``load_run`` for damaged lines."""
    results = open_results(path)
    plan, manifest = results.due_plan(), current_manifest(results)
    return LoadedResults(
        path=results.path,
        archive=results.archive,
        manifest=manifest,
        profile_yaml=results.profile_yaml(),
        plan=plan,
        requests=results.prepared_requests(),
        runs=settled_runs(map(load_run, results.begun_runs(plan)), manifest),
    )


def settled_runs(runs: Iterable[LoadedRun], manifest: Manifest) -> tuple[LoadedRun, ...]:
    """``runs`` of an experiment that is in progress as they are; of any other, none is running."""
    if manifest.state == "running":
        return tuple(runs)
    return tuple(replace(run, record=settled(run.record)) if run.record.state == "running" else run for run in runs)


def _size_bytes(path: Path, within: Path) -> int:
    """Size of a log; 0 for one that cannot be opened, which the reader of lines reports."""
    try:
        return stat_file(path, within=within).st_size
    except (OSError, RecordError):
        return 0
