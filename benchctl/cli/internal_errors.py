"""Mistakes of benchctl itself: two lines for the user, and the traceback in a file for a report of it.

The file is one of a few in the user's state directory; a traceback may quote the command line and values, so it is
readable by its owner alone and secrets are replaced in it. Only the standard library is needed.
"""

import datetime as dt
import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchctl import __version__
from benchctl.untrusted.secrets import redacted
from benchctl.untrusted.text import visible_line

TRACEBACK_VARIABLE: Final = "BENCHCTL_TRACEBACK"
"""Set to anything, the traceback is printed as well."""
_MOST_FILES: Final = 20
_MOST_CHARS: Final = 300
_NAME: Final = re.compile(r"\d{8}T\d{6}-\d+-\w+\.txt")


def internal_error_message(error: BaseException) -> str:
    """Two lines on ``error``, whose traceback is written to a file; where none can be written it follows them."""
    text = _document(error)
    path = _write(text, type(error).__name__)
    command = " ".join(["benchctl", *_command_words(sys.argv[1:])])
    first = f"benchctl: internal error in '{command}' (version {__version__}): {_summary(error)}"
    remedy = "this is a mistake of benchctl; please report it with its traceback"
    if isinstance(error, ImportError):
        again = f"{sys.executable} -m pip install --force-reinstall benchctl"
        remedy = f"the installation is damaged; run '{again}'; the traceback is"
    where = "below" if path is None else f"in {path}"
    quoted = f"\n{text}" if path is None or os.environ.get(TRACEBACK_VARIABLE) else ""
    return f"{first}\n{remedy} {where}{quoted.rstrip()}"


def _summary(error: BaseException) -> str:
    """Type and message of ``error`` on one line."""
    line = visible_line(" ".join(redacted(str(error)).split()), _MOST_CHARS)
    name = type(error).__name__
    return f"{name}: {line}" if line else name


def _command_words(words: Sequence[str]) -> Iterator[str]:
    """The command and its sub-command: the words before the first option, at most two."""
    for word in words[:2]:
        if word.startswith("-"):
            return
        yield redacted(word)[:_MOST_CHARS]


def _document(error: BaseException) -> str:
    """The content of the file."""
    return (
        f"benchctl {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{dt.datetime.now(dt.UTC).isoformat(timespec='seconds')}\n"
        f"{' '.join(_without_secret_options(sys.argv))}\n\n"
        f"{redacted(''.join(traceback.format_exception(error)))}"
    )


def _without_secret_options(words: Sequence[str]) -> Sequence[str]:
    try:
        from benchctl.measure.redaction import redacted_argv
    except ImportError:  # a damaged installation: which command it was says enough
        return [words[0], *_command_words(words[1:]), "…"]
    return redacted_argv(words)


def _write(text: str, kind: str) -> Path | None:
    """Write the file into the first directory that takes it; None where none does."""
    now = dt.datetime.now(dt.UTC)
    name = f"{now:%Y%m%dT%H%M%S}-{os.getpid()}-{kind}.txt"
    for directory in _directories():
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            handle = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            _remove_oldest(directory)
            return directory / name
    return None


def _directories() -> Iterator[Path]:
    state = os.environ.get("XDG_STATE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
        yield root / "benchctl" / "errors"
    with suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"benchctl-errors-{os.getuid()}"


def _remove_oldest(directory: Path) -> None:
    names = sorted(path.name for path in directory.iterdir() if _NAME.fullmatch(path.name))
    for name in names[:-_MOST_FILES]:
        (directory / name).unlink(missing_ok=True)
