"""The start of the command ``benchctl``, and of ``python -m benchctl``.

Its first statements make an interrupt end the process at once and in silence: while modules are imported nothing
needs to be cleaned up, and Python would print where it was. Nothing else imports this module.
"""

import os

INTERRUPTED = 130
_INTERNAL_ERROR = 70

try:
    import sys

    # The part of ``signal`` in C: its other part takes a millisecond, in which an interrupt would be shown.
    from _signal import (  # type: ignore[import-not-found]
        SIG_DFL,
        SIGHUP,
        SIGINT,
        SIGTERM,
        SIGUSR1,
        SIGUSR2,
        default_int_handler,
        getsignal,
        signal,
    )

    if getsignal(SIGINT) is default_int_handler:  # not where interrupts are ignored
        signal(SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    if "--into" in sys.argv:  # the task of a job system, which may warn it at any time
        for number in (SIGTERM, SIGHUP, SIGUSR1, SIGUSR2):
            if getsignal(number) == SIG_DFL:
                signal(number, lambda _number, _frame: os._exit(INTERRUPTED))
except KeyboardInterrupt:
    os._exit(INTERRUPTED)

from typing import NoReturn  # noqa: E402


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    try:
        from benchctl.cli import main as run_command_line  # noqa: PLC0415 - it may be what is damaged

        run_command_line()
    except BaseException as error:  # noqa: BLE001 - Python would end with 1, which is a verdict
        _end_without_the_command_line(error)


def _end_without_the_command_line(error: BaseException) -> NoReturn:
    """End where not even the modules that explain errors can be imported, or where they fail."""
    code = _INTERNAL_ERROR
    try:
        from benchctl.cli.failures import report_failure  # noqa: PLC0415 - as above

        code = report_failure(error)
    except BaseException:  # noqa: BLE001 - as above
        remedy = f"reinstall it with '{sys.executable} -m pip install --force-reinstall benchctl'"
        lines = f"benchctl: cannot start ({type(error).__name__}: {error})\nthe installation is damaged: {remedy}\n"
        os.write(2, lines.encode(errors="backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main()
