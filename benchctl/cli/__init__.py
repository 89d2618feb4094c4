"""The command line: the only room that prints, draws progress and picks exit codes.

Each command group is one module; a command imports the rooms it needs when it is called, so that ``--help``
stays fast. Errors of ``benchctl.errors`` become one message on stderr and their exit code, here and nowhere
else.
"""

import signal
import sys
from types import FrameType
from typing import NoReturn

from benchctl.errors import BenchctlError, RunError

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit with its code (0 to 5, or 130 when interrupted)."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from benchctl.cli.app import app

        app(prog_name="benchctl")
    except BenchctlError as error:
        _explain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        print(f"benchctl: the system refused: {error}; what was measured is kept", file=sys.stderr)
        sys.exit(BenchctlError.exit_code)
    sys.exit(0)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends benchctl the way Ctrl-C does: servers are stopped, what was measured is kept."""
    raise KeyboardInterrupt


def _explain(error: BenchctlError) -> None:
    print(f"benchctl: {error}", file=sys.stderr)
    if isinstance(error, RunError) and error.log_tail:
        print("the server's log ends:", file=sys.stderr)
        for line in error.log_tail.splitlines():
            print(f"  | {line}", file=sys.stderr)
