"""Devices are held by one process at a time, and by those that measure for it."""

import subprocess
import sys
import threading
import time

import pytest

from benchctl.cluster.local import HeldError, locked
from benchctl.errors import UsageError

HOLD = (
    "import sys; from benchctl.cluster.local import HeldError, locked\n"
    "try:\n"
    "    with locked(sys.argv[1:]): print('held', flush=True); sys.stdin.read()\n"
    "except HeldError as error: print(error, flush=True)"
)


def is_free(name):
    try:
        with locked([name]):
            return True
    except HeldError:
        return False


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "locks"))


def other_process(*names):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_a_device_is_held_by_one_process_at_a_time_which_is_named_and_a_killed_one_holds_nothing():
    process, said = other_process("GPU-a", "core-3")
    assert said == "held"
    refused = pytest.raises(HeldError, match=rf"^core-3 is held by process {process.pid} \(")
    with refused, locked(["GPU-b", "core-2", "core-3"]):
        pass
    assert is_free("GPU-b"), "what was taken before the one that is held is given back"
    process.kill()
    process.communicate()
    assert is_free("GPU-a")


def test_a_device_stays_held_by_those_that_inherited_it_who_are_waited_for_when_their_parent_has_ended():
    leave = (
        "import subprocess, sys; from benchctl.cluster.local import locked\n"
        "heir = [sys.executable, '-c', 'import sys; sys.stdin.read()']\n"
        "with locked(['GPU-a']) as locks: subprocess.Popen(heir, pass_fds=locks, stdout=2)\n"
        "print('held', flush=True)\n"
        "sys.stdin.readline()"
    )
    argv = [sys.executable, "-c", leave]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "held\n"
        second, said = other_process("GPU-a")
        assert said.startswith(f"GPU-a is held by process {parent.pid} ")
        second.communicate()
        parent.stdin.write("end\n")
        parent.stdin.flush()
        assert parent.wait(10) == 0
        began_s = time.monotonic()
        threading.Timer(0.5, parent.stdin.close).start()
        assert is_free("GPU-a")
        assert time.monotonic() - began_s > 0.4


def test_a_file_where_the_directory_of_locks_should_be_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="BENCHCTL_LOCKS_DIR"), locked(["GPU-a"]):
        pass
