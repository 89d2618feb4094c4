"""One process that measures one block on a slot."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchctl.cluster.local import launcher
from benchctl.cluster.slots import Slot
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.untrusted import LOG_BYTES
from benchctl.untrusted.files import entry_names, make_folder, open_to_append, read_file

_LAUNCHER: Final = Path(launcher.__file__)
_LOG: Final = re.compile(r"b(\d+)-(\d+)\.log")
_LAST_LINES: Final = 8


class BlockProcess:
    """A process that measures ``block`` of the result directory ``results`` on ``slot``, from its start on.

    It leads a session of its own, so that a key pressed at the terminal reaches it only through us. What it prints
    is in ``log``. ``handles`` are locks that it shares with us.
    """

    def __init__(
        self, results: Path, block: int, slot: Slot, options: Sequence[str] = (), handles: Sequence[int] = ()
    ) -> None:
        self.block, self.slot = block, slot
        self.log = _next_log(results, block)
        self._within = results
        benchctl = (
            sys.executable,
            "-m",
            "benchctl",
            "run",
            "--block",
            str(block),
            "--into",
            str(results.absolute()),
        )
        cores = ",".join(map(str, slot.cores)) or "-"
        with open_to_append(self.log, within=results) as output:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), cores, *benchctl, *options),
                env={**os.environ, VARIABLE: ",".join(slot.gpus)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(handles),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end: it records its run as interrupted and ends its server."""
        self._process.terminate()

    def wait(self, limit_s: float) -> None:
        """Wait for its end; after ``limit_s`` it is killed, and what it started with it."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # the guardian of its server ends that one
            self._process.wait()

    def last_lines(self) -> str:
        """The end of what it printed."""
        with suppress(OSError):
            text = read_file(self.log, within=self._within, max_bytes=LOG_BYTES).decode(errors="replace")
            return "\n".join(text.splitlines()[-_LAST_LINES:])
        return ""


def _next_log(results: Path, block: int) -> Path:
    """``logs/b003-1.log``: of each process that measures the block, by its number from 1."""
    folder = results / "logs"
    make_folder(folder, within=results)
    numbers = [
        int(match[2])
        for name in entry_names(folder, within=results)
        if (match := _LOG.fullmatch(name)) and int(match[1]) == block
    ]
    return folder / f"b{block:03d}-{max(numbers, default=0) + 1}.log"
