"""Digests of a result directory, by which later readers recognise altered files, and its verification."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

import benchctl
from benchctl.errors import InvalidDataError, RecordError
from benchctl.records.archive import contents_of
from benchctl.records.directory import BLOCKS, OWNER_FILE, ResultDirectory, RunDirectory
from benchctl.records.files import (
    document_of,
    encode,
    is_name,
    read_document,
    read_if_there,
    record_of,
    write_json_atomic,
)
from benchctl.records.record import Manifest, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, Document, FileDigest, FilePath
from benchctl.untrusted.files import DECODING_ERRORS, OutsideError, entry_names, is_there, open_file, stat_file

DIGESTS_FILE: Final = "digests.json"
DERIVED_FILE: Final = "derived.json"
"""Digests of what the last report wrote. No number is taken from these files."""
_WHOLE_FILES: Final = ("profile.yaml", "plan.json")
"""Files of the experiment that are written before the first run, as request sets are; the plan again when blocks
are added."""
FILE_MEASUREMENTS: Final = ("noise.json", "peaks.json")
"""Measurements that were on file when the experiment began; without a digest they were put there later."""
_REMEDY: Final = "restore the file from a copy"
_CHANGING: Final = frozenset({"state", "stopping", "loads", "warnings"})
"""Fields of a manifest that change during an experiment."""
_DERIVED: Final = ("run.json", "result", "server.raw.log", ".")
"""Beginnings of names of files of a run that hold no measurement of their own: the record itself, the summaries
that a report writes, and the server's log with its secrets, which goes before a directory is shared."""
_EVIDENCE: Final = ("server.log", "steps.raw")
"""Prefixes of the names of files that no result depends on once a run has ended."""
_ADDED: Final = "has no digest: it was added after the experiment began, or by an older version; delete it"
_OF_DIGESTS: Final = frozenset({"manifest.json", DIGESTS_FILE, DERIVED_FILE, OWNER_FILE})
"""Files of digests, the manifest, of which ``digests.json`` has one of its lasting fields, and the last owner."""


class DirectoryDigests(Document, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of the manifest, of the other files of the experiment, and of each ``run.json``."""

    benchctl_version: str
    """Version of benchctl that recorded them."""
    manifest_sha256: str
    """SHA-256 of the manifest without the fields that change during an experiment."""
    files: dict[FilePath, FileDigest]
    """Digests by path below the directory, with slashes."""


def digest_of(path: Path, *, within: Path | None = None) -> FileDigest:
    """The digest of a file, to which no link leads from ``within``, by default its folder.

    Raises OSError or OutsideError when it cannot be read.
    """
    with open_file(path, within=within or path.parent) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        status = os.fstat(file.fileno())
    return FileDigest(sha256=digest, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def digests_of_run(directory: RunDirectory) -> dict[str, FileDigest]:
    """Digests of the files of a run by name, without ``run.json``, derived files and earlier attempts."""
    return {
        name: digest_of(directory.path / name, within=directory.root)
        for name in entry_names(directory.path, within=directory.root, files_only=True)
        if not name.startswith(_DERIVED) and is_name(name)
    }


def manifest_sha256(directory: Path) -> str:
    """SHA-256 of the manifest's lasting fields. Raises RecordError when it cannot be read."""
    path = directory / "manifest.json"
    document = document_of(read_document(path, within=directory), path, remedy=_REMEDY)
    # Hashed in place of the manifest's own version
    lasting = {key: value for key, value in document.items() if key not in _CHANGING} | {"schema_version": 1}
    return hashlib.sha256(encode(lasting)).hexdigest()


def directory_sha256(digests: DirectoryDigests) -> str:
    """One digest of the whole directory, to be cited: of those of the manifest and of the files."""
    sums = {name: digest.sha256 for name, digest in digests.files.items()}
    return hashlib.sha256(encode({"manifest": digests.manifest_sha256, "files": sums})).hexdigest()


def read_digests(directory: Path) -> DirectoryDigests | None:
    """``digests.json``, with those of the directories of single blocks; None without one.

    Raises RecordError when one cannot be read.
    """
    digests = _own_digests(directory)
    if digests is None:
        return None
    files = dict(digests.files)
    for block in ResultDirectory(directory).begun_blocks().values():
        of_block = _own_digests(block.path)
        name = block.path.relative_to(directory).as_posix()
        files |= {f"{name}/{file}": digest for file, digest in (of_block.files if of_block else {}).items()}
    return msgspec.structs.replace(digests, files=files)


def _own_digests(directory: Path) -> DirectoryDigests | None:
    """``digests.json`` of one directory alone."""
    path = directory / DIGESTS_FILE
    content = read_if_there(path, within=directory)
    return None if content is None else record_of(content, path, DirectoryDigests, remedy=_REMEDY)


def begin_digests(results: ResultDirectory) -> None:
    """Record the files that exist before the first run, unless that was done."""
    if _own_digests(results.path) is None:
        _write(results, _digests_of(results), {})


def _digests_of(results: ResultDirectory) -> DirectoryDigests:
    """The digests on record, or those of the files that exist before the first run."""
    digests = _own_digests(results.path)
    if digests is not None:
        return digests
    on_file = (name for name in FILE_MEASUREMENTS if is_there(results.path / name, within=results.path))
    names = (*_WHOLE_FILES, *(each.file for each in results.manifest().all_sets), *on_file)
    return DirectoryDigests(
        schema_version=SCHEMA_VERSION,
        benchctl_version=benchctl.__version__,
        manifest_sha256=manifest_sha256(results.path),
        files={name: digest_of(results.path / name, within=results.path) for name in names},
    )


def renew_digests(results: ResultDirectory) -> None:
    """Record plan and manifest anew, after blocks were added to the experiment; digests of other files stay."""
    digests = msgspec.structs.replace(_digests_of(results), manifest_sha256=manifest_sha256(results.path))
    _write(results, digests, {"plan.json": digest_of(results.path / "plan.json", within=results.path)})


def forget_run(results: ResultDirectory, run_id: str) -> None:
    """Drop the digest of a run's record, which changes when the run is repeated."""
    digests, run_file = _own_digests(results.path), f"{results.run_folder(run_id)}/run.json"
    if digests is not None and run_file in digests.files:
        files = {name: digest for name, digest in digests.files.items() if name != run_file}
        _write(results, msgspec.structs.replace(digests, files=files), {})


def record_run(results: ResultDirectory, run_id: str) -> None:
    """Record the digest of a run's record, after the run has ended."""
    name = f"{results.run_folder(run_id)}/run.json"
    _write(results, _digests_of(results), {name: digest_of(results.path / name, within=results.path)})


def _write(results: ResultDirectory, digests: DirectoryDigests, added: dict[str, FileDigest]) -> None:
    digests = msgspec.structs.replace(digests, files=digests.files | added)
    write_json_atomic(results.path / DIGESTS_FILE, digests, within=results.path)


def record_derived(directory: Path, files: Iterable[Path]) -> None:
    """Record the digests of what a report has just written, in place of those of the last one."""
    write_json_atomic(
        directory / DERIVED_FILE,
        {path.relative_to(directory).as_posix(): digest_of(path, within=directory) for path in files},
        within=directory,
    )


def _derived_digests(directory: Path) -> dict[str, FileDigest]:
    """Digests of what the last report wrote; empty without a report, or where they cannot be read."""
    with suppress(RecordError, *DECODING_ERRORS):
        content = read_if_there(directory / DERIVED_FILE, within=directory) or b"{}"
        return msgspec.json.decode(content, type=dict[FilePath, FileDigest])
    return {}


AlterationKind: TypeAlias = Literal["altered-file", "missing-file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One difference between a directory and its digests."""

    kind: AlterationKind = "altered-file"
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


def verify_directory(
    path: Path, read_before: Mapping[str, RunRecord] | None = None, *, is_fresh: bool = False
) -> Verification:
    """Compare a result directory with its digests; with ``is_fresh`` every file is read, once.

    ``read_before`` are records of its runs by their names, which are not read again.
    Raises RecordError when its plan or manifest cannot be read. Runs whose record cannot be read are left out; the
    reader of records reports them.
    """
    results, records, alterations = ResultDirectory(path), dict[str, RunRecord](), list[Alteration]()
    manifest, digests = results.manifest(), None
    runs = results.runs()
    folders = {run.path.name: run.path.relative_to(path).as_posix() for run in runs}
    for run in runs:
        with suppress(InvalidDataError):
            records[run.path.name] = (read_before or {}).get(run.path.name) or run.read()
    try:
        digests = read_digests(path)
        alterations += _altered_manifests(results, digests, records)
    except InvalidDataError as error:
        alterations.append(Alteration(file=DIGESTS_FILE, what=f"cannot be read: {error}"))
    recorded = {} if digests is None else digests.files
    expected = dict(recorded)
    for run_id, record in records.items():
        expected |= {f"{folders[run_id]}/{name}": digest for name, digest in record.files.items()}
    altered, hashed_bytes = _altered_files(path, expected, is_fresh=is_fresh)
    alterations += altered
    if digests is not None:
        added = [name for name in FILE_MEASUREMENTS if name not in recorded and is_there(path / name, within=path)]
        alterations += [Alteration(file=name, what=_ADDED) for name in added]
    uncovered: list[str] = []
    if is_fresh:
        derived = {name: digest for name, digest in _derived_digests(path).items() if name not in expected}
        of_report, num_bytes = _altered_files(path, derived, is_fresh=True)
        hashed_bytes += num_bytes
        # No number depends on what a report wrote, and it may go.
        alterations += [replace(one, decides=False) for one in of_report if one.kind != "missing-file"]
        there = contents_of(path).files
        expected |= {name: digest for name, digest in derived.items() if name in there}
        parents = {"", *(f"{BLOCKS}/{block.path.name}" for block in results.begun_blocks().values())}
        of_digests = {f"{parent}/{name}".lstrip("/") for parent in parents for name in _OF_DIGESTS}
        uncovered = [name for name in there if name not in expected and name not in of_digests]
    return Verification(
        alterations=tuple(alterations),
        manifest=manifest,
        digests=digests,
        unrecorded=tuple(run_id for run_id in records if f"{folders[run_id]}/run.json" not in recorded),
        uncovered=tuple(uncovered),
        num_files=len(expected),
        hashed_bytes=hashed_bytes,
    )


def _altered_files(
    directory: Path, expected: Mapping[str, FileDigest], *, is_fresh: bool
) -> tuple[list[Alteration], int]:
    """Files that are not as ``expected``, and the bytes that were read.

    Without ``is_fresh`` a file with the size and time of its digest is not read.
    """
    altered, hashed_bytes = list[Alteration](), 0
    for name, recorded in expected.items():
        path = directory / name
        kind: AlterationKind = "altered-file"
        try:
            status = stat_file(path, within=directory)
            if not is_fresh and (status.st_size, status.st_mtime_ns) == (recorded.size_bytes, recorded.mtime_ns):
                continue
            digest = digest_of(path, within=directory)
        except FileNotFoundError:
            kind, what = "missing-file", "is missing"
        except OutsideError:
            what = "is a link or no regular file, and was a file when it was recorded"
        except (OSError, RecordError):
            what = "cannot be read"
        else:
            hashed_bytes += digest.size_bytes
            if digest.sha256 == recorded.sha256:
                continue
            what = "has other content than when it was recorded"
            if digest.size_bytes != recorded.size_bytes:
                what = f"has {digest.size_bytes:,} bytes and had {recorded.size_bytes:,} when it was recorded"
        decides = not name.rpartition("/")[2].startswith(_EVIDENCE)
        altered.append(Alteration(kind=kind, file=name, what=what, decides=decides))
    return altered, hashed_bytes


def _altered_manifests(
    results: ResultDirectory, digests: DirectoryDigests | None, records: Mapping[str, RunRecord]
) -> Iterator[Alteration]:
    has_digests = digests is not None or any(record.files for record in records.values())
    for each in (results, *results.begun_blocks().values()):
        own, folder = _own_digests(each.path), each.path.relative_to(results.path)
        if own is not None and manifest_sha256(each.path) != own.manifest_sha256:
            file = (folder / "manifest.json").as_posix()
            yield Alteration(file=file, what="has other fields than when the experiment began")
        elif own is None and has_digests:
            file = (folder / DIGESTS_FILE).as_posix()
            yield Alteration(kind="missing-file", file=file, what="is missing, and runs have digests")
