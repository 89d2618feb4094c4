"""A result directory in memory: every run with its records, and a warning for each damaged file."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.directory import RunDirectory, open_results
from benchctl.records.jsonl import read_jsonl, read_whole
from benchctl.records.manifest import Manifest, Plan
from benchctl.records.record import ResultWarning
from benchctl.records.request import PreparedRequest, RequestRecord
from benchctl.records.run import RunRecord
from benchctl.records.samples import ClientSample, GpuSample, HostSample, PrometheusSample
from benchctl.records.step import StepRecord

if TYPE_CHECKING:
    from benchctl.records.columns.step_columns import DecodedSteps, StepColumns
    from benchctl.records.columns.step_log import StepLog

    Steps: TypeAlias = tuple[StepRecord, ...] | DecodedSteps | StepLog

T = TypeVar("T", bound=msgspec.Struct)
KEPT_STEPS_BYTES: Final = 1 << 13
"""The records of a log up to this size are kept, and those of a longer one only as columns."""
FEW_STEPS_BYTES: Final = 1 << 18
"""A log up to this size is decoded before polars would have begun, and all the more before it would be imported."""
FEW_REQUESTS_BYTES: Final = 1 << 16
"""Requests up to this size are decoded about as fast as a copy of their numbers would be read."""
_NUM_AT_ONCE: Final = 2
"""polars has threads of its own for one log; a second one fills the time in which those idle."""
DAMAGED_LINE: Final = "damaged-line"
"""Code of the warning that a file of a run ends with a line that cannot be read."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One run in memory. ``warnings`` holds what was damaged or absent, beside the run's own warnings."""

    record: RunRecord
    requests: tuple[RequestRecord, ...]
    steps: "Steps"
    """All of them, the warm-up's among them; those of a long log are decoded each time that somebody looks."""
    gpu: tuple[GpuSample, ...]
    host: tuple[HostSample, ...]
    prometheus: tuple[PrometheusSample, ...]
    warnings: tuple[ResultWarning, ...]
    is_damaged: bool = False
    """A run that says ``done`` holds a line that cannot be read."""
    client: tuple[ClientSample, ...] = ()
    """How the load generator did; none in directories that were written before it told."""
    _cached_columns: "dict[bool, StepColumns]" = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # init=False: a copy with other steps (dataclasses.replace) has columns of its own

    @property
    def columns(self) -> "StepColumns":
        """The steps that are no warm-up, as arrays; those of a long log are made anew each time, so that they need
        not stay in memory.
        """
        return self._columns(is_warmup=False)

    @property
    def warmup_columns(self) -> "StepColumns":
        """The steps of the warm-up, as arrays."""
        return self._columns(is_warmup=True)

    def _columns(self, *, is_warmup: bool) -> "StepColumns":
        if not isinstance(self.steps, tuple):
            return self.steps.columns(is_warmup=is_warmup)
        if is_warmup not in self._cached_columns:
            from benchctl.records.columns.step_columns import columns_from  # noqa: PLC0415 - numpy, where there are steps

            self._cached_columns[is_warmup] = columns_from(self.steps, is_warmup=is_warmup)
        return self._cached_columns[is_warmup]

    @property
    def damage(self) -> tuple[str, ...]:
        """What cannot be read of a run that says ``done``, with file and line."""
        damaged = (warning.message for warning in self.warnings if warning.code == DAMAGED_LINE)
        return tuple(damaged) if self.is_damaged else ()


def load_run(directory: RunDirectory) -> LoadedRun:
    """Read one run, keeping all that is readable.

    A damaged line ends its file: what came before is kept and a warning names file and line. In a run that
    says ``done`` this marks the run as damaged, because nobody should compare it.
    """
    record = directory.read()
    damage: list[ResultWarning] = []

    def note(error: RecordError) -> None:
        damage.append(ResultWarning(code=DAMAGED_LINE, message=str(error), where=record.run_id))

    def keep(name: str, kind: type[T]) -> tuple[T, ...]:
        path = directory.path / f"{name}.jsonl"
        whole = read_whole(path, kind)
        if whole is not None:
            return whole
        kept: list[T] = []
        try:
            kept.extend(read_jsonl(path, kind))
        except RecordError as error:
            note(error)
        return tuple(kept)

    requests = _long_requests(directory, record)
    if requests is None:
        requests = keep("requests", RequestRecord)
    steps: Steps
    if _size_bytes(directory.step_log) <= FEW_STEPS_BYTES:
        steps = keep("steps", StepRecord)
        if _size_bytes(directory.step_log) > KEPT_STEPS_BYTES:
            from benchctl.records.columns.step_columns import DecodedSteps  # noqa: PLC0415 - numpy, where it saves memory

            steps = DecodedSteps(directory.step_log, steps)
    else:
        from benchctl.records.columns.step_log import read_step_log  # noqa: PLC0415 - polars, where it is worth its time

        steps, fault = read_step_log(directory.step_log)
        if fault is not None:
            note(fault)
    gpu, host = keep("gpu", GpuSample), keep("host", HostSample)
    prometheus, client = keep("prometheus", PrometheusSample), keep("client", ClientSample)
    return LoadedRun(
        record=record,
        requests=requests,
        steps=steps,
        gpu=gpu,
        host=host,
        prometheus=prometheus,
        warnings=(*record.warnings, *damage),
        is_damaged=bool(damage) and record.state == "done",
        client=client,
    )


def _long_requests(directory: RunDirectory, record: RunRecord) -> tuple[RequestRecord, ...] | None:
    """The requests of a long file, whose copy is kept once the run has ended; None for a short or damaged one."""
    if _size_bytes(directory.request_log) <= FEW_REQUESTS_BYTES:
        return None
    from benchctl.records.columns.request_arrays import read_requests  # noqa: PLC0415 - numpy, where it is worth its time

    return read_requests(
        directory.request_log,
        recorded=record.files.get(directory.request_log.name),
        keeps_copy=record.state not in {"planned", "running"},
    )


def keep_steps(run: LoadedRun) -> None:
    """Let the next reader of a long step log be quicker. OSError where the directory cannot be written."""
    if not isinstance(run.steps, tuple):
        run.steps.keep()


@dataclass(frozen=True, slots=True)
class LoadedResults:
    """An experiment in memory: what the reading half works on."""

    path: Path
    manifest: Manifest
    profile_yaml: str
    """The resolved profile as written; ``profile.load.parse_profile`` reads it."""
    plan: Plan
    """Without the blocks that a stopping rule made unnecessary."""
    requests: tuple[PreparedRequest, ...]
    runs: tuple[LoadedRun, ...]
    """Runs that were begun, in plan order."""


def load_results(path: Path) -> LoadedResults:
    """Read a whole result directory; see ``load_run`` for damaged lines."""
    results = open_results(path)
    plan = results.due_plan()
    return LoadedResults(
        path=path,
        manifest=results.manifest(),
        profile_yaml=results.profile_yaml(),
        plan=plan,
        requests=results.prepared_requests(),
        runs=_load_runs(results.begun_runs(plan)),
    )


def _load_runs(directories: Sequence[RunDirectory]) -> tuple[LoadedRun, ...]:
    """All of them; long step logs that have no table two at a time, because one leaves a part of two cores without
    work. All else is the interpreter's, which does one thing at a time.
    """
    if sum(_size_bytes(directory.step_log) for directory in directories) <= FEW_STEPS_BYTES:
        return tuple(map(load_run, directories))
    from benchctl.records.columns.step_table import table_path  # noqa: PLC0415 - polars, where it is worth its time

    if all(table_path(directory.step_log).is_file() for directory in directories):
        return tuple(map(load_run, directories))
    with ThreadPoolExecutor(max_workers=_NUM_AT_ONCE) as pool:
        return tuple(pool.map(load_run, directories))


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
