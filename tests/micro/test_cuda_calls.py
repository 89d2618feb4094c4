"""Calls to CUDA, in order, by a torch that notes them: what can be held without a device."""

import importlib
import sys
from itertools import pairwise

import pytest
from fake_torch import FakeTorch

from benchctl.micro.inside import WorkerError
from benchctl.micro.inside.replays import timed_replays
from benchctl.micro.worker import cpu_cache_bytes

DEVICES = "benchctl.micro.inside.replays"


@pytest.fixture
def fake_devices(monkeypatch):
    """Makes the module of devices over a torch of the given sort."""

    def make(**options):
        torch = FakeTorch(**options)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.delitem(sys.modules, DEVICES, raising=False)
        return importlib.import_module(DEVICES), torch

    yield make
    sys.modules.pop(DEVICES, None)


def test_replays_are_event_record_launch_event_record_and_one_synchronisation(fake_devices):
    devices, torch = fake_devices()
    device = devices.open_device("cuda:0")
    torch.calls.clear()
    times = timed_replays(device, lambda: torch.note("launch"), 2)
    made = ["record"] * 5 + ["synchronize"]  # events exist on the device from their first record
    replay = ["record", "launch", "record"]
    assert torch.calls == [*made, "synchronize", "record", *replay, *replay, "synchronize"]
    assert (times["clock"], times["num_allocations"], len(times["duration_ns"])) == ("device", 0, 2)
    described = device.describe()
    names = ("free_bytes", "device_uuid", "compute_capability")
    assert [described[name] for name in names] == [1_000, "GPU-0-1-2", "9.0"]


def test_the_stream_of_the_warm_up_is_the_one_of_the_capture_and_waits_for_the_ordinary_one(fake_devices):
    devices, torch = fake_devices()
    device = devices.open_device("cuda")
    torch.calls.clear()
    launch = device.capture(lambda: torch.note("work"), 1)
    assert torch.calls == [
        "side waits for ordinary",
        *["work on side"] * 3,
        "ordinary waits for side",
        "synchronize",
        "empty cache",
        "capture begins on side",
        "work on side",
        "capture ends on side",
        "synchronize",
    ]
    torch.calls.clear()
    launch()
    assert torch.calls == ["launch"], "the graph is launched on the ordinary stream"


@pytest.mark.parametrize(
    ("fails", "num_ends"),
    [
        ({"capture begins": "first"}, 0),
        ({"work": "first", "capture ends": "second"}, 1),
        ({"capture ends": "first"}, 1),
    ],
)
def test_after_a_capture_that_fails_first_the_ordinary_stream_is_the_current_one(fake_devices, fails, num_ends):
    devices, torch = fake_devices(fails=fails)
    with pytest.raises(RuntimeError, match="first"):
        devices.open_device("cuda:0").capture(lambda: torch.note("work"), 3)
    assert torch.current == "ordinary"
    is_begun = "capture begins on side" in torch.calls
    assert torch.calls.count("capture ends on side") == (num_ends if is_begun else 0)


@pytest.mark.parametrize(
    ("num_devices", "name", "message"),
    [
        (0, "cuda:0", r"device cuda:0: torch 2\.99\.0\+fake sees no CUDA device; name another with --device"),
        (2, "cuda:2", "sees 2 CUDA devices"),
        (1, "cuda:x", "it must be cpu, cuda or cuda:N"),
        (1, "tpu", "it must be cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(fake_devices, num_devices, name, message):
    devices, _ = fake_devices(num_devices=num_devices)
    with pytest.raises(WorkerError, match=message) as caught:
        devices.open_device(name)
    assert caught.value.kind in {"device", "settings"}


def test_a_cache_that_cores_share_counts_once(tmp_path):
    for core, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for level, size in enumerate(["32K", "1024K", "32768K"], 1):
            cache = tmp_path / f"cpu{core}" / "cache" / f"index{level}"
            cache.mkdir(parents=True)
            (cache / "shared_cpu_list").write_text(f"{shared}\n")
            (cache / "size").write_text(f"{size}\n")
    assert [cpu_cache_bytes(cores, tmp_path) for cores in ([0, 1], [0, 1, 3], [7])] == [32 << 20, 64 << 20, None]
    (tmp_path / "cpu0" / "cache" / "index3" / "size").unlink()
    assert cpu_cache_bytes([0], tmp_path) is None


def test_the_cpu_has_no_graphs_and_the_clock_of_the_host(fake_devices):
    devices, torch = fake_devices()
    device = devices.open_device("cpu")
    times = timed_replays(device, lambda: None, 5)
    assert (times["clock"], torch.calls) == ("host", [])
    spans = list(zip(times["start_ns"], times["duration_ns"], strict=True))
    assert all(start <= start + duration <= later for (start, duration), (later, _) in pairwise(spans))
    with pytest.raises(WorkerError, match="mode graph needs a CUDA device"):
        device.capture(lambda: None, 3)
