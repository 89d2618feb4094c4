"""What a terminal shows of an experiment while it goes on: bars where they fit, otherwise a line for each run."""

import os
import pty
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

COMMAND = ["-m", "benchctl", "run", "--profile", "ci-smoke", "--engine", "sim-exact", "--blocks", "1"]
SMALL = ["--set", "workload.num_prompts=1", "--set", "workload.output_len=8"]


def shown_on_terminal(cwd: Path, columns: int) -> str:
    """What an experiment writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS")}
    running = subprocess.Popen(
        [sys.executable, *COMMAND, *SMALL],
        cwd=cwd,
        env=environment | {"BENCHCTL_DATA_DIR": str(cwd / "no-data")},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = bytearray()
    with suppress(OSError):  # the other end of a terminal that nobody has open any more
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert running.wait(timeout=60) == 0
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "shows_bars"), [(100, True), (0, False)])
def test_a_terminal_without_a_width_gets_lines_because_bars_would_be_invisible(tmp_path, columns, shows_bars):
    shown = shown_on_terminal(tmp_path, columns)
    assert ("runs: 100%" in shown) is shows_bars
    assert ("[2/2] 001-b0-" in shown) is not shows_bars
