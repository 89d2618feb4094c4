"""Devices are held by one process at a time, and by those that measure for it."""

import subprocess
import sys
import time

import pytest

from benchctl.cluster.device_locks import core_names, locked
from benchctl.errors import UsageError

LEAVE = (
    "import subprocess, sys; from benchctl.cluster.device_locks import locked\n"
    "heir = [sys.executable, '-c', 'import time; time.sleep(1.5)']\n"
    "with locked(['GPU-a']) as locks: subprocess.Popen(heir, pass_fds=locks.handles); print('left', flush=True)"
)
HOLD = (
    "import sys; from benchctl.cluster.device_locks import locked\n"
    "with locked(sys.argv[1:]) as locks: print(locks.refused, flush=True); sys.stdin.read()"
)


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
    assert taken == "None"
    with locked(["GPU-b", *core_names([2, 3])]) as locks:
        assert (locks.handles, locks.refused) == ((), "core-3")
        assert f"process {process.pid} (" in locks.holder
        with locked(["GPU-b"]) as others:
            assert others.refused is None, "what was taken before the one that is held is given back"
    end(process)
    with locked(["GPU-a"]) as locks:
        assert locks.refused is None


def test_a_killed_process_holds_nothing():
    process, _ = other_process("GPU-a")
    process.kill()
    end(process)
    with locked(["GPU-a"]) as locks:
        assert locks.refused is None


def test_a_device_stays_held_while_a_process_that_inherited_it_lives():
    with locked(["GPU-a"]) as locks:
        heir = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=locks.handles,
        )
    second, taken = other_process("GPU-a")
    assert taken == "GPU-a"
    end(second)
    end(heir)
    with locked(["GPU-a"]) as locks:
        assert locks.refused is None


def test_the_heirs_of_a_process_that_has_ended_are_waited_for():
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", LEAVE], check=True, stdout=subprocess.DEVNULL)
    with locked(["GPU-a"]) as locks:
        assert locks.refused is None
    assert time.monotonic() - began_s > 1.5


def test_a_file_where_the_directory_of_locks_should_be_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="BENCHCTL_LOCKS_DIR"), locked(["GPU-a"]):
        pass
