"""Blocks handed out to slots: devices and cores of each, who holds them, and what becomes of blocks left undone."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from support.nvidia_smi import FakeSmi, devices
from support.waiting import wait_until

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
from benchctl.cluster.slots import Host, Slot, slots_of_host, this_host
from benchctl.errors import UsageError
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PlannedRun
from benchctl.records.schema import NodeGpu


def host_of(*, num_gpus=0, num_nodes=2, cores_per_node=8, visible=None, smt=True, knows_nodes=True):
    """Devices and cores spread over NUMA nodes; with ``smt`` core c is the hardware threads c and c + all cores."""
    num_cores = num_nodes * cores_per_node
    cores = [(core, core + num_cores) if smt else (core,) for core in range(num_cores)]
    node_of_gpu = [gpu * num_nodes // max(num_gpus, 1) if knows_nodes else None for gpu in range(num_gpus)]
    return Host(
        gpus=tuple(
            NodeGpu(index=i, name="H100", uuid=f"GPU-{i}", numa_node=node_of_gpu[i]) for i in range(num_gpus)
        ),
        visible=tuple(range(num_gpus)) if visible is None else visible,
        cores=tuple(cores),
        numa_nodes={thread: core[0] // cores_per_node for core in cores for thread in core},
    )


def assert_disjoint(slots):
    for taken in ([gpu for slot in slots for gpu in slot.gpus], [core for slot in slots for core in slot.cores]):
        assert len(taken) == len(set(taken))


def test_each_gpu_is_a_slot_with_cores_of_its_own_numa_node_whatever_is_hidden_and_however_many_are_asked_for():
    host = host_of(num_gpus=8)
    slots = slots_of_host(host, 8, 1)
    assert [slot.gpus for slot in slots] == [(f"GPU-{i}",) for i in range(8)]
    assert_disjoint(slots)
    for slot in slots:
        assert len(slot.cores) == 4, "two whole physical cores, each with its hardware threads"
        assert {host.numa_nodes[core] for core in slot.cores} == {slot.index // 4}
    assert slots[0].cores == (0, 1, 16, 17)
    (slot,) = slots_of_host(host_of(num_gpus=8, visible=(5,)), 1, 1)
    assert (slot.gpus, slot.cores) == (slots[5].gpus, slots[5].cores)


def test_devices_of_one_block_are_of_one_numa_node_as_far_as_they_go():
    host = host_of(num_gpus=8)
    three = [slot.gpus for slot in slots_of_host(host, 2, 3)]
    assert three == [("GPU-0", "GPU-1", "GPU-2"), ("GPU-4", "GPU-5", "GPU-6")]
    assert [len(slot.cores) for slot in slots_of_host(host, 2, 4)] == [16, 16]
    assert len(slots_of_host(host, 1, 6)[0].gpus) == 6


def test_without_cores_beside_every_device_all_cores_are_divided_equally():
    of_one_node = replace(
        host_of(num_gpus=4), cores=tuple((core,) for core in range(4)), numa_nodes=dict.fromkeys(range(4), 0)
    )
    for host in (host_of(num_gpus=4, knows_nodes=False), of_one_node):
        slots = slots_of_host(host, 4, 1)
        assert_disjoint(slots)
        assert [len(slot.cores) for slot in slots] == [sum(map(len, host.cores)) // 4] * 4


def test_without_devices_blocks_get_equal_sets_of_whole_neighbouring_cores():
    slots = slots_of_host(host_of(num_nodes=1, cores_per_node=8), 3, 0)
    cores = [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13)]
    assert [(slot.gpus, slot.cores) for slot in slots] == [((), each) for each in cores]


def test_too_few_devices_or_cores_are_refused_with_their_number():
    eight, cores = host_of(num_gpus=8), host_of(num_nodes=1, cores_per_node=4)
    of_virtual_clock = {"is_virtual": True}
    for host, num, num_gpus, how, says in (
        (eight, 9, 1, {}, r"9 blocks at a time, each on 1 GPU, need 9, and of 8 here 8 .* --parallel 8 is"),
        (eight, 3, 4, {}, r"each on 4 GPUs, need 12, and of 8 here .* --parallel 2 is"),
        (host_of(num_gpus=8, visible=(1, 2)), 3, 1, {}, "of 8 here 2 may be used"),
        (host_of(), 1, 1, {}, "of 0 here 0 may be used"),
        (host_of(num_gpus=4, num_nodes=4, cores_per_node=0, smt=False), 4, 1, {}, "4 GPUs share 0 cores"),
        (cores, 5, 0, {}, r"5 blocks .* need 5 processor.* 4 cores \(0-7\)"),
        (cores, 9, 0, of_virtual_clock, "--parallel 8 is the most"),
    ):
        with pytest.raises(UsageError, match=says):
            slots_of_host(host, num, num_gpus, **how)
    assert len(slots_of_host(cores, 8, 0, **of_virtual_clock)) == 8, "a virtual clock does not feel its neighbour"


def test_this_host_is_read_with_its_affinity_and_the_hardware_threads_of_each_core(tmp_path, monkeypatch):
    host = this_host()
    assert sorted(thread for core in host.cores for thread in core) == sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6})
    for thread in range(8):
        topology = tmp_path / f"cpu/cpu{thread}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{thread % 4},{thread % 4 + 4}\n")
    for node, listed in enumerate(("1,3,5,7", "0,2,4,6")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{listed}\n")
    host = this_host(tmp_path)
    assert host.cores == ((1, 5), (0, 4), (2, 6)), "ordered by node; threads that may not be used are no part"
    assert host.numa_nodes[4] == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-12ab")
    with pytest.raises(UsageError, match="hands out whole devices"):
        this_host()


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
        self._codes = codes
        for name, answer in {
            "BlockProcess": self._start,
            "has_ended": lambda _results, _block: False,
            "living_owner": lambda _results, block: block if block in of_others else None,
            "devices_begun_on": lambda _results: begun_on or {},
        }.items():
            monkeypatch.setattr(local, name, answer)
        runs = [PlannedRun(index=i, run_id=f"r{i}", block=i, position=0, variant="a", cell={}) for i in codes]
        self.problems = []
        self.blocks = BlocksOnSlots(ResultDirectory("unread"), slots, runs, on_problem=self.problems.append)

    def _start(self, _results, block, slot, _options):
        codes = self._codes[block]
        self.started.append((block, slot.index))
        return Process(block, slot, codes.pop(0) if len(codes) > 1 else codes[0])

    def run(self):
        wait_until("the end", lambda: self.blocks.is_over or self.blocks.advance())
        return self


def test_the_lowest_blocks_come_first_and_a_killed_process_leaves_its_block_to_another_on_the_same_slot_once(
    tmp_path, monkeypatch
):
    killed, last = "os.kill(os.getpid(), 9)", tmp_path / "the last process has begun"
    waits = f"import time\nwhile not os.path.exists({str(last)!r}): time.sleep(0.01)"
    codes = {0: [waits], 1: [killed, "0"], 2: [killed, f"open({str(last)!r}, 'w'); {killed}"]}
    handing = Handing(monkeypatch, codes).run()
    assert handing.started == [(0, 0), (1, 1), (1, 1), (2, 1), (2, 1)], "block 0 keeps its slot for long"
    assert [(process.block, process.poll()) for process in handing.blocks.given_up] == [(2, -9)]
    killed = [f"block {block}: its process was killed by SIGKILL; b{block}.log" for block in (1, 2, 2)]
    assert handing.problems == killed


def test_a_block_that_is_refused_ends_the_handing_out_and_one_of_another_process_is_left_to_it(monkeypatch):
    refused = Handing(monkeypatch, {block: ["os._exit(2)"] for block in range(6)}, slots=TWO[:1]).run()
    assert refused.started == [(0, 0)]
    assert refused.blocks.refused is not None
    shared = Handing(monkeypatch, {0: ["os._exit(2)"], 1: ["0"]}, of_others={0}).run()
    assert (shared.blocks.of_others, shared.blocks.refused, len(shared.started)) == ([0], None, 2)


def test_a_block_that_was_begun_goes_to_the_devices_that_began_it(monkeypatch):
    codes = {block: ["import time; time.sleep(0.1)"] for block in range(4)}
    begun_on = {0: ("GPU-1",), 1: ("GPU-elsewhere",), 2: ("GPU-1",)}
    slots = dict(Handing(monkeypatch, codes, begun_on=begun_on).run().started)
    assert (slots[0], slots[2]) == (1, 1)
    assert slots[1] == 0, "no slot has those devices, so that any will do"


def test_the_end_asks_all_processes_and_kills_those_that_do_not_listen(monkeypatch):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    handing = Handing(monkeypatch, {0: [deaf], 1: ["import time; time.sleep(600)"], 2: ["0"]})
    handing.blocks.advance()
    time.sleep(0.3)
    handing.blocks.end(limit_s=1.0)
    assert (handing.blocks.is_over, len(handing.started)) == (True, 2)


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", str(tmp_path / "locks"))


def is_free(name):
    try:
        with locked([name]):
            return True
    except HeldError:
        return False


def refused(text):
    return pytest.raises(UsageError, match=text)


def test_slots_that_another_benchctl_has_are_passed_over_and_its_process_is_named():
    slots = [Slot(index=index, gpus=(f"GPU-{index}",), cores=(index,)) for index in range(3)]
    cores = [Slot(index=0, cores=(1,))]
    few = refused(r"1 of 3 slots are free: GPU-0 is held by process \d+ .*--parallel 1")
    with held_slots(slots, 2, is_virtual=False) as held:
        assert [each.index for each in held] == [0, 1]
        with held_slots(slots, 1, is_virtual=False) as others:
            assert [each.index for each in others] == [2]
        with few, held_slots(slots, 2, is_virtual=False):
            pass
        with refused("core-1 is held by process"), held_slots(cores, 1, is_virtual=False):
            pass
        with held_slots(cores, 1, is_virtual=True):
            pass


def test_an_experiment_without_slots_holds_the_first_devices_that_its_servers_see(tmp_path, monkeypatch):
    smi = FakeSmi(tmp_path / "bin")
    smi.behave(devices=devices(3))
    monkeypatch.setenv("PATH", str(smi.directory), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = load_profile("ci-smoke", engine="vllm", overrides=["engine.options.tensor_parallel_size=2"])
    slots = [Slot(index=index, gpus=(f"GPU-{letter * 2}",)) for index, letter in enumerate("abc")]
    with held_devices(two), held_slots(slots, 1, is_virtual=False) as held:
        assert held[0].gpus == ("GPU-cc",)
        with refused(r"GPU-aa is held by process \d+ .*CUDA_VISIBLE_DEVICES"), held_devices(two):
            pass
        with held_devices(load_profile("ci-smoke")):
            pass  # a simulator needs no device
    monkeypatch.setenv("BENCHCTL_LOCKS_DIR", "/dev/null")
    with held_devices(two):
        pass  # a user without a directory for locks measures without them
    with refused("BENCHCTL_LOCKS_DIR"), locked(["GPU-a"]):
        pass


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


def other_process(*names):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_a_device_is_held_by_one_process_at_a_time_which_is_named_and_a_killed_one_holds_nothing():
    process, said = other_process("GPU-a", "core-3")
    assert said == "held"
    named = pytest.raises(HeldError, match=rf"^core-3 is held by process {process.pid} \(")
    with named, locked(["GPU-b", "core-2", "core-3"]):
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
        second.communicate()
        assert said.startswith(f"GPU-a is held by process {parent.pid} ")
        parent.stdin.write("end\n")
        parent.stdin.flush()
        assert parent.wait(10) == 0
        closing = threading.Timer(0.5, parent.stdin.close)
        closing.start()
        assert is_free("GPU-a")
        assert closing.finished.is_set(), "the heir had to end before"
