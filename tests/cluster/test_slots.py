"""Devices and cores that blocks get which run beside each other on one host."""

import os
from dataclasses import replace

import pytest

from benchctl.cluster.slots import Host, slots_of_host, this_host
from benchctl.errors import UsageError
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


def test_each_gpu_is_a_slot_with_cores_of_its_own_numa_node():
    host = host_of(num_gpus=8)
    slots = slots_of_host(host, 8, 1)
    assert [slot.gpus for slot in slots] == [(f"GPU-{i}",) for i in range(8)]
    assert_disjoint(slots)
    assert {len(slot.cores) for slot in slots} == {4}, "two whole physical cores, each with its hardware threads"
    for slot in slots:
        assert {host.numa_nodes[core] for core in slot.cores} == {slot.index // 4}
    assert slots[0].cores == (0, 1, 16, 17)


def test_the_cores_of_a_device_do_not_depend_on_the_number_of_blocks_nor_on_hidden_devices():
    (slot,) = slots_of_host(host_of(num_gpus=8, visible=(5,)), 1, 1)
    assert (slot.gpus, slot.cores) == (("GPU-5",), slots_of_host(host_of(num_gpus=8), 8, 1)[5].cores)


def test_devices_of_one_block_are_of_one_numa_node_as_far_as_they_go():
    host = host_of(num_gpus=8)
    three = slots_of_host(host, 2, 3)
    assert [slot.gpus for slot in three] == [("GPU-0", "GPU-1", "GPU-2"), ("GPU-4", "GPU-5", "GPU-6")]
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
    assert [slot.cores for slot in slots] == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13)]
    assert all(slot.gpus == () for slot in slots)


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


def test_this_host_is_read_with_its_affinity(tmp_path):
    host = this_host()
    assert sorted(thread for core in host.cores for thread in core) == sorted(os.sched_getaffinity(0))
    assert len(slots_of_host(host, len(host.cores), 0)) == len(host.cores)


def test_hardware_threads_of_one_core_are_found_in_the_system(tmp_path, monkeypatch):
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


def test_parts_of_devices_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-12ab")
    with pytest.raises(UsageError, match="hands out whole devices"):
        this_host()
