"""Verification of a result directory: files against digests, records against each other."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from benchctl.errors import InvalidDataError, RecordError
from benchctl.records.archive import contents_of
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import read_if_there
from benchctl.records.integrity.digests import (
    DERIVED_FILE,
    DIGESTS_FILE,
    FILE_MEASUREMENTS,
    DirectoryDigests,
    digest_of,
    manifest_sha256,
    read_digests,
    run_record_path,
)
from benchctl.records.record import FileDigest, Manifest, PlannedRun, RunRecord
from benchctl.untrusted.files import OutsideError, is_there, stat_file
from benchctl.untrusted.reading import DECODING_ERRORS


class _Files:
    """The files of a directory, which are named by their paths below it.

    With ``is_fresh`` every file is read, once; else one that has the size and time of its recorded digest is not.
    """

    def __init__(self, directory: Path, *, is_fresh: bool) -> None:
        self._directory = directory
        self._is_fresh = is_fresh
        self._hashed: dict[str, FileDigest | None] = {}
        self.hashed_bytes = 0

    def size_bytes(self, name: str) -> int | None:
        """Size of a file; None without one."""
        status = self._status(name)
        return None if status is None else status.st_size

    def is_there(self, name: str) -> bool:
        """True where there is an entry of any kind."""
        try:
            return is_there(self._directory / name, within=self._directory)
        except OutsideError:
            return True

    def digest(self, name: str, recorded: FileDigest | None) -> FileDigest | None:
        """The digest of a file as it is now; None for one that cannot be read."""
        if name in self._hashed:
            return self._hashed[name]
        status = None if self._is_fresh or recorded is None else self._status(name)
        stamp = None if status is None else (status.st_size, status.st_mtime_ns)
        if recorded is not None and stamp == (recorded.size_bytes, recorded.mtime_ns):
            return recorded
        digest = None
        with suppress(OSError, RecordError):
            digest = digest_of(self._directory / name, within=self._directory)
            self.hashed_bytes += digest.size_bytes
        self._hashed[name] = digest
        return digest

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return stat_file(self._directory / name, within=self._directory)
        except (OSError, OutsideError):
            return None


def _derived_digests(directory: Path) -> dict[str, FileDigest]:
    """Digests of what the last report wrote; empty without a report, or where they cannot be read."""
    with suppress(RecordError, *DECODING_ERRORS):
        content = read_if_there(directory / DERIVED_FILE, within=directory) or b"{}"
        return msgspec.json.decode(content, type=dict[str, FileDigest])
    return {}


_EVIDENCE: Final = ("server.log", "steps.raw")
"""Prefixes of the names of files that no result depends on once a run has ended."""
_REQUEST_SET: Final = "requests.jsonl"
_OF_DIGESTS: Final = ("manifest.json", DIGESTS_FILE, DERIVED_FILE, "digests/")
"""Files of digests, and the manifest, of which ``digests.json`` has one of its lasting fields."""

AlterationKind: TypeAlias = Literal[
    "altered-file", "missing-file", "altered-plan", "altered-requests", "copied-run"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One difference between a directory and its records."""

    kind: AlterationKind
    file: str
    """Path below the result directory."""
    what: str
    decides: bool = True
    """Whether results depend on it."""

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification."""

    alterations: tuple[Alteration, ...]
    manifest: Manifest
    digests: DirectoryDigests | None
    """None in a directory of an older version."""
    unrecorded: tuple[str, ...]
    """Runs without a digest: those in progress, and those of older versions."""
    uncovered: tuple[str, ...]
    """Other files without a digest; like those of a report only looked at where every file is read."""
    num_files: int
    """Files with a digest."""
    hashed_bytes: int
    """Bytes that were read."""
    fingerprints: Mapping[str, tuple[str, ...]]
    """Runs by the recorded SHA-256 of records that no two runs can share."""


def verify_directory(path: Path, *, is_fresh: bool = False) -> Verification:
    """Compare a result directory with its digests and its plan; with ``is_fresh`` every file is read.

    Raises RecordError when its plan or manifest cannot be read. Runs whose record cannot be read are left out; the
    reader of records reports them.
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
    files = _Files(path, is_fresh=is_fresh)
    derived = {  # any of these may be deleted
        name: digest
        for name, digest in (_derived_digests(path) if is_fresh else {}).items()
        if name not in expected and files.is_there(name)
    }
    altered = (
        *_altered_files(expected, files),
        *(replace(one, decides=False) for one in _altered_files(derived, files)),
        *(
            Alteration(
                kind="altered-file",
                file=name,
                what="has no digest: it was added after the experiment began, or by an older version; delete it",
            )
            for name in FILE_MEASUREMENTS
            if digests is not None and name not in recorded and files.is_there(name)
        ),
    )
    request_set = files.digest(_REQUEST_SET, recorded.get(_REQUEST_SET))
    prints, unrecorded_prints = _fingerprints(records, files), _unrecorded_fingerprints(records, files)
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
        uncovered=tuple(
            name
            for name in (contents_of(path).files if is_fresh else ())
            if name not in expected and name not in derived and not name.startswith(_OF_DIGESTS)
        ),
        num_files=len(expected) + len(derived),
        hashed_bytes=files.hashed_bytes,
        fingerprints=prints,
    )


def _readable_records(results: ResultDirectory, planned: Iterable[PlannedRun]) -> Iterator[tuple[str, RunRecord]]:
    for run in planned:
        with suppress(InvalidDataError):
            yield run.run_id, results.run(run.run_id).read()


def _altered_files(expected: Mapping[str, FileDigest], files: _Files) -> Iterator[Alteration]:
    for name, digest in expected.items():
        size_bytes = files.size_bytes(name)
        kind: AlterationKind = "altered-file"
        what = None
        if size_bytes == digest.size_bytes:
            held = files.digest(name, digest)
            if held is None:
                what = "cannot be read"
            elif held.sha256 != digest.sha256:
                what = "has other content than when it was recorded"
        elif size_bytes is not None:
            what = f"has {size_bytes:,} bytes and had {digest.size_bytes:,} when it was recorded"
        elif files.is_there(name):
            what = "is a link or no regular file, and was a file when it was recorded"
        else:
            kind, what = "missing-file", "is missing"
        if what is not None:
            decides = not name.rpartition("/")[2].startswith(_EVIDENCE)
            yield Alteration(kind=kind, file=name, what=what, decides=decides)


def _altered_manifest(
    path: Path, digests: DirectoryDigests | None, records: Mapping[str, RunRecord]
) -> Iterator[Alteration]:
    if digests is None:
        if any(record.files for record in records.values()):
            yield Alteration(kind="missing-file", file=DIGESTS_FILE, what="is missing, and runs have digests")
    elif manifest_sha256(path) != digests.manifest_sha256:
        what = "has other fields than when the experiment began"
        yield Alteration(kind="altered-file", file="manifest.json", what=what)


def _altered_requests(held: FileDigest | None, manifest: Manifest) -> Iterator[Alteration]:
    """The request set against its SHA-256 in the manifest."""
    stated = manifest.request_set_sha256
    if held is not None and held.sha256 != stated:
        what = f"has the SHA-256 {held.sha256[:12]}…, and the request set of the manifest has {stated[:12]}…"
        yield Alteration(kind="altered-requests", file=_REQUEST_SET, what=what)


def _misplaced(planned: Iterable[PlannedRun], records: Mapping[str, RunRecord]) -> Iterator[Alteration]:
    """Runs whose records contradict the plan."""
    for run in planned:
        record = records.get(run.run_id)
        for field in () if record is None else PlannedRun.__struct_fields__:
            planned_value, value = getattr(run, field), getattr(record, field)
            if planned_value != value:
                what = f"says {field} {value}, and the plan says {planned_value}"
                yield Alteration(kind="altered-plan", file=run_record_path(run.run_id), what=what)


def _out_of_order(records: Iterable[RunRecord]) -> Iterator[Alteration]:
    """Runs of one block that began, by two clocks, in another order than their positions; repeated runs may."""
    blocks: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)
    for record in records:
        launch_ns, started_at = record.times.launch_ns, record.started_at
        if record.attempt == 1 and launch_ns is not None and started_at is not None:
            blocks[record.block].append((record.position, launch_ns, started_at, record.run_id))
    for begun in blocks.values():
        for (_, previous_ns, previous_start, earlier), (_, launch_ns, started_at, later) in pairwise(sorted(begun)):
            if launch_ns < previous_ns and started_at < previous_start:
                what = f"began before {earlier}, and its position says after"
                yield Alteration(kind="altered-plan", file=run_record_path(later), what=what)


def _fingerprints(records: Mapping[str, RunRecord], files: _Files) -> dict[str, tuple[str, ...]]:
    """Runs by the SHA-256 of their requests and of their steps, of each only if its times are real."""
    recorded = [
        (run_id, f"runs/{run_id}/{name}", record.files[name])
        for run_id, record in records.items()
        for name, is_virtual in (
            ("requests.jsonl", record.is_simulated),
            ("steps.jsonl", record.clock == "virtual"),
        )
        if name in record.files and not is_virtual
    ]
    return _by_content(recorded, files)


def _unrecorded_fingerprints(records: Mapping[str, RunRecord], files: _Files) -> dict[str, tuple[str, ...]]:
    """The same for runs without digests: requests alone, hashed only if two have one size."""
    by_size: dict[int | None, list[str]] = defaultdict(list)
    for run_id, record in records.items():
        if not record.files and not record.is_simulated:
            by_size[files.size_bytes(f"runs/{run_id}/requests.jsonl")].append(run_id)
    alike = [run_id for size, run_ids in by_size.items() if size and len(run_ids) > 1 for run_id in run_ids]
    return _by_content([(run_id, f"runs/{run_id}/requests.jsonl", None) for run_id in alike], files)


def _by_content(
    recorded: Sequence[tuple[str, str, FileDigest | None]], files: _Files
) -> dict[str, tuple[str, ...]]:
    runs: dict[str, dict[str, None]] = defaultdict(dict)
    for run_id, name, of_run in recorded:
        digest = files.digest(name, of_run)
        if digest is not None and digest.size_bytes:
            runs[digest.sha256][run_id] = None
    return {sha256: tuple(run_ids) for sha256, run_ids in runs.items()}


def _copied(*prints: Mapping[str, tuple[str, ...]]) -> Iterator[Alteration]:
    groups = dict.fromkeys(runs for of_prints in prints for runs in of_prints.values() if len(runs) > 1)
    for first, *others in groups:
        what = f"holds the same records as {', '.join(others)}, and no two runs have the same times"
        yield Alteration(kind="copied-run", file=f"runs/{first}", what=what)
