"""The result directory: create, reopen and read it, and its request sets; submissions of blocks to a scheduler."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from benchctl.errors import RecordError, SchemaVersionError, UsageError
from benchctl.records.files import (
    JsonlWriter,
    document_bytes,
    read_document,
    read_jsonl,
    read_record,
    write_bytes_atomic,
    write_json_atomic,
)
from benchctl.records.record import Manifest, Plan, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import Cell, Document
from benchctl.units import range_of
from benchctl.untrusted import STORED_PROFILE_BYTES
from benchctl.untrusted.files import (
    DECODING_ERRORS,
    entry_names,
    inside,
    is_there,
    make_folder,
    read_file,
    replace_file,
)

BLOCKS: Final = "blocks"
"""Folder of a result directory whose blocks are measured by several processes: a directory for each of them."""
OWNER_FILE: Final = "owner.json"
"""In the directory of a block: the process that measures it, or did last."""
OF_POINT: Final = "~"
"""In the id of a load point of a ladder, ``003-b1-guided~2``, between the id of its server's run and its number."""
_BLOCK_NAME: Final = re.compile(r"b([0-9]{3}|[1-9][0-9]{3,8})")
_Order: TypeAlias = tuple[tuple[int, float, str], ...]


def cell_name(cell: Cell) -> str:
    """A cell in words: ``top_k=3, value_model=qwen2.5-1.5b``; empty for the baseline."""
    return ", ".join(f"{factor}={value}" for factor, value in cell.items())


def arm_label(variant: str, cell: Cell) -> str:
    """An arm in words: ``guided top_k=3``."""
    return f"{variant} {cell_name(cell)}".rstrip()


def arm_order(variant: str, cell: Cell, baseline: str | None = None) -> tuple[bool | _Order, ...]:
    """Sort key of an arm: the baseline, then by variant and by values of the factors."""
    return variant != baseline, _order(variant), *map(_order, cell.values())


def _order(value: str | float | None) -> _Order:
    """Numbers by size, before words by spelling, in which numbers go by size as well."""
    if value is not None and not isinstance(value, str):
        return ((0, float(value), ""),)
    parts = enumerate(re.split(r"([0-9]+(?:\.[0-9]+)?)", str(value)))
    return tuple((0, float(part), "") if i % 2 else (1, 0.0, part) for i, part in parts)


def run_directory_name(index: int, block: int, variant: str, cell: Cell) -> str:
    """``007-b2-guided-top_k3``: sorts in the order of execution; cut to the length that a name can have.

    Names stay distinct: the number of the run is their beginning.
    """
    parts = [f"{index:03d}", f"b{block}", variant]
    parts += [f"{factor}{value}" for factor, value in cell.items()]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))[:200]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path
    within: Path | None = None
    """The result directory that holds it; None for a directory that is read alone."""
    load: int = 1
    """Number of the load whose records are meant, where its server got several."""

    @property
    def root(self) -> Path:
        """The directory out of which nothing in this one leads."""
        return self.within or self.path

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    @property
    def step_log(self) -> Path:
        return self.log("steps")

    @property
    def request_log(self) -> Path:
        return self.log("requests")

    def log(self, name: str) -> Path:
        """The file of the load's records of this name: ``steps.jsonl``, of the second load ``steps-2.jsonl``."""
        return self.path / (f"{name}.jsonl" if self.load == 1 else f"{name}-{self.load}.jsonl")

    def of_load(self, number: int) -> "RunDirectory":
        """The same directory, for the records of this load."""
        return replace(self, load=number)

    def is_begun(self) -> bool:
        """True once the run has a record, readable or not."""
        return is_there(self.path / "run.json", within=self.root)

    def read(self) -> RunRecord:
        return read_record(self.path / "run.json", RunRecord, within=self.root)

    def write(self, run: RunRecord) -> None:
        make_folder(self.path, within=self.root)
        write_json_atomic(self.path / "run.json", run, within=self.root)

    def append(self, name: str) -> JsonlWriter:
        """Open ``<name>.jsonl`` for appending: such as ``requests`` or ``steps``."""
        make_folder(self.path, within=self.root)
        return JsonlWriter(self.log(name), within=self.root)

    def requests(self) -> Iterator[RequestRecord]:
        return read_jsonl(self.request_log, RequestRecord, within=self.root)


@dataclass(frozen=True, slots=True)
class RequestSets:
    """The request sets of an experiment in memory, by the load factors in which they differ; mostly one."""

    sets: tuple[tuple[Cell, tuple[PreparedRequest, ...]], ...]

    @classmethod
    def single(cls, requests: Iterable[PreparedRequest]) -> "RequestSets":
        """One set, for all load points."""
        return cls((({}, tuple(requests)),))

    @property
    def requests(self) -> tuple[PreparedRequest, ...]:
        """The requests of all sets, one set after the other."""
        return tuple(chain.from_iterable(requests for _, requests in self.sets))

    @property
    def number(self) -> str:
        """The number of requests of a load, ``20 to 200`` where sets differ in it."""
        return range_of([len(requests) for _, requests in self.sets])

    def of(self, cell: Cell) -> tuple[PreparedRequest, ...]:
        """The set of a load point, or of a cell with further factors; empty where none has its values."""
        return next((requests for factors, requests in self.sets if factors.items() <= cell.items()), ())


@dataclass(frozen=True, slots=True)
class ResultDirectory:
    """One experiment on disk.

    Where several processes measure it, each block that was begun is a result directory of its own,
    ``blocks/b003``, and its runs are read there.
    """

    path: Path

    @property
    def is_divided(self) -> bool:
        """True where each block has a directory of its own, so that several processes can measure."""
        return is_there(self.path / BLOCKS, within=self.path)

    def block(self, block: int) -> "ResultDirectory":
        """The directory of one block, begun or not. Raises OutsideError where a link is in its place."""
        path = self.path / BLOCKS / f"b{block:03d}"
        with suppress(FileNotFoundError):
            inside(path / "manifest.json", self.path)
        return ResultDirectory(path)

    def begun_blocks(self) -> dict[int, "ResultDirectory"]:
        """The directories of the blocks that were begun, by block; empty where one process measures all."""
        names = entry_names(self.path / BLOCKS, within=self.path) if self.is_divided else ()
        matches = filter(None, map(_BLOCK_NAME.fullmatch, names))
        return {block: self.block(block) for block in sorted(int(match[1]) for match in matches)}

    def manifest(self) -> Manifest:
        return read_record(self.path / "manifest.json", Manifest, within=self.path)

    def write_manifest(self, manifest: Manifest) -> None:
        make_folder(self.path, within=self.path)
        write_json_atomic(self.path / "manifest.json", manifest, within=self.path)

    def plan(self) -> Plan:
        return read_record(self.path / "plan.json", Plan, within=self.path)

    def due_plan(self) -> Plan:
        """The plan without the blocks that a stopping rule made unnecessary."""
        return as_ended(self.plan(), self.manifest())

    def write_plan(self, plan: Plan) -> None:
        write_json_atomic(self.path / "plan.json", plan, within=self.path)

    def prepared_requests(self, file: str = "requests.jsonl") -> Iterator[PreparedRequest]:
        """The request set, or the first of several, one by one as it is read; those of another file by its name."""
        return read_jsonl(self.path / file, PreparedRequest, within=self.path)

    def request_sets(self) -> RequestSets:
        """All request sets in memory."""
        sets = self.manifest().all_sets
        return RequestSets(tuple((each.cell, tuple(self.prepared_requests(each.file))) for each in sets))

    def write_prepared_requests(self, content: bytes, file: str = "requests.jsonl") -> None:
        """Store a request set exactly as its sha256 was taken."""
        write_bytes_atomic(self.path / file, content, within=self.path)

    def profile_yaml(self) -> str:
        """The resolved profile as written; ``profile.load.parse_profile`` reads it."""
        path = self.path / "profile.yaml"
        try:
            return read_document(path, within=self.path, max_bytes=STORED_PROFILE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise RecordError(f"{path} is not UTF-8 text ({error}); restore the file from a copy") from error

    def write_profile(self, text: str) -> None:
        write_bytes_atomic(self.path / "profile.yaml", text.encode(), within=self.path)

    def run(self, run_id: str) -> RunDirectory:
        """The directory of a run, in that of its block where that was begun.

        The id of a load point, such as ``003-b1-guided~2``, leads to its server's, for the records of this point.
        """
        path, (run_id, _, load) = self.path, run_id.partition(OF_POINT)
        if match := re.match(r"[0-9]+-b([0-9]{1,9})-", run_id):
            of_block = self.path / BLOCKS / f"b{int(match[1]):03d}"
            path = of_block if is_there(of_block, within=self.path) else path
        return RunDirectory(path / "runs" / run_id, self.path, int(load or 1))

    def run_folder(self, run_id: str) -> str:
        """Path of a run's directory below this one, with slashes."""
        return self.run(run_id).path.relative_to(self.path).as_posix()

    def runs(self) -> tuple[RunDirectory, ...]:
        """Directories of all planned runs, begun or not, in plan order."""
        return tuple(self.run(planned.run_id) for planned in self.plan().runs)

    def begun_runs(self, plan: Plan) -> tuple[RunDirectory, ...]:
        """Directories of the runs of ``plan`` that were begun, in its order."""
        planned = (self.run(planned.run_id) for planned in plan.runs)
        return tuple(run for run in planned if run.is_begun())


def as_ended(plan: Plan, manifest: Manifest) -> Plan:
    """A plan without the blocks that a declared stopping rule made unnecessary."""
    ended = None if manifest.stopping is None else manifest.stopping.ended_after
    if ended is None:
        return plan
    return msgspec.structs.replace(plan, runs=tuple(run for run in plan.runs if run.block < ended))


def open_results(path: Path) -> ResultDirectory:
    """Open a result directory for reading.

    Raises UsageError when ``path`` is none, RecordError when it is one without a manifest, SchemaVersionError when
    it is of another schema.
    """
    if not is_there(path / "manifest.json", within=path):
        if any(is_there(path / name, within=path) for name in ("plan.json", "runs")):
            raise RecordError(
                f"{path} has no manifest.json: the result directory is incomplete; copy it again whole"
            )
        problem = "it has no manifest.json" if path.is_dir() else "it does not exist"
        if path.is_file():
            problem = f"it is a file; of an archive, 'benchctl import archive {path}' makes one"
        raise UsageError(
            f"{path} is not a result directory: {problem}. "
            "Name a directory that 'benchctl run' wrote; 'benchctl list' shows them"
        )
    if is_there(path / "claims", within=path):
        raise SchemaVersionError(
            f"{path} has a folder claims: several processes measured its blocks by an older version of benchctl, "
            "which is needed to read it"
        )
    results = ResultDirectory(path)
    results.manifest()
    return results


SUBMISSIONS: Final = "submissions"
"""Folder of a result directory."""
_FILE: Final = "submission.json"


class Submission(Document, frozen=True, kw_only=True):
    """Blocks that were handed to a scheduler at once."""

    job: str
    """Number of the array job, or of the job of a single block."""
    tasks: dict[str, int]
    """Block of each task, by the scheduler's name of the task: ``17_0``."""


def write_submission(results: Path, folder: Path, submission: Submission) -> None:
    """Store what was submitted beside its tasks' logs. Raises OSError."""
    replace_file(folder / _FILE, document_bytes(submission), within=results)


def read_submissions(results: Path) -> tuple[Submission, ...]:
    """All submissions of a directory, oldest first; those that cannot be read are left out."""
    submissions = list[Submission]()
    try:
        names = sorted(entry_names(results / SUBMISSIONS, within=results))
    except (OSError, RecordError):
        return ()
    for name in names:
        with suppress(OSError, RecordError, *DECODING_ERRORS):
            content = read_file(results / SUBMISSIONS / name / _FILE, within=results)
            submissions.append(msgspec.json.decode(content, type=Submission))
    return tuple(submissions)
