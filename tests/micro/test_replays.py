"""The order in which a device is asked for warm-up and replays."""

import gc

import pytest
from fake_device import WORK_NS, FakeDevice

from benchctl.micro.inside.replays import timed_replays


def test_every_replay_lies_between_marks_of_its_own_and_one_synchronisation_follows_the_last():
    device = FakeDevice()
    timed_replays(device, device.work(), 2)
    replays = ["record start 0", "work", "record end 0", "record start 1", "work", "record end 1"]
    assert device.calls[:9] == ["synchronize", "record anchor", *replays, "synchronize"]
    assert all(call.startswith("elapsed") for call in device.calls[9:]), "times are asked for after the last replay"


def test_durations_are_those_between_the_marks_of_a_replay_and_starts_are_on_the_clock_of_the_host():
    device = FakeDevice(allocations=[3, 5])
    times = timed_replays(device, device.work(), 3)
    assert times["duration_ns"] == [WORK_NS] * 3
    first, *others = times["start_ns"]
    assert [start - first for start in others] == [WORK_NS, 2 * WORK_NS]
    assert (times["clock"], times["num_allocations"], times["wall_ns"] > 0) == ("device", 2, True)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_during_the_replays_and_all_is_as_before_afterwards(is_enabled):
    device, states = FakeDevice(), []
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        timed_replays(device, lambda: states.append(gc.isenabled()), 3)
        assert states == [False] * 3
        assert gc.isenabled() is is_enabled
        with pytest.raises(ZeroDivisionError):
            timed_replays(device, lambda: 1 // 0, 1)
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
