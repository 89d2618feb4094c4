"""A result directory as one file, ``x.tar.gz``: written the same way each time, and unpacked within bounds.

Where archives come from elsewhere, this is where their directories lie here.
"""

import gzip
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Final, cast

from benchctl.errors import RecordError, UsageError
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import is_name
from benchctl.records.record import Manifest
from benchctl.untrusted import (
    ARCHIVE_BYTES,
    ARCHIVE_DEPTH,
    ARCHIVE_ENTRIES,
    ARCHIVE_HEADER_BYTES,
    ARCHIVE_RATIO,
    ARCHIVE_RATIO_FREE_BYTES,
    VALUE_CHARS,
)
from benchctl.untrusted.files import open_file
from benchctl.untrusted.text import visible_line

LEFT_OUT: Final = (
    ".*",  # files that are being written
    "*.partial",
    "*.tmp",
    "server.raw.log",  # with secrets
    "*.safetensors",  # copies of long logs that older versions made
    "*.pkl",  # of a job array: opening one runs what it says
    "*.tar",
    "*.tar.gz",
    "*.tgz",
    "*.tar.zst",
)
"""Patterns of names of files and folders that stay where they are."""
_SUFFIXES: Final = (".tar.gz", ".tgz")
_AHEAD_BYTES: Final = 1 << 18
"""Piece in which ``tarfile`` reads a stream."""
_DAMAGE: Final = (
    tarfile.TarError,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    ValueError,
    FileExistsError,  # an entry below a file, or a folder in its place
    NotADirectoryError,
    IsADirectoryError,
)


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a directory that travel, and entries that cannot, which are neither files nor folders."""

    files: tuple[str, ...]
    """Paths below the directory with slashes, sorted."""
    size_bytes: int
    irregular: tuple[str, ...]


def is_archive(path: Path) -> bool:
    """True for the name of an archive."""
    return path.name.lower().endswith(_SUFFIXES)


def contents_of(directory: Path) -> Contents:
    """The files of a result directory that travel. Raises RecordError where there are too many."""
    files, irregular, size_bytes = list[str](), list[str](), 0
    for folder, folders, names in os.walk(directory):
        above = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if not _stays(name)]
        for path in (above / name for name in (*folders, *names) if not _stays(name)):
            status = os.lstat(directory / path)
            if stat.S_ISREG(status.st_mode) and all(map(_is_safe, path.parts)):
                files.append(path.as_posix())
                size_bytes += status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                irregular.append(path.as_posix())
        if len(files) + len(irregular) > ARCHIVE_ENTRIES:
            raise RecordError(
                f"{directory} has more than {ARCHIVE_ENTRIES:,} files, which no result directory has; remove what "
                "is not of the experiment"
            )
    return Contents(tuple(sorted(files)), size_bytes, tuple(sorted(irregular)))


def _stays(name: str) -> bool:
    """True for the name of a file or folder that is left where it is."""
    return any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def _is_safe(part: str) -> bool:
    """True for one component of a path that is unpacked everywhere."""
    return is_name(part) and part.isprintable()


def write_archive(
    results: ResultDirectory,
    contents: Contents,
    output: Path,
    on_bytes: Callable[[int], object] = lambda _num: None,
) -> None:
    """Write ``contents`` of a directory into one archive, below a folder with the name of the directory.

    A name of its folder that could not be unpacked everywhere is replaced by ``results``. Names are sorted; there
    are no users, no times, and one mode for all files: these differ between copies of a directory, and no reader
    needs them. ``on_bytes`` is told of each file that was read. Raises UsageError where ``output`` cannot be
    written, or a file is cut while it is read.
    """
    if not is_archive(output):
        raise UsageError(f"--archive {output}: the name of an archive ends in {' or '.join(_SUFFIXES)}")
    name, partial = results.path.resolve().name, output.with_name(f".{output.name}.{os.getpid()}.partial")
    info = tarfile.TarInfo()
    info.mode = 0o644
    try:
        with (
            partial.open("xb") as file,
            gzip.GzipFile("", "wb", 6, file, mtime=0) as stream,
            tarfile.open(fileobj=cast("IO[bytes]", stream), mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for member in contents.files:
                with open_file(results.path / member, within=results.path) as source:
                    info.name = f"{name if _is_safe(name) else 'results'}/{member}"
                    info.size = os.fstat(source.fileno()).st_size  # a log may grow meanwhile
                    archive.addfile(info, source)
                    on_bytes(info.size)
        partial.replace(output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}; choose another file") from error
    finally:
        partial.unlink(missing_ok=True)


def unpack_results(archive: Path, folder: Path) -> Path:
    """Unpack an archive into the new folder ``folder``; returns the result directory in it, ``folder`` or below.

    Raises UsageError for a file that is not an archive of results, RecordError for one that is damaged, cut short,
    too large or holds what no result directory does; OSError as writing does.
    """
    path = archive.resolve()
    with open_file(path, within=path.parent, max_bytes=ARCHIVE_BYTES) as file:
        most_bytes = min(ARCHIVE_BYTES, max(ARCHIVE_RATIO_FREE_BYTES, ARCHIVE_RATIO * path.stat().st_size))
        try:
            _unpack(_Granted(cast("IO[bytes]", gzip.GzipFile("", "rb", fileobj=file))), folder, most_bytes)
        except _DAMAGE as error:
            problem = "was cut short" if isinstance(error, EOFError) else f"is damaged: {error}"
            raise RecordError(f"{archive} {problem}; copy or export it again") from error
    folders = [folder] if (folder / "manifest.json").exists() else sorted(folder.iterdir())
    results = [each for each in folders if (each / "manifest.json").exists()]
    if not results:
        raise UsageError(f"{archive} is not an archive of a result directory: it holds no manifest.json")
    if len(results) > 1:
        names = ", ".join(path.name for path in results[:3])
        raise UsageError(f"{archive} holds {len(results)} result directories ({names}); unpack it, and name one")
    return results[0]


class _Granted:
    """The bytes of an archive as ``tarfile`` asks for them, no more than were granted."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left_bytes = ARCHIVE_HEADER_BYTES + _AHEAD_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.left_bytes -= len(data)
        if self.left_bytes < 0:
            raise tarfile.ReadError(f"a header has more than {ARCHIVE_HEADER_BYTES:,} bytes")
        return data


def _unpack(source: _Granted, folder: Path, most_bytes: int) -> None:
    """Raises one of ``_DAMAGE`` for what no archive of results holds."""
    names, size_bytes = set[tuple[str, ...]](), 0
    with tarfile.open(
        fileobj=cast("IO[bytes]", source), mode="r|", bufsize=_AHEAD_BYTES, errors="strict"
    ) as members:
        while (member := members.next()) is not None:
            parts = _parts_of(member)
            if parts in names and not member.isdir():
                raise ValueError(f"it holds {member.name!r} twice")
            names.add(parts)
            size_bytes += member.size
            if len(names) > ARCHIVE_ENTRIES:
                raise ValueError(f"it holds more than {ARCHIVE_ENTRIES:,} entries, and no result directory does")
            if size_bytes > most_bytes:
                raise ValueError(f"it unpacks to {size_bytes:,} bytes or more; at most {most_bytes:,} are taken")
            source.left_bytes = member.size + ARCHIVE_HEADER_BYTES + _AHEAD_BYTES
            if not any(map(_stays, parts)):
                _unpack_member(members, member, folder.joinpath(*parts))
    while source.read(_AHEAD_BYTES):  # to the checksum behind it
        pass


def _unpack_member(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """The folder or file at ``path``. ``extract`` with a filter would need Python 3.11.4."""
    (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
    if (content := members.extractfile(member)) is not None:
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)


def _parts_of(member: tarfile.TarInfo) -> tuple[str, ...]:
    """The path of a file or folder of an archive. Raises ValueError for any other entry."""
    label = visible_line(member.name, VALUE_CHARS)
    if not (member.isdir() or member.isreg()) or member.issparse() or member.size < 0:
        raise ValueError(f"{label!r} is a link or no regular file")
    parts = tuple(part for part in member.name.removesuffix("/").split("/") if part != ".")
    if member.name.startswith("/") or len(parts) > ARCHIVE_DEPTH or not all(map(_is_safe, parts)):
        raise ValueError(f"{label!r} is not a path inside of it")
    return parts


def default_destination(manifest: Manifest, name: str, root: Path) -> Path:
    """The directory of an experiment as ``benchctl run`` would choose it: ``<root>/<profile>/<name>``.

    Where ``name`` names no directory, such as ``latest``, it is made of time and profile. Raises RecordError for a
    manifest whose profile names none.
    """
    chosen = name if _names_a_directory(name) and name != "latest" else manifest.directory_name
    for part in (manifest.profile, chosen):
        if not _names_a_directory(part):
            raise RecordError(f"the manifest has {part[:60]!r}, which names no directory here; name DEST yourself")
    return root / manifest.profile / chosen


def import_archive(archive: Path, output: Path | None, root: Path) -> Path:
    """Make a directory of an archive, ``output`` or one below ``root``; returns it.

    Raises UsageError for a file that is not an archive of results, and where the destination is taken, RecordError
    for a damaged archive.
    """
    if not is_archive(archive) or archive.is_dir():
        problem = "is a directory already" if archive.is_dir() else "is not called as an archive is, x.tar.gz"
        raise UsageError(f"{archive} {problem}; name a file that 'benchctl export DIR --archive FILE' wrote")
    made_in = output.absolute().parent if output is not None else root
    made_in.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=made_in) as made:
        content = Path(made) / "content"
        content.mkdir()
        unpacked = unpack_results(archive, content)
        name = archive.name.partition(".")[0] if unpacked == content else unpacked.name
        destination = output or default_destination(ResultDirectory(unpacked).manifest(), name, root)
        if destination.exists() and not (destination.is_dir() and _is_new(destination)):
            raise UsageError(f"{destination} is there already; name another directory with --output")
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            destination.rmdir()
        shutil.move(unpacked, destination)
    return destination


def _names_a_directory(name: str) -> bool:
    return is_name(name) and name.isprintable() and name[0] not in ".-~"


def _is_new(destination: Path) -> bool:
    """True for a directory without any entry that can be seen."""
    return not any(not name.startswith(".") for name in os.listdir(destination))  # noqa: PTH208 - names alone
