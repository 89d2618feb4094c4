"""The process of a block: on its cores, and never longer alive than the process that hands out blocks."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.local_commands import wait_until

from benchctl.cluster.local import PARENT_VARIABLE, BlockProcess
from benchctl.cluster.slots import Slot
from benchctl.errors import UsageError
from benchctl.measure.server.process import is_alive

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


def test_it_is_asked_to_end_when_the_process_that_hands_out_blocks_is_killed(tmp_path: Path):
    code = (
        f"{ENDS_WITH_PARENT}\n"
        "import os, pathlib, signal, sys, time\n"
        f"assert {PARENT_VARIABLE!r} not in os.environ, 'servers do not inherit it'\n"
        "def end(*_): pathlib.Path(sys.argv[1]).write_text('asked to end'); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"os.environ[{PARENT_VARIABLE!r}] = str(os.getpid())\n"
        f"argv = [sys.executable, '-c', {code!r}, {str(tmp_path / 'end')!r}]\n"
        "subprocess.Popen(argv, start_new_session=True).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    wait_until("its end", lambda: not is_alive(child))
    assert (tmp_path / "end").read_text() == "asked to end"
    orphan = [sys.executable, "-c", f"{ENDS_WITH_PARENT}; print('goes on')"]
    late = os.environ | {PARENT_VARIABLE: str(os.getppid())}  # its parent has ended meanwhile
    ended = subprocess.run(orphan, env=late, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")
