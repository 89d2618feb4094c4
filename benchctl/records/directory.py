"""The result directory: create it, reopen it, read it.

    <root>/manifest.json profile.yaml plan.json requests.jsonl
    <root>/runs/<nnn>-b<block>-<variant>[-<cell>]/run.json requests.jsonl steps.jsonl client.jsonl gpu.jsonl …

JSON documents are replaced atomically, JSON Lines are appended. Nothing here knows what the numbers mean.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from benchctl.errors import RecordError
from benchctl.records.jsonl import JsonlWriter, read_jsonl, read_whole, write_bytes_atomic, write_json_atomic
from benchctl.records.run import (
    Cell,
    ClientSample,
    GpuSample,
    HostSample,
    Manifest,
    Plan,
    PreparedRequest,
    PrometheusSample,
    RequestRecord,
    ResultWarning,
    RunRecord,
    StepRecord,
)
from benchctl.records.schema import upgrade

if TYPE_CHECKING:
    from benchctl.records.step_columns import DecodedSteps, StepColumns
    from benchctl.records.step_log import StepLog

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


def cell_name(cell: Cell) -> str:
    """A cell as people write it: ``top_k=3, value_model=qwen2.5-1.5b``; empty for the baseline."""
    return ", ".join(f"{factor}={value}" for factor, value in cell.items())


def arm_label(variant: str, cell: Cell) -> str:
    """A variant in a cell as people write it: ``guided top_k=3``."""
    return f"{variant} {cell_name(cell)}".rstrip()


def cell_order(cell: Cell) -> tuple[tuple[int, float, str], ...]:
    """Sort key of a cell: numbers by size, before words by spelling."""
    return tuple(
        (1, 0.0, str(value)) if isinstance(value, str) or value is None else (0, float(value), "")
        for value in cell.values()
    )


def run_directory_name(index: int, block: int, variant: str, cell: Cell) -> str:
    """``007-b2-guided-top_k3``: sorts in the order of execution and reads without a map."""
    parts = [f"{index:03d}", f"b{block}", variant]
    parts += [f"{factor}{value}" for factor, value in cell.items()]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    @property
    def step_log(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def request_log(self) -> Path:
        return self.path / "requests.jsonl"

    def read(self) -> RunRecord:
        return _read_json(self.path / "run.json", RunRecord)

    def write(self, run: RunRecord) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.path / "run.json", run)

    def append(self, name: str) -> JsonlWriter:
        """Open ``<name>.jsonl`` for appending: such as ``requests`` or ``steps``."""
        self.path.mkdir(parents=True, exist_ok=True)
        return JsonlWriter(self.path / f"{name}.jsonl")

    def requests(self) -> Iterator[RequestRecord]:
        return read_jsonl(self.request_log, RequestRecord)

    def steps(self) -> Iterator[StepRecord]:
        return read_jsonl(self.step_log, StepRecord)


@dataclass(frozen=True, slots=True)
class ResultDirectory:
    """One experiment on disk."""

    path: Path

    def manifest(self) -> Manifest:
        return _read_json(self.path / "manifest.json", Manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.path / "manifest.json", manifest)

    def plan(self) -> Plan:
        return _read_json(self.path / "plan.json", Plan)

    def due_plan(self) -> Plan:
        """The plan without what a stopping rule made unnecessary: the runs that are done, or still to do."""
        return as_ended(self.plan(), self.manifest())

    def write_plan(self, plan: Plan) -> None:
        write_json_atomic(self.path / "plan.json", plan)

    def prepared_requests(self) -> tuple[PreparedRequest, ...]:
        return tuple(self.stored_requests())

    def stored_requests(self) -> Iterator[PreparedRequest]:
        """The request set, one by one as it is read."""
        return read_jsonl(self.path / "requests.jsonl", PreparedRequest)

    def write_prepared_requests(self, content: bytes) -> None:
        """Store the request set exactly as its sha256 was taken."""
        write_bytes_atomic(self.path / "requests.jsonl", content)

    def profile_yaml(self) -> str:
        """The resolved profile as written; ``profile.load.parse_profile`` reads it."""
        path = self.path / "profile.yaml"
        try:
            return _read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise RecordError(f"{path} is no UTF-8 text ({error}); restore the file from a copy") from error

    def write_profile(self, text: str) -> None:
        write_bytes_atomic(self.path / "profile.yaml", text.encode())

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.path / "runs" / run_id)

    def runs(self) -> tuple[RunDirectory, ...]:
        """Directories of all planned runs, in plan order, whether they were begun or not."""
        return tuple(self.run(planned.run_id) for planned in self.plan().runs)

    def begun_runs(self, plan: Plan) -> tuple[RunDirectory, ...]:
        """Directories of the runs of ``plan`` that were begun, in its order."""
        planned = (self.run(planned.run_id) for planned in plan.runs)
        return tuple(run for run in planned if (run.path / "run.json").is_file())


def as_ended(plan: Plan, manifest: Manifest) -> Plan:
    """A plan without the blocks that a declared stopping rule made unnecessary."""
    ended = None if manifest.stopping is None else manifest.stopping.ended_after
    if ended is None:
        return plan
    return msgspec.structs.replace(plan, runs=tuple(run for run in plan.runs if run.block < ended))


def open_results(path: Path) -> ResultDirectory:
    """Open a result directory for reading.

    Raises RecordError when ``path`` is none, SchemaVersionError when it is of a newer schema.
    """
    if not (path / "manifest.json").is_file():
        raise RecordError(
            f"{path} is no result directory: it has no manifest.json. "
            "Name a directory that 'benchctl run' wrote; 'benchctl list' shows them"
        )
    results = ResultDirectory(path)
    results.manifest()
    return results


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
            from benchctl.records.step_columns import columns_from  # noqa: PLC0415 - numpy, where there are steps

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
            from benchctl.records.step_columns import DecodedSteps  # noqa: PLC0415 - numpy, where it saves memory

            steps = DecodedSteps(directory.step_log, steps)
    else:
        from benchctl.records.step_log import read_step_log  # noqa: PLC0415 - polars, where it is worth its time

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
    from benchctl.records.request_arrays import read_requests  # noqa: PLC0415 - numpy, where it is worth its time

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
    from benchctl.records.step_table import table_path  # noqa: PLC0415 - polars, where it is worth its time

    if all(table_path(directory.step_log).is_file() for directory in directories):
        return tuple(map(load_run, directories))
    with ThreadPoolExecutor(max_workers=_NUM_AT_ONCE) as pool:
        return tuple(pool.map(load_run, directories))


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RecordError(f"{path} is missing: the result directory is incomplete; copy it again whole") from error
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read: {error.strerror}; correct its permissions, or copy the directory again"
        ) from error


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        document: Any = msgspec.json.decode(_read_bytes(path))
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: {error}; restore the file from a copy, or run the experiment again") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path}: expected an object, found {type(document).__name__}; restore the file")
    try:
        return msgspec.convert(upgrade(document, path), kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{path}: {error}; restore the file from a copy, or run the experiment again") from error
