"""Standard streams that never end a command, and that show control characters instead of sending them.

A command runs to its end and its exit code whatever happens to them: a closed stream, a reader that leaves
(``| head``), a lost terminal, an encoding without the characters of our tables. Text may come from servers and
files of strangers: only libraries that draw (rich, tqdm) write control sequences, and only those that they need.
"""

import errno
import io
import os
import re
import shutil
import sys
from typing import Any, Final, TextIO

from benchctl.untrusted.text import escaped, visible_line

_STDERR_FD = 2
_NOBODY_READS = frozenset({errno.EPIPE, errno.EIO})
"""Errors of writing when the reader of a pipe has left, or the terminal was closed."""
_DRAWING: Final = re.compile(r"(\x1b\[(?:[0-9;]*[mA]|2K|\?25[lh])|\r)")
"""What libraries that draw send to a terminal: colours, one line up, the return of a bar, a line erased, and the
cursor hidden or shown."""
_HELP_WIDTH: Final = "TERMINAL_WIDTH"
"""The variable that typer reads."""
_LEAST_HELP: Final = 40


class _Outlet(io.FileIO):
    """A stream that drops output without a reader; stderr drops all that it cannot write, as nobody can be told."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in _NOBODY_READS and self.fileno() != _STDERR_FD:
                raise
            return memoryview(content).nbytes


class _Shown(io.TextIOWrapper):
    """A standard stream on which control characters, but tab and line feed, are shown as escapes."""

    def __init__(self, number: int, encoding: str, *, line_buffering: bool) -> None:
        outlet = io.BufferedWriter(_Outlet(number, "wb", closefd=False))
        super().__init__(outlet, encoding=encoding, errors="backslashreplace", line_buffering=line_buffering)
        self.rich_proxied_file = _Drawn(self)

    def write(self, text: str, /) -> int:
        super().write(escaped(text))
        return len(text)

    def write_drawn(self, text: str) -> int:
        """Write what a library draws, whose own control sequences stay."""
        super().write("".join(part if i % 2 else escaped(part) for i, part in enumerate(_DRAWING.split(text))))
        return len(text)


class _Drawn:
    """The same stream for libraries that draw. Rich looks for it under the name ``rich_proxied_file``."""

    def __init__(self, stream: _Shown) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write_drawn(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady_streams() -> None:
    """Make the standard streams of this process steady."""
    _open_closed()
    sys.stdout = _steady(sys.stdout, 1)
    sys.stderr = _steady(sys.stderr, 2)


def widen_help() -> None:
    """Let typer print help no narrower than can be read, and ignore a width that is not a number."""
    if shutil.get_terminal_size().columns < _LEAST_HELP:
        os.environ[_HELP_WIDTH] = str(_LEAST_HELP)
    elif not os.environ.get(_HELP_WIDTH, "1").isdecimal():
        del os.environ[_HELP_WIDTH]


def drawing(stream: TextIO) -> TextIO:
    """The stream for bars of tqdm; what they are labelled with passes ``visible_line`` first."""
    drawn: TextIO = getattr(stream, "rich_proxied_file", stream)
    return drawn


def log_line(line: str) -> str:
    """A line of a server's log below a message of ours."""
    return f"  | {visible_line(line)}"


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
    encoding = stream.encoding if stream is not None else "utf-8"
    return _Shown(number, encoding, line_buffering=number == _STDERR_FD or os.isatty(number))
