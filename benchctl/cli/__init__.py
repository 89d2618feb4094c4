"""The command line: the only room that prints, draws progress and picks exit codes.

The module of a command is imported when the command is called, so that ``--help`` stays fast. Errors of
``benchctl.errors`` become one message on stderr and their exit code, here and nowhere else.
"""

import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from benchctl.cli.failures import drop_output, note_interrupt, report_failure, steady_streams
from benchctl.errors import INTERRUPTED_CODE

_NEW_OBJECTS = 200_000
"""New objects until the collector searches for cycles. The hundreds of modules that a command imports leave hardly
any, and repeated searches would take a tenth of a short command's time."""
# httpx imports its command line where it can, with pygments and click, which takes longer than itself.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> NoReturn:
    """Run the command line and exit with its code (0 to 5, 70 for a mistake of benchctl, 130 when interrupted)."""
    gc.set_threshold(_NEW_OBJECTS)
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED_CODE
    for number in _SIGNALS:  # the work is complete, and its exit code must not change
        signal.signal(number, signal.SIG_IGN)
    drop_output()
    # Python would first destroy every module, object by object, and would end itself by SIGINT if the interrupt
    # came while a module was imported.
    os._exit(code)


def _run() -> int:
    """The exit code of the command that the command line names."""
    try:
        steady_streams()
        threading.excepthook = _report_failure_of_thread
        from benchctl.cli.app import app

        _handle_signals()
        code = app(prog_name="benchctl", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - Python would end with 1, which is a verdict
        return report_failure(error)
    return code if isinstance(code, int) else 0


def _handle_signals() -> None:
    """Let SIGTERM and a closed terminal end benchctl as Ctrl-C does: servers are stopped, results are kept.

    Until the command begins an interrupt ends the process at once (``__main__``).
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    note_interrupt()
    raise KeyboardInterrupt


def _report_failure_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Report what ended a thread as what ends a command is; the command goes on."""
    if failed.exc_value is not None:
        report_failure(failed.exc_value)
