"""The process of a block: on its cores, and never longer alive than the process that hands out blocks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchctl.cluster.local import PARENT_VARIABLE, BlockProcess
from benchctl.cluster.slots import Slot
from benchctl.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of the end of a parent")
ENDS_WITH_PARENT = "from benchctl.cluster.local import end_with_parent; end_with_parent()"


def test_the_process_has_the_cores_and_devices_of_its_slot_and_ours_do_not_change(tmp_path: Path):
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    process = BlockProcess(tmp_path, 3, Slot(index=0, gpus=("GPU-1",), cores=(core,)))
    started = psutil.Process(process._process.pid)
    assert started.cpu_affinity() == [core]
    assert started.environ()["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert os.sched_getaffinity(0) == before
    process.wait(60)
    assert process.log == tmp_path / "logs/b003.log"
    refusal = process.refusal()
    assert isinstance(refusal, UsageError)
    assert "is not a result directory" in refusal.log_tail
    second = BlockProcess(tmp_path, 3, Slot(index=0))
    second.wait(60)
    assert second.log.read_text().count("is not a result directory") == 2


def test_a_process_whose_parent_has_ended_meanwhile_ends():
    environment = os.environ | {PARENT_VARIABLE: str(os.getppid())}
    process = subprocess.run(
        [sys.executable, "-c", f"{ENDS_WITH_PARENT}; print('goes on')"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (130, "")


def test_it_is_asked_to_end_when_the_process_that_hands_out_blocks_is_killed(tmp_path: Path):
    child = (
        f"{ENDS_WITH_PARENT}\n"
        "import os, pathlib, signal, sys, time\n"
        f"assert {PARENT_VARIABLE!r} not in os.environ, 'servers do not inherit it'\n"
        "def end(*_): pathlib.Path(sys.argv[1]).write_text('asked to end'); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"os.environ[{PARENT_VARIABLE!r}] = str(os.getpid())\n"
        f"argv = [sys.executable, '-c', {child!r}, {str(tmp_path / 'end')!r}]\n"
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
