"""Digests of a result directory, by which later readers recognise altered files."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

import benchctl
from benchctl.errors import RecordError
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.files import (
    check_name,
    check_run_id,
    document_bytes,
    document_of,
    encode,
    is_name,
    read_document,
    read_if_there,
    record_of,
    write_bytes_atomic,
    write_json_atomic,
)
from benchctl.records.record import FileDigest
from benchctl.records.schema import SCHEMA_VERSION, Count, Record
from benchctl.untrusted.files import Fence, entry_names, is_there, make_folder, open_file
from benchctl.untrusted.text import visible_value

FOLDER: Final = "digests"
_NAME: Final = re.compile(r"b(\d{1,9})-(\d{1,9})\.json")
_BLOCK_DIGESTS_REMEDY: Final = "restore the file from a copy"


class BlockDigests(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of the records of one block's runs, as the owner of one claim of it found and left them."""

    schema_version: int
    """Version of the result format."""
    block: Count
    """The block, from 0."""
    generation: Count
    """The claim whose owner wrote them, from 1."""
    runs: tuple[str, ...]
    """All runs of the block."""
    files: dict[str, FileDigest] = {}
    """Digests of the records of those that have ended, by path below the directory, with slashes."""


def write_block_digests(directory: Path, digests: BlockDigests, fence: Fence | None = None) -> None:
    """Replace the file of one claim; ``fence`` is called before it appears, and may refuse."""
    folder = directory / FOLDER
    make_folder(folder, within=directory)
    path = folder / f"b{digests.block:03d}-{digests.generation}.json"
    write_json_atomic(path, digests, within=directory, fence=fence)


def newest_block_digests(directory: Path, only: int | None = None) -> Mapping[int, BlockDigests]:
    """The digests of the newest claim of each block that has some, or of the block ``only``, by block.

    Empty for an ordinary directory. Raises RecordError when they cannot be read.
    """
    newest: dict[int, tuple[int, str]] = {}
    for name in _names(directory):
        if match := _NAME.fullmatch(name):
            block, generation = int(match[1]), int(match[2])
            if only is None or only == block:
                newest[block] = max(newest.get(block, (0, "")), (generation, name))
    return {block: _read(directory, block, *newest[block]) for block in sorted(newest)}


def _names(directory: Path) -> list[str]:
    try:
        return entry_names(directory / FOLDER, within=directory)
    except FileNotFoundError:
        return []


def _read(directory: Path, block: int, generation: int, name: str) -> BlockDigests:
    path = directory / FOLDER / name
    digests = record_of(read_document(path, within=directory), path, BlockDigests, remedy=_BLOCK_DIGESTS_REMEDY)
    if (digests.block, digests.generation) != (block, generation):
        raise RecordError(
            f"{path}: is of block {visible_value(digests.block)}, generation "
            f"{visible_value(digests.generation)}; {_REMEDY}"
        )
    for number, run_id in enumerate(digests.runs):
        check_run_id(run_id, path, f"runs[{number}]")
    for file in digests.files:
        for part in file.split("/"):
            check_name(part, path, f"the file {file[:80]!r}")
    return digests


DIGESTS_FILE: Final = "digests.json"
WHOLE_FILES: Final = ("profile.yaml", "plan.json", "requests.jsonl")
"""Files of the experiment that are written before the first run; the plan again when blocks are added."""
FILE_MEASUREMENTS: Final = ("noise.json", "peaks.json")
"""Measurements that were on file when the experiment began; without a digest they were put there later."""
DERIVED_FILE: Final = "derived.json"
"""Digests of what the last report wrote. No number is taken from these files."""
_REMEDY: Final = "restore the file from a copy"
_CHANGING: Final = frozenset({"state", "stopping", "warnings"})
"""Fields of a manifest that change during an experiment."""
_FIRST_SCHEMA: Final = {"schema_version": 1}
"""Hashed in place of the manifest's own version, which changes when a newer benchctl resumes the experiment."""
_DERIVED: Final = frozenset({"run.json", "result.json", "server.raw.log"})
"""Files of a run that hold no measurement of their own: the record itself, the summary that a report writes, and
the server's log with its secrets, which goes before a directory is shared."""


class DirectoryDigests(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of the manifest, of the other files of the experiment, and of each ``run.json``."""

    schema_version: int
    """Version of the result format."""
    benchctl_version: str
    """Version of benchctl that recorded them."""
    manifest_sha256: str
    """SHA-256 of the manifest without the fields that change during an experiment."""
    files: dict[str, FileDigest]
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
        if name not in _DERIVED and not name.startswith(".") and is_name(name)
    }


def run_record_path(run_id: str) -> str:
    """Path of a run's record below the result directory."""
    return f"runs/{run_id}/run.json"


def read_digests(directory: Path) -> DirectoryDigests | None:
    """``digests.json``, with what the owners of single blocks recorded since; None without one.

    Raises RecordError when it cannot be read.
    """
    digests = digests_as_written(directory)
    if digests is None or not (of_blocks := newest_block_digests(directory)):
        return digests
    return _with_blocks(digests, of_blocks.values())


def files_of_block(directory: Path, block: int, run_ids: Iterable[str]) -> dict[str, FileDigest]:
    """Digests of the records of one block's runs, by path below the directory, as ``read_digests`` has them."""
    digests = digests_as_written(directory)
    if digests is None:
        return {}
    files = _with_blocks(digests, newest_block_digests(directory, block).values()).files
    return {name: files[name] for name in map(run_record_path, run_ids) if name in files}


def digests_as_written(directory: Path) -> DirectoryDigests | None:
    """``digests.json`` alone; None without one. Raises RecordError when it cannot be read."""
    path = directory / DIGESTS_FILE
    content = read_if_there(path, within=directory)
    if content is None:
        return None
    digests = record_of(content, path, DirectoryDigests, remedy=_REMEDY)
    for file in digests.files:
        for part in file.split("/"):
            check_name(part, path, f"the file {file[:80]!r}")
    return digests


def _with_blocks(digests: DirectoryDigests, of_blocks: Collection[BlockDigests]) -> DirectoryDigests:
    """``digests`` with those of blocks in place of what they say of the runs of these blocks."""
    theirs = {run_record_path(run_id) for block in of_blocks for run_id in block.runs}
    files = {name: digest for name, digest in digests.files.items() if name not in theirs}
    for block in of_blocks:
        files |= block.files
    return msgspec.structs.replace(digests, files=files)


def manifest_sha256(directory: Path) -> str:
    """SHA-256 of the manifest's lasting fields. Raises RecordError when it cannot be read."""
    path = directory / "manifest.json"
    document = document_of(read_document(path, within=directory), path, remedy=_REMEDY)
    lasting = {key: value for key, value in document.items() if key not in _CHANGING} | _FIRST_SCHEMA
    return hashlib.sha256(encode(lasting)).hexdigest()


def begin_digests(results: ResultDirectory) -> None:
    """Record the files that exist before the first run, unless that was done."""
    if read_digests(results.path) is None:
        _write(results, _new_digests(results))


def _new_digests(results: ResultDirectory) -> DirectoryDigests:
    return DirectoryDigests(
        schema_version=SCHEMA_VERSION,
        benchctl_version=benchctl.__version__,
        manifest_sha256=manifest_sha256(results.path),
        files={
            name: digest_of(results.path / name, within=results.path)
            for name in (*WHOLE_FILES, *FILE_MEASUREMENTS)
            if name in WHOLE_FILES or is_there(results.path / name, within=results.path)
        },
    )


def renew_digests(results: ResultDirectory) -> None:
    """Record plan and manifest anew, after blocks were added to the experiment; digests of other files stay."""
    digests = read_digests(results.path) or _new_digests(results)
    files = digests.files | {"plan.json": digest_of(results.path / "plan.json", within=results.path)}
    sha256 = manifest_sha256(results.path)
    _write(results, msgspec.structs.replace(digests, manifest_sha256=sha256, files=files))


def forget_run(results: ResultDirectory, run_id: str) -> None:
    """Drop the digest of a run's record, which changes when the run is repeated."""
    digests, run_file = read_digests(results.path), run_record_path(run_id)
    if digests is not None and run_file in digests.files:
        files = {name: digest for name, digest in digests.files.items() if name != run_file}
        _write(results, msgspec.structs.replace(digests, files=files))


def record_run(results: ResultDirectory, run_id: str) -> None:
    """Record the digest of a run's record, after the run has ended."""
    record_file(results, run_record_path(run_id))


def record_file(results: ResultDirectory, name: str) -> None:
    """Record the digest of a file of the experiment, as it is now."""
    digests = read_digests(results.path) or _new_digests(results)
    files = digests.files | {name: digest_of(results.path / name, within=results.path)}
    _write(results, msgspec.structs.replace(digests, files=files))


def record_derived(directory: Path, files: Iterable[Path]) -> None:
    """Record the digests of what a report has just written, in place of those of the last one."""
    write_json_atomic(
        directory / DERIVED_FILE,
        {path.relative_to(directory).as_posix(): digest_of(path, within=directory) for path in files},
        within=directory,
    )


def assemble_digests(results: ResultDirectory) -> None:
    """Write into ``digests.json`` what the owners of blocks recorded; others may do the same at the same time."""
    digests = read_digests(results.path) or _new_digests(results)
    content = document_bytes(digests)
    if content != read_if_there(results.path / DIGESTS_FILE, within=results.path):
        write_bytes_atomic(results.path / DIGESTS_FILE, content, within=results.path, has_rivals=True)


def _write(results: ResultDirectory, digests: DirectoryDigests) -> None:
    write_json_atomic(results.path / DIGESTS_FILE, digests, within=results.path)


def directory_sha256(digests: DirectoryDigests) -> str:
    """One digest of the whole directory, to be cited: of those of the manifest and of the files."""
    sums = {name: digest.sha256 for name, digest in digests.files.items()}
    return hashlib.sha256(encode({"manifest": digests.manifest_sha256, "files": sums})).hexdigest()
