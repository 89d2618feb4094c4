"""The command line: the only room that prints, draws progress and picks exit codes.

Each command group is one module; a command imports what it needs when it is called, so that ``--help`` stays
fast. Errors of ``benchctl.errors`` become one message on stderr and their exit code, here and nowhere
else.
"""

import errno
import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

from benchctl.cli.streams import drop_output, log_line, steady_streams, widen_help
from benchctl.errors import BenchctlError, DeprecatedWordWarning
from benchctl.untrusted.text import visible_lines

INTERRUPTED = 130
_NEW_OBJECTS = 200_000
"""New objects until the collector searches for cycles. The hundreds of modules that a command imports leave hardly
any, and repeated searches would take a tenth of a short command's time."""
_NAMELESS = {errno.ENOENT: "the current directory", errno.ENOSPC: "output"}
"""The object of an error of the system that names no file."""


def main() -> NoReturn:
    """Run the command line and exit with its code (0 to 5, or 130 when interrupted)."""
    gc.set_threshold(_NEW_OBJECTS)
    code = INTERRUPTED
    try:
        steady_streams()
        widen_help()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
                signal.signal(number, _interrupt)
        with suppress(KeyboardInterrupt):
            code = _run()
        _ignore_signals()
    except KeyboardInterrupt:  # a second signal, on the way out
        _ignore_signals()
    drop_output()
    # Python would first destroy every module, object by object, and would end itself by SIGINT if the interrupt
    # came while a module was imported.
    os._exit(code)


def _run() -> int:
    """The exit code of the command that the command line names."""
    warnings.showwarning = _show_warning
    try:
        from benchctl.cli.app import app

        app(prog_name="benchctl")
        sys.stdout.flush()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except BenchctlError as error:
        from benchctl.untrusted.known_secrets import redacted

        print(f"benchctl: {visible_lines(redacted(str(error)))}", file=sys.stderr)
        if error.log_tail:
            lines = ("the server's log ends:", *map(log_line, redacted(error.log_tail).splitlines()))
            print(*lines, sep="\n", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        target = error.filename or _NAMELESS.get(error.errno or 0, "the system")
        remedy = "free space or correct the permissions; results until now are kept"
        print(f"benchctl: {target}: refused ({error.strerror or error}); {remedy}", file=sys.stderr)
        return BenchctlError.exit_code
    return 0


def _ignore_signals() -> None:
    """Ignore signals from now on: the work is complete, and its exit code must not change."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        _ignore_signals()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Let SIGTERM and a closed terminal end benchctl as Ctrl-C does: servers are stopped, results are kept."""
    raise KeyboardInterrupt


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about the user's files in one line; any other as Python does."""
    if issubclass(category, DeprecatedWordWarning):
        print(f"benchctl: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)
