"""Devices are held by one process at a time, and by those that measure for it."""

import subprocess
import sys
import time

import pytest

from benchctl.cluster.local import HeldError, locked
from benchctl.errors import UsageError

LEAVE = (
    "import subprocess, sys; from benchctl.cluster.local import locked\n"
    "heir = [sys.executable, '-c', 'import time; time.sleep(1.5)']\n"
    "with locked(['GPU-a']) as locks: subprocess.Popen(heir, pass_fds=locks); print('left', flush=True)"
)
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


def end(process):
    process.communicate()


def test_a_device_is_held_by_one_process_at_a_time_and_its_holder_is_named():
    process, taken = other_process("GPU-a", "core-3")
    assert taken == "held"
    refused = pytest.raises(HeldError, match=rf"^core-3 is held by process {process.pid} \(")
    with refused, locked(["GPU-b", "core-2", "core-3"]):
        pass
    assert is_free("GPU-b"), "what was taken before the one that is held is given back"
    end(process)
    assert is_free("GPU-a")


def test_a_killed_process_holds_nothing():
    process, _ = other_process("GPU-a")
    process.kill()
    end(process)
    assert is_free("GPU-a")


def test_a_device_stays_held_while_a_process_that_inherited_it_lives():
    with locked(["GPU-a"]) as locks:
        heir = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=locks,
        )
    second, taken = other_process("GPU-a")
    assert taken.startswith("GPU-a is held by process ")
    end(second)
    end(heir)
    assert is_free("GPU-a")


def test_the_heirs_of_a_process_that_has_ended_are_waited_for():
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", LEAVE], check=True, stdout=subprocess.DEVNULL)
    assert is_free("GPU-a")
    assert time.monotonic() - began_s > 1.5


def test_a_file_where_the_directory_of_locks_should_be_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="BENCHCTL_LOCKS_DIR"), locked(["GPU-a"]):
        pass
