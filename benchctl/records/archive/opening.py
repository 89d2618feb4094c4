"""Archives opened as result directories: unpacked once into the user's cache, found again by their content.

    <cache>/<sha256>/complete.json   name and size; the time of this file is that of the last use
    <cache>/<sha256>/<name>/         the result directory

A folder gets its name when it is complete, so that two processes that open one archive at a time both succeed. What
readers write beside the logs, such as stamps of verifications, stays in the cache.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Final

import msgspec
import platformdirs

from benchctl.errors import RecordError, UsageError
from benchctl.records.archive.compression import compression_of_content, suffix_of
from benchctl.records.archive.unpacking import refuse, unpack
from benchctl.records.files import is_name
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.files import open_file, read_file
from benchctl.untrusted.limits import ARCHIVE_BYTES

_VARIABLE: Final = "BENCHCTL_ARCHIVES_DIR"
_MARKER: Final = "complete.json"
_PARTIAL: Final = ".partial"
_DAY_S: Final = 86_400.0
_KEPT_S: Final = 30 * _DAY_S
_KEPT_BYTES: Final = 20 << 30
"""Archives that were opened within a day stay beyond this size."""
_PARTS: Final = ("manifest.json", "plan.json", "runs")
"""Any of these tells a result directory, whole or not."""


class _Opened(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int


def is_archive(path: Path) -> bool:
    """True for a regular file that is an archive by its name or its first bytes."""
    try:
        return path.is_file() and (suffix_of(path) is not None or compression_of_content(path) is not None)
    except (OSError, ValueError):
        return False


def opened_directory(path: Path) -> Path:
    """The directory ``path`` itself, or that of the archive ``path`` in the cache.

    Raises RecordError for a damaged archive, UsageError for one of something else, and where it cannot be unpacked.
    """
    if not is_archive(path):
        return path
    status = path.stat()
    return _opened_once(path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)


def require_directory(path: Path, purpose: str) -> None:
    """Raise UsageError for an archive, whose files stay as they are, where ``purpose`` would write."""
    if is_archive(path):
        raise UsageError(
            f"{path} is an archive, and {purpose}; make a directory of it with 'benchctl import archive "
            f"{path}', and name that"
        )


def derived_directory(path: Path, name: str) -> Path | None:
    """The folder beside the archive ``path`` for what is derived from it, such as ``x-report``; None for a
    directory, which takes it itself.
    """
    return path.with_name(f"{_stem(path)}-{name}") if is_archive(path) else None


def unpack_results(archive: Path, folder: Path) -> Path:
    """Unpack an archive into the new folder ``folder``; returns the result directory in it, ``folder`` or below."""
    with open_file(archive.resolve(), within=archive.resolve().parent, max_bytes=ARCHIVE_BYTES) as file:
        unpack(archive, file, folder)
    return _result_directory(archive, folder)


def archives_directory() -> Path:
    """The cache of opened archives."""
    named = os.environ.get(_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_cache_path("benchctl") / "archives"


@lru_cache(maxsize=16)
def _opened_once(archive: Path, _inode: int, _size_bytes: int, _mtime_ns: int) -> Path:
    with open_file(archive, within=archive.parent, max_bytes=ARCHIVE_BYTES) as file:
        cache = archives_directory()
        entry = cache / hashlib.file_digest(file, "sha256").hexdigest()
        if (opened := _complete(entry)) is not None:
            return opened
        file.seek(0)
        with _writing_into(cache):
            _unpack_into(entry, archive, file)
            _prune(cache)
    opened = _complete(entry)
    if opened is None:
        raise UsageError(f"{entry} disappeared while the archive was opened; open it again")
    return opened


def _complete(entry: Path) -> Path | None:
    """The directory of an opened archive, whose use is noted; None where it is not there."""
    marker = entry / _MARKER
    with suppress(OSError, RecordError, *DECODING_ERRORS):
        opened = msgspec.json.decode(read_file(marker, within=entry), type=_Opened)
        if is_name(opened.name) and (entry / opened.name).is_dir():
            with suppress(OSError):
                os.utime(marker)
            return entry / opened.name
    return None


def _unpack_into(entry: Path, archive: Path, file: IO[bytes]) -> None:
    cache = entry.parent
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(
        prefix=f".{entry.name[:12]}-", suffix=_PARTIAL, dir=cache, ignore_cleanup_errors=True
    ) as made:
        content, whole = Path(made) / "content", Path(made) / "whole"
        content.mkdir()
        whole.mkdir()
        unpack(archive, file, content)
        results = _result_directory(archive, content)
        name = _stem(archive) if results == content else results.name
        results.rename(whole / name)
        size_bytes = sum(path.stat().st_size for path in whole.rglob("*"))
        (whole / _MARKER).write_bytes(msgspec.json.encode(_Opened(name, size_bytes)))
        _give_name(whole, entry)


def _give_name(whole: Path, entry: Path) -> None:
    """Give a complete folder its name, unless another process was faster; one that is not complete goes."""
    if _complete(entry) is not None:
        return
    try:
        whole.rename(entry)
    except OSError:
        if _complete(entry) is None:
            _remove(entry)
            whole.rename(entry)


def _result_directory(archive: Path, folder: Path) -> Path:
    """The one result directory that was unpacked: ``folder`` itself or a folder in it."""
    if _is_result(folder):
        return folder
    present = sorted(path for path in folder.iterdir() if _is_result(path))
    if not present:
        raise UsageError(f"{archive} is not an archive of a result directory: it holds no manifest.json")
    if len(present) > 1:
        names = ", ".join(path.name for path in present[:3])
        raise UsageError(f"{archive} holds {len(present)} result directories ({names}); unpack it, and name one")
    if present[0].name == _MARKER:
        refuse(archive, f"holds a directory called {_MARKER}")
    return present[0]


def _is_result(folder: Path) -> bool:
    return folder.is_dir() and any((folder / part).exists() for part in _PARTS)


def _stem(path: Path) -> str:
    name = path.name.removesuffix(path.name[-len(suffix) :]) if (suffix := suffix_of(path)) else path.name
    return name.lstrip(".") if is_name(name.lstrip(".")) and name != _MARKER else "results"


@contextmanager
def _writing_into(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{cache}: the archive cannot be unpacked there ({error.strerror or error}); name another directory in "
            f"{_VARIABLE}, or free some space"
        ) from error


def _prune(cache: Path) -> None:
    """Remove archives that were not opened for a month, the oldest beyond some size, and what a crash left."""
    now_s, total_bytes = time.time(), 0
    entries = sorted(((_used_s(path), path) for path in cache.iterdir() if path.is_dir()), reverse=True)
    for used_s, path in entries:
        is_recent = now_s - used_s < _DAY_S
        if not path.name.endswith(_PARTIAL):
            total_bytes += _size_bytes(path)
            is_recent = is_recent or (now_s - used_s < _KEPT_S and total_bytes <= _KEPT_BYTES)
        if not is_recent:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder under another name, so that nobody finds it while it is going."""
    going = path if path.name.endswith(_PARTIAL) else path.with_name(f".{path.name[:12]}-{os.getpid()}{_PARTIAL}")
    with suppress(OSError):
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _used_s(path: Path) -> float:
    """Wall time of the last use of an opened archive, or of the last change of another folder."""
    for held in (path / _MARKER, path):
        with suppress(OSError):
            return held.stat().st_mtime
    return 0.0


def _size_bytes(path: Path) -> int:
    with suppress(OSError, RecordError, *DECODING_ERRORS):
        return msgspec.json.decode(read_file(path / _MARKER, within=path), type=_Opened).size_bytes
    return 0
