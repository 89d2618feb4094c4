"""Blocks handed out to slots: which goes where, who holds a device, and what becomes of those left undone."""

import os
import subprocess
import sys
import threading
import time

import pytest
from support.nvidia_smi import FakeSmi, devices

from benchctl.cluster import local
from benchctl.cluster.local import (
    PARENT_VARIABLE,
    BlockProcess,
    BlocksOnSlots,
    HeldError,
    held_devices,
    held_slots,
    locked,
)
from benchctl.cluster.slots import Slot
from benchctl.errors import UsageError
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PlannedRun

TWO = tuple(Slot(index=index, gpus=(f"GPU-{index}",)) for index in range(2))


class Process(BlockProcess):
    """A process that ends as its block is told to."""

    def __init__(self, block, slot, code):
        self.block, self.slot, self.log = block, slot, f"b{block}.log"
        argv = [sys.executable, "-IS", "-c", f"import os; {code}"]
        self._process = subprocess.Popen(argv, start_new_session=True)
        self.poll, self.terminate = self._process.poll, self._process.terminate


class Handing:
    """The handing out of blocks whose n-th process runs the n-th code given for it, or else the last.

    No run of theirs ends; ``of_others`` have another owner.
    """

    def __init__(self, monkeypatch, codes, slots=TWO, of_others=(), begun_on=None):
        self.started = []
        self._codes = {block: list(given) for block, given in codes.items()}
        monkeypatch.setattr(local, "BlockProcess", self._start)
        monkeypatch.setattr(local, "has_ended", lambda _results, _block: False)
        monkeypatch.setattr(local, "living_owner", lambda _results, block: block if block in of_others else None)
        monkeypatch.setattr(local, "devices_begun_on", lambda _results: begun_on or {})
        runs = [PlannedRun(index=i, run_id=f"r{i}", block=i, position=0, variant="a", cell={}) for i in codes]
        self.blocks = BlocksOnSlots(ResultDirectory("unread"), slots, runs)

    def _start(self, _results, block, slot, _options):
        codes = self._codes[block]
        self.started.append((block, slot.index))
        return Process(block, slot, codes.pop(0) if len(codes) > 1 else codes[0])

    def run(self):
        deadline = time.monotonic() + 60
        while not self.blocks.is_over:
            assert time.monotonic() < deadline
            self.blocks.advance()
            time.sleep(0.01)
        return self


def test_the_lowest_blocks_come_first_and_each_free_slot_gets_the_next(monkeypatch):
    long, short = "import time; time.sleep(0.6)", "import time; time.sleep(0.05)"
    handing = Handing(monkeypatch, {0: [long], **{block: [short] for block in range(1, 5)}}).run()
    assert [block for block, _ in handing.started] == [0, 1, 2, 3, 4]
    assert [slot for _, slot in handing.started] == [0, 1, 1, 1, 1], "block 0 keeps its slot for long"


def test_a_killed_process_leaves_its_block_to_another_on_the_same_slot_once(monkeypatch):
    killed = "os.kill(os.getpid(), 9)"
    handing = Handing(monkeypatch, {0: ["import time; time.sleep(0.3)"], 1: [killed, "0"], 2: [killed]}).run()
    assert [slot for block, slot in handing.started if block == 1] == [1, 1]
    assert [block for block, _ in handing.started].count(2) == 2
    assert [(process.block, process.poll()) for process in handing.blocks.given_up] == [(2, -9)]


def test_a_block_that_is_refused_ends_the_handing_out_and_one_of_another_process_is_left_to_it(monkeypatch):
    refused = Handing(monkeypatch, {block: ["os._exit(2)"] for block in range(6)}, slots=TWO[:1]).run()
    assert refused.started == [(0, 0)]
    assert refused.blocks.refused is not None
    shared = Handing(monkeypatch, {0: ["os._exit(2)"], 1: ["0"]}, of_others={0}).run()
    assert (shared.blocks.of_others, shared.blocks.refused, len(shared.started)) == ([0], None, 2)


def test_a_block_that_was_begun_goes_to_the_devices_that_began_it(monkeypatch):
    handing = Handing(
        monkeypatch,
        {block: ["import time; time.sleep(0.1)"] for block in range(4)},
        begun_on={0: ("GPU-1",), 1: ("GPU-elsewhere",), 2: ("GPU-1",)},
    ).run()
    on = dict(handing.started)
    assert (on[0], on[2]) == (1, 1)
    assert on[1] == 0, "no slot has those devices, so that any will do"


def test_the_end_asks_all_processes_and_kills_those_that_do_not_listen(monkeypatch):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    handing = Handing(monkeypatch, {0: [deaf], 1: ["import time; time.sleep(60)"], 2: ["0"]})
    handing.blocks.advance()
    time.sleep(0.3)
    began_s = time.monotonic()
    handing.blocks.end(limit_s=1.0)
    assert time.monotonic() - began_s < 10
    assert handing.blocks.is_over
    assert len(handing.started) == 2


def test_slots_that_another_benchctl_has_are_passed_over_and_its_process_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path))
    slots = [Slot(index=index, gpus=(f"GPU-{index}",), cores=(index,)) for index in range(3)]
    with held_slots(slots, 2, is_virtual=False) as held:
        assert [each.index for each in held] == [0, 1]
        with held_slots(slots, 1, is_virtual=False) as others:
            assert [each.index for each in others] == [2]
        with (
            pytest.raises(UsageError, match=r"1 of 3 slots are free: GPU-0 is held by process \d+ .*--parallel 1"),
            held_slots(slots, 2, is_virtual=False),
        ):
            pass
        cores = [Slot(index=0, cores=(1,))]
        with pytest.raises(UsageError, match="core-1 is held by process"), held_slots(cores, 1, is_virtual=False):
            pass
        with held_slots(cores, 1, is_virtual=True):
            pass


def test_an_experiment_without_slots_holds_the_first_devices_that_its_servers_see(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PATH", str(FakeSmi(tmp_path / "bin").directory), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    FakeSmi(tmp_path / "bin").behave(devices=devices(3))
    two = load_profile("ci-smoke", engine="vllm", overrides=["engine.options.tensor_parallel_size=2"])
    slots = [Slot(index=index, gpus=(f"GPU-{letter * 2}",)) for index, letter in enumerate("abc")]
    with held_devices(two), held_slots(slots, 1, is_virtual=False) as held:
        assert held[0].gpus == ("GPU-cc",)
        with (
            pytest.raises(UsageError, match=r"GPU-aa is held by process \d+ .*CUDA_VISIBLE_DEVICES"),
            held_devices(two),
        ):
            pass
        with held_devices(load_profile("ci-smoke")):
            pass  # a simulator needs no device
    (tmp_path / "file").touch()
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "file"))
    with held_devices(two):
        pass  # a user without a directory for locks measures without them


def test_a_process_whose_parent_has_ended_meanwhile_ends():
    code = "from benchctl.cluster.local import end_with_parent; end_with_parent(); print('goes on')"
    late = os.environ | {PARENT_VARIABLE: str(os.getppid())}
    ended = subprocess.run([sys.executable, "-c", code], env=late, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")


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
