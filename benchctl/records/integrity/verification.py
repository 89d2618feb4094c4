"""Is a result directory still what was measured? Files against digests, records against each other."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.errors import InvalidDataError
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity.digests import (
    DIGESTS_FILE,
    DirectoryDigests,
    manifest_sha256,
    read_digests,
    run_record_path,
)
from benchctl.records.integrity.stamps import FileLook
from benchctl.records.manifest import Manifest, PlannedRun
from benchctl.records.run import FileDigest, RunRecord

_EVIDENCE: Final = ("server.log", "steps.raw")
"""Beginnings of the names of files that no number is taken from once a run has ended."""
_MAY_GO: Final = frozenset({"steps.parquet"})
"""Copies of other files: without them nothing is missing."""
_REQUEST_SET: Final = "requests.jsonl"

AlterationKind: TypeAlias = Literal[
    "altered-file", "missing-file", "altered-plan", "altered-requests", "copied-run"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One thing that is not as it was measured."""

    kind: AlterationKind
    file: str
    """By its path below the result directory."""
    what: str
    decides: bool = True
    """Whether numbers rest on it."""

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found of a directory."""

    alterations: tuple[Alteration, ...]
    manifest: Manifest
    digests: DirectoryDigests | None
    """None in a directory whose writer recorded none."""
    unrecorded: tuple[str, ...]
    """Runs of whose end nothing was recorded: those that are going on, or that an older benchctl did."""
    num_files: int
    """Files with a digest."""
    hashed_bytes: int
    """How much was read for it."""
    fingerprints: Mapping[str, tuple[str, ...]]
    """Runs by the SHA-256 of records that no two runs can have in common, where it was recorded."""


def verify_directory(path: Path, *, is_fresh: bool = False) -> Verification:
    """Hold a result directory against what it says of itself; with ``is_fresh`` every file is read.

    Raises RecordError where its plan or manifest cannot be read. Runs whose record cannot be read are left to those
    who read records.
    """
    results, damage = ResultDirectory(path), list[Alteration]()
    digests: DirectoryDigests | None = None
    try:
        digests = read_digests(path)
    except InvalidDataError as error:
        damage.append(Alteration(kind="altered-file", file=DIGESTS_FILE, what=f"cannot be read: {error}"))
    plan, manifest = results.plan(), results.manifest()
    records = dict(_readable_records(results, plan.runs))
    recorded = {} if digests is None else digests.files
    expected = recorded | {
        f"runs/{run_id}/{name}": digest
        for run_id, record in records.items()
        for name, digest in record.files.items()
    }
    look = FileLook(path, is_fresh=is_fresh)
    altered = tuple(_altered_files(expected, look))
    request_set = look.digests([(_REQUEST_SET, recorded.get(_REQUEST_SET))])[_REQUEST_SET]
    prints, unrecorded_prints = _fingerprints(records, look), _unrecorded_fingerprints(records, look)
    look.keep()
    return Verification(
        alterations=(
            *damage,
            *altered,
            *(() if damage else _altered_manifest(path, digests, records)),
            *_altered_requests(request_set, manifest),
            *_misplaced(plan.runs, records),
            *_out_of_order(records.values()),
            *_copied(prints, unrecorded_prints),
        ),
        manifest=manifest,
        digests=digests,
        unrecorded=tuple(run_id for run_id in records if run_record_path(run_id) not in recorded),
        num_files=len(expected),
        hashed_bytes=look.hashed_bytes,
        fingerprints=prints,
    )


def _readable_records(results: ResultDirectory, planned: Iterable[PlannedRun]) -> Iterator[tuple[str, RunRecord]]:
    for run in planned:
        with suppress(InvalidDataError):
            yield run.run_id, results.run(run.run_id).read()


def _altered_files(expected: Mapping[str, FileDigest], look: FileLook) -> Iterator[Alteration]:
    same_size = {}
    for name, digest in expected.items():
        size_bytes, base = look.size_bytes(name), name.rpartition("/")[2]
        decides = not base.startswith(_EVIDENCE)
        if size_bytes == digest.size_bytes:
            same_size[name] = digest
        elif size_bytes is not None:
            what = f"has {size_bytes:,} bytes and had {digest.size_bytes:,} when it was recorded"
            yield Alteration(kind="altered-file", file=name, what=what, decides=decides)
        elif base not in _MAY_GO:
            yield Alteration(kind="missing-file", file=name, what="is missing", decides=decides)
    for name, held in look.digests(same_size.items()).items():
        if held is None or held.sha256 != same_size[name].sha256:
            what = "cannot be read" if held is None else "holds something else than when it was recorded"
            decides = not name.rpartition("/")[2].startswith(_EVIDENCE)
            yield Alteration(kind="altered-file", file=name, what=what, decides=decides)


def _altered_manifest(
    path: Path, digests: DirectoryDigests | None, records: Mapping[str, RunRecord]
) -> Iterator[Alteration]:
    if digests is None:
        if any(record.files for record in records.values()):
            yield Alteration(kind="missing-file", file=DIGESTS_FILE, what="is missing, and runs have digests")
    elif manifest_sha256(path) != digests.manifest_sha256:
        what = "says something else than when the experiment began"
        yield Alteration(kind="altered-file", file="manifest.json", what=what)


def _altered_requests(held: FileDigest | None, manifest: Manifest) -> Iterator[Alteration]:
    """The request set against its SHA-256 in the manifest."""
    stated = manifest.request_set_sha256
    if held is not None and held.sha256 != stated:
        what = f"has the SHA-256 {held.sha256[:12]}…, and the request set of the manifest has {stated[:12]}…"
        yield Alteration(kind="altered-requests", file=_REQUEST_SET, what=what)


def _misplaced(planned: Iterable[PlannedRun], records: Mapping[str, RunRecord]) -> Iterator[Alteration]:
    """What runs say of their own place in the experiment, against the plan."""
    for run in planned:
        record = records.get(run.run_id)
        for field in () if record is None else PlannedRun.__struct_fields__:
            meant, said = getattr(run, field), getattr(record, field)
            if meant != said:
                what = f"says {field} {said}, and the plan says {meant}"
                yield Alteration(kind="altered-plan", file=run_record_path(run.run_id), what=what)


def _out_of_order(records: Iterable[RunRecord]) -> Iterator[Alteration]:
    """Runs of one block that began, by two clocks, in another order than their positions. Repeated runs may."""
    blocks: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)
    for record in records:
        launch_ns, started_at = record.times.launch_ns, record.started_at
        if record.attempt == 1 and launch_ns is not None and started_at is not None:
            blocks[record.block].append((record.position, launch_ns, started_at, record.run_id))
    for begun in blocks.values():
        for (_, then_ns, then, earlier), (_, launch_ns, started_at, later) in pairwise(sorted(begun)):
            if launch_ns < then_ns and started_at < then:
                what = f"began before {earlier}, and its position says after"
                yield Alteration(kind="altered-plan", file=run_record_path(later), what=what)


def _fingerprints(records: Mapping[str, RunRecord], look: FileLook) -> dict[str, tuple[str, ...]]:
    """Runs by the SHA-256 of their requests, whose times are those of a real clock, and of steps that have such."""
    recorded = [
        (run_id, f"runs/{run_id}/{name}", record.files[name])
        for run_id, record in records.items()
        for name in ("requests.jsonl", "steps.jsonl")
        if name in record.files and (name == "requests.jsonl" or record.clock != "virtual")
    ]
    return _by_content(recorded, look)


def _unrecorded_fingerprints(records: Mapping[str, RunRecord], look: FileLook) -> dict[str, tuple[str, ...]]:
    """The same of runs without digests: requests alone, and hashed only where two have one size."""
    by_size: dict[int | None, list[str]] = defaultdict(list)
    for run_id, record in records.items():
        if not record.files:
            by_size[look.size_bytes(f"runs/{run_id}/requests.jsonl")].append(run_id)
    alike = [run_id for size, run_ids in by_size.items() if size and len(run_ids) > 1 for run_id in run_ids]
    return _by_content([(run_id, f"runs/{run_id}/requests.jsonl", None) for run_id in alike], look)


def _by_content(files: Sequence[tuple[str, str, FileDigest | None]], look: FileLook) -> dict[str, tuple[str, ...]]:
    held = look.digests((file, digest) for _, file, digest in files)
    runs: dict[str, dict[str, None]] = defaultdict(dict)
    for run_id, file, _ in files:
        if (found := held[file]) is not None and found.size_bytes:
            runs[found.sha256][run_id] = None
    return {sha256: tuple(run_ids) for sha256, run_ids in runs.items()}


def _copied(*prints: Mapping[str, tuple[str, ...]]) -> Iterator[Alteration]:
    groups = dict.fromkeys(runs for of_prints in prints for runs in of_prints.values() if len(runs) > 1)
    for first, *others in groups:
        what = f"holds the same records as {', '.join(others)}, and no two runs have the same times"
        yield Alteration(kind="copied-run", file=f"runs/{first}", what=what)
