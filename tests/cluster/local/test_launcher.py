"""The program of a block: on its cores, and never longer alive than the process that hands out blocks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchctl.cluster.local import launcher

SHOW_CORES = "import os; print(sorted(os.sched_getaffinity(0)))"


def launched(cores, *argv, parent=None, **options):
    words = (sys.executable, "-I", "-S", launcher.__file__, str(parent or os.getpid()), cores, *argv)
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False, **options)


def test_the_program_has_the_cores_of_its_slot_and_ours_do_not_change():
    before = os.sched_getaffinity(0)
    core = max(before)
    process = launched(str(core), sys.executable, "-c", SHOW_CORES)
    assert process.stdout.strip() == f"[{core}]", process.stderr
    assert launched("-", sys.executable, "-c", SHOW_CORES).stdout.strip() == str(sorted(before))
    assert os.sched_getaffinity(0) == before


def test_nothing_is_started_for_a_process_that_has_ended_meanwhile():
    process = launched("-", sys.executable, "-c", "print('started')", parent=os.getppid())
    assert (process.returncode, process.stdout) == (130, "")


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of the end of a parent")
def test_the_program_is_asked_to_end_when_the_process_that_hands_out_blocks_is_killed(tmp_path: Path):
    child = (
        "import pathlib, signal, sys, time\n"
        "def end(*_): pathlib.Path(sys.argv[1]).write_text('asked to end'); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"argv = [sys.executable, '-I', '-S', {launcher.__file__!r}, str(os.getpid()), '-', sys.executable, '-c',\n"
        f"        {child!r}, {str(tmp_path / 'end')!r}]\n"
        "subprocess.Popen(argv, start_new_session=True).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (pid,) = (each.pid for each in psutil.Process(process.pid).children())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (tmp_path / "end").read_text() == "asked to end"
