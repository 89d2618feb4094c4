"""The command line: the only room that prints, draws progress and picks exit codes.

Each command group is one module; a command imports what it needs when it is called, so that ``--help`` stays
fast. Errors of ``benchctl.errors`` become one message on stderr and their exit code, here and nowhere
else.
"""

import gc
import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

from benchctl.cli.failures import INTERRUPTED, exit_code_of, note_interrupt, report_failure
from benchctl.cli.streams import drop_output, steady_streams, widen_help
from benchctl.errors import DeprecatedWordWarning, UsageError
from benchctl.system_errors import address_space_shortfall

_NEW_OBJECTS = 200_000
"""New objects until the collector searches for cycles. The hundreds of modules that a command imports leave hardly
any, and repeated searches would take a tenth of a short command's time."""

_REPEAT_S = 0.01
_ADDRESS_SPACE_BYTES = 550_000_000
"""Address space of ``benchctl compare`` on two cores: 546 MB."""
_LIGHT = {"--help", "-h", "--version", "doctor"}
"""Commands that need no linear algebra; ``doctor`` reports the limit."""


def main() -> NoReturn:
    """Run the command line and exit with its code (0 to 5, 70 for a mistake of benchctl, 130 when interrupted)."""
    gc.set_threshold(_NEW_OBJECTS)
    code = INTERRUPTED
    try:
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
    try:
        steady_streams()
        widen_help()
        warnings.showwarning = _show_warning
        threading.excepthook = _report_failure_of_thread
        _check_address_space()
        from benchctl.cli.app import app

        _handle_signals()
        try:
            app(prog_name="benchctl")
        except SystemExit as leaving:
            code = exit_code_of(leaving)
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - Python would end with 1, which is a verdict
        return report_failure(error)
    return code


def _check_address_space() -> None:
    """Raise UsageError where a command could not import linear algebra, which would end the process with code 1."""
    message = None if set(sys.argv[1:2]) <= _LIGHT else address_space_shortfall(_ADDRESS_SPACE_BYTES)
    if message is not None:
        raise UsageError(message)


def _handle_signals() -> None:
    """Let SIGTERM and a closed terminal end benchctl as Ctrl-C does: servers are stopped, results are kept.

    Until the command begins an interrupt ends the process at once (``__main__``).
    """
    sys.unraisablehook = _repeat_lost_interrupt
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, _interrupt)


def _repeat_lost_interrupt(lost: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt that came in a function whose errors Python drops, such as that of a weak reference."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        threading.Timer(_REPEAT_S, signal.raise_signal, (signal.SIGINT,)).start()
    else:
        sys.__unraisablehook__(lost)


def _report_failure_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Report what ended a thread as what ends a command is; the command goes on."""
    if failed.exc_value is not None:
        report_failure(failed.exc_value)


def _ignore_signals() -> None:
    """Ignore signals from now on: the work is complete, and its exit code must not change."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        _ignore_signals()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    note_interrupt()
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
