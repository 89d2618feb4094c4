"""Files inside a result directory: opened without leaving it, with errors that name the file and a remedy.

Every path below a result directory goes through here or through ``untrusted``: a directory may come from a
stranger, and no name or link in it leads to a file elsewhere.
"""

import re
from io import BufferedReader
from pathlib import Path
from typing import Final

from benchctl.errors import RecordError
from benchctl.system_errors import OWN_LIMITS, system_failure
from benchctl.untrusted.files import open_file, read_file
from benchctl.untrusted.limits import DOCUMENT_BYTES

_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""All that ``run_directory_name`` makes: one plain component of a path, on any system."""
_LONGEST_NAME_BYTES: Final = 255


def read_document(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a document. Raises RecordError when it is missing or cannot be read."""
    try:
        return read_file(path, within=within, max_bytes=max_bytes)
    except FileNotFoundError as error:
        raise RecordError(f"{path} is missing: the result directory is incomplete; copy it again whole") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def read_if_there(path: Path, *, within: Path) -> bytes | None:
    """The content of a document; None without one. Raises RecordError when it cannot be read."""
    try:
        return read_file(path, within=within)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def open_log(path: Path, *, within: Path) -> BufferedReader | None:
    """Open a JSON Lines file; None without one. Raises RecordError when it cannot be opened."""
    try:
        return open_file(path, within=within)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def check_run_id(run_id: str, path: Path, entry: str) -> None:
    """Raise RecordError naming ``entry`` of the file ``path`` unless ``run_id`` can name a run's directory."""
    if not _RUN_ID.fullmatch(run_id):
        raise RecordError(
            f"{path}: {entry} is {run_id[:80]!r}, which names no run: up to 255 letters, digits, '.', '_' and "
            "'-' do, beginning with a letter or digit; restore the file from a copy"
        )


def check_name(name: str, path: Path, entry: str) -> None:
    """Raise RecordError naming ``entry`` of the file ``path`` unless ``name`` is one component of a path."""
    if not is_name(name):
        raise RecordError(
            f"{path}: {entry} is {name[:80]!r}, which names no file of the directory; restore the file from a copy"
        )


def is_name(name: str) -> bool:
    """True if ``name`` is one component of a path on any system."""
    is_plain = name not in {"", ".", ".."} and not any(character in name for character in "/\\\0")
    return is_plain and len(name.encode(errors="surrogatepass")) <= _LONGEST_NAME_BYTES


def _unreadable(path: Path, error: OSError) -> Exception:
    """The error for a file that cannot be read: that of the system where a limit of this process refuses it."""
    failure = system_failure(error)
    if failure is not None and failure.cause in OWN_LIMITS:
        return OSError(error.errno, error.strerror, str(path))
    return RecordError(
        f"{path} cannot be read: {error.strerror}; correct its permissions, or copy the directory again"
    )
