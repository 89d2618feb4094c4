"""The end of a command: its exit code, a message on an error, what is kept after an interrupt, and standard streams
that never end a command themselves.
"""

import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any, Final, TextIO

from benchctl import __version__
from benchctl.errors import (
    INTERRUPTED_CODE,
    KEPT,
    BenchctlError,
    UsageError,
    as_run_error,
    as_usage_error,
    is_of_the_system,
)
from benchctl.units import folded
from benchctl.untrusted.text import escaped, visible_line, visible_lines

_STDERR_FD = 2
_NOBODY_READS = frozenset({errno.EPIPE, errno.EIO})
"""Errors of writing when the reader of a pipe has left, or the terminal was closed."""
_DRAWING: Final = re.compile(r"(\x1b\[(?:[0-9;]*[mA]|2K|\?25[lh])|\r)")
"""What libraries that draw send to a terminal: colours, one line up, the return of a bar, a line erased, and the
cursor hidden or shown."""
_LEAST_WIDTH: Final = 40
"""A narrower terminal breaks lines by itself."""
_PIPE_WIDTH: Final = 120
_INTERNAL_ERROR: Final = 70
TRACEBACK_VARIABLE: Final = "BENCHCTL_TRACEBACK"
"""Set to anything, the traceback of a mistake of benchctl is printed."""
_COMPLETION: Final = "_BENCHCTL_COMPLETE"
"""The variable by which a shell asks for completions."""
_MOST_CHARS: Final = 300
_interrupts: Final[list[None]] = []
"""One entry for each interrupt that came while no coroutine ran."""


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

    def __init__(self, number: int, encoding: str) -> None:
        outlet = io.BufferedWriter(_Outlet(number, "wb", closefd=False))
        is_by_line = number == _STDERR_FD or os.isatty(number)
        super().__init__(outlet, encoding=encoding, errors="backslashreplace", line_buffering=is_by_line)
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
        self.write = stream.write_drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady_streams() -> None:
    """Make the standard streams of this process steady; one that was closed leads to the null device."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR_FD:  # else the next file opened took its number
        os.set_inheritable(number, True)
    os.close(number)
    encodings = ["utf-8" if stream is None else stream.encoding for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = _Shown(1, encodings[0]), _Shown(2, encodings[1])


def width_of(stream: TextIO) -> int:
    """The number in COLUMNS, or of the columns of the terminal; 120 in a pipe or a file."""
    number = os.environ.get("COLUMNS", "")
    width = int(number) if number.isdecimal() else 0
    if not width and stream.isatty():
        width = os.get_terminal_size(stream.fileno()).columns
    return max(width or _PIPE_WIDTH, _LEAST_WIDTH)


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


def note_interrupt() -> None:
    """Record that the user interrupted the command; a library may make an error of its own of KeyboardInterrupt."""
    _interrupts.append(None)


def report_failure(error: BaseException) -> int:
    """Print why the command could not do its work; returns the exit code."""
    cause = _decisive(error)
    if isinstance(cause, KeyboardInterrupt) or _interrupts:
        return INTERRUPTED_CODE
    if isinstance(cause, SystemExit) and (not cause.code or _COMPLETION in os.environ):
        return UsageError.exit_code if cause.code else 0
    if hasattr(cause, "format_message"):  # what Typer finds wrong with the command line
        written = io.StringIO()
        cause.show(written)  # type: ignore[attr-defined]  # the class is private
        lines, code = [written.getvalue().strip().replace("Error: ", "benchctl: ")], UsageError.exit_code
    elif isinstance(cause, BenchctlError):
        lines, code = _lines_of(cause), cause.exit_code
    else:
        lines, code = _internal(cause), _INTERNAL_ERROR
    with suppress(OSError, ValueError):  # nobody may read them
        print(folded("\n".join(lines), width_of(sys.stderr)), file=sys.stderr)
    return code


def _decisive(error: BaseException) -> BaseException:
    """``error`` itself or what it stands for; of a group the one that says most."""
    reason = error.__context__
    if isinstance(error, BaseExceptionGroup):
        return min(map(_decisive, error.exceptions), key=_rank)
    if type(error).__name__ == "Abort":  # of Typer, when an answer is interrupted or there is none
        advice = "the input ended before every question was answered; give the answers as options (see --help)"
        return reason if isinstance(reason, KeyboardInterrupt) else UsageError(advice)
    if isinstance(error, SystemExit) and isinstance(reason, OSError):  # of Typer, when nobody reads the output
        error = reason
    if isinstance(error, BenchctlError) or not is_of_the_system(error):
        return error
    is_of_output = getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    return as_usage_error(error, "the output" if is_of_output else "")


def _rank(error: BaseException) -> int:
    """An interrupt says most, then an unforeseen error, then the failure of a run, then any other."""
    if isinstance(error, BenchctlError):
        return 100 - error.exit_code
    return 0 if isinstance(error, KeyboardInterrupt) else 1


def _lines_of(error: BenchctlError) -> list[str]:
    """The message, the end of the log of the program that failed, and whether relative paths lead nowhere."""
    from benchctl.untrusted.secrets import redacted

    lines = [f"benchctl: {visible_lines(redacted(str(error)))}"]
    if error.log_tail:
        lines += [f"{error.log_title}:", *map(log_line, redacted(error.log_tail).splitlines())]
    try:
        os.getcwd()  # noqa: PTH109 - pathlib may be what cannot be imported
    except FileNotFoundError:
        lines.append("benchctl: the current directory was deleted; cd to another one")
    return lines


def _internal(error: BaseException) -> list[str]:
    """Two lines on a mistake of benchctl, and its traceback where the user asked for it; all without secrets."""
    from benchctl.untrusted.secrets import redacted

    words = sys.argv[1:3]
    options = [i for i, word in enumerate(words) if word.startswith("-")]
    command = " ".join(["benchctl", *(redacted(word)[:_MOST_CHARS] for word in words[: min(options, default=2)])])
    line = visible_line(" ".join(redacted(str(error)).split()), _MOST_CHARS)
    summary = f"{type(error).__name__}: {line}" if line else type(error).__name__
    first = f"benchctl: internal error in '{command}' (version {__version__}): {summary}"
    where = f"is printed with {TRACEBACK_VARIABLE}=1"
    if TRACEBACK_VARIABLE in os.environ:
        where = f"is below\n{redacted(''.join(traceback.format_exception(error))).rstrip()}"
    if isinstance(error, ImportError):
        again = f"{sys.executable} -m pip install --force-reinstall benchctl"
        return [first, f"the installation is damaged; run '{again}'; the traceback {where}"]
    return [first, f"this is a mistake of benchctl; please report it with its traceback, which {where}"]


@contextmanager
def keeping(results: Path) -> Iterator[None]:
    """After a measurement: what the system refuses now ends the command with what was measured on disk."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BenchctlError) or not is_of_the_system(error):
            raise
        next_step = f"; {KEPT} in {results}, and 'benchctl report' writes its report"
        raise as_run_error(error, "the output", next_step=next_step) from error


@contextmanager
def advising(next_step: str) -> Iterator[None]:
    """After an interrupt, say that the results are kept, and what can be done with them."""
    try:
        yield
    except KeyboardInterrupt:
        text = f"interrupted; results until now are kept. {next_step}"
        print(folded(text, width_of(sys.stderr)), file=sys.stderr)
        raise


@contextmanager
def spelled(words: Mapping[str, str]) -> Iterator[None]:
    """Tell an error in the words of the command: ``words`` are those by patterns of what they replace."""
    try:
        yield
    except BenchctlError as error:
        error.args = (in_words(str(error), words),)
        raise


def in_words(message: str, words: Mapping[str, str]) -> str:
    """A message with these words in place of what their patterns match."""
    return reduce(lambda text, pattern: re.sub(pattern, words[pattern], text), words, message)


def exit_code_of(num_failed: int, num_suspect: int) -> int:
    """The exit code of a measurement: 5 where a run failed, 4 where one is suspect."""
    return 5 if num_failed else 4 if num_suspect else 0
