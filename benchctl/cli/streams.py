"""Standard streams that never end a command.

A command runs to its end and its exit code whatever happens to them: a closed stream, a reader that leaves
(``| head``), a lost terminal, an encoding without the characters of our tables.
"""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR_FD = 2
_NOBODY_READS = frozenset({errno.EPIPE, errno.EIO})
"""Errors of writing when the reader of a pipe has left, or the terminal was closed."""


class _Outlet(io.FileIO):
    """A stream that drops output without a reader."""

    def write(self, content: "ReadableBuffer", /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            return memoryview(content).nbytes


def steady_streams() -> None:
    """Make the standard streams of this process steady."""
    _open_closed()
    sys.stdout = _steady(sys.stdout, 1)
    sys.stderr = _steady(sys.stderr, 2)


def log_line(line: str) -> str:
    """A line of a server's log below a message of ours."""
    return f"  | {line}"


def drop_output() -> None:
    """Flush the standard streams; drop what cannot be written, so that the interpreter does not try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed() -> None:
    """Put the null device where a standard stream was closed: the next file opened would take its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR_FD:
        os.set_inheritable(number, True)
    os.close(number)


def _steady(stream: TextIO | None, number: int) -> TextIO:
    """``stream`` on an outlet; it is None when it was closed."""
    strict = "backslashreplace" if number == _STDERR_FD else "replace"
    errors = stream.errors if stream is not None else None
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(number, "wb", closefd=False)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors=strict if errors in {None, "strict"} else errors,
        line_buffering=number == _STDERR_FD or os.isatty(number),
    )
