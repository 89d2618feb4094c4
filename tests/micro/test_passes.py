"""The inside of a worker: the order in which a device is asked for passes, captures and replays."""

import gc
import importlib
import math
import sys
from itertools import pairwise

import pytest
import torch
from fake_device import WORK_NS, FakeDevice
from fake_torch import FakeTorch

from benchctl.micro.inside import WorkerError, is_out_of_memory
from benchctl.micro.inside.model import PassPoint
from benchctl.micro.inside.passes import Passes
from benchctl.micro.inside.replays import timed_replays
from benchctl.micro.worker import cpu_cache_bytes


class FakePass:
    """Its output is one number."""

    tolerance = 1e-3

    def __init__(self, device, point, output=1.0):
        self.point, self.logits, self._work = point, torch.tensor([output]), device.work("eager")

    def run(self):
        self.logits.neg()
        self._work()

    def difference(self, logits):
        return float(((self.logits - logits) / self.logits).abs())


class FakeModel:
    name = "tiny in float32 on fake:0"

    def __init__(self, device, *, failure=None, output=1.0):
        self.device, self.failure, self.output = device, failure, output
        self.points = []

    def make(self, point):
        if self.failure is not None:
            raise self.failure
        self.points.append(point)
        return FakePass(self.device, point, self.output)


def passes_of(device, **options):
    model = FakeModel(device, **options)
    return Passes(device, model), model


def decode(batch_size):
    return PassPoint(phase="decode", batch_size=batch_size, context_tokens=8)


COUNTS = {"warmups": 2, "replays": 3}


def test_a_pass_is_prepared_once_and_serves_both_modes_until_another_point_takes_its_place():
    device = FakeDevice()
    passes, model = passes_of(device)
    answers = [passes.measure(decode(1), mode, **COUNTS) for mode in ("eager", "graph", "eager", "graph")]
    assert model.points == [decode(1)]
    assert device.calls.count("capture after 2") == 1
    assert {answer["num_operators"] for answer in answers} == {1}
    assert all(len(answer["duration_ns"]) == len(answer["start_ns"]) == 3 for answer in answers)
    for batch_size in (5, 1):
        passes.measure(decode(batch_size), "graph", **COUNTS)
    assert [point.batch_size for point in model.points] == [1, 5, 1]
    assert device.calls.count("capture after 2") == 3


def test_every_measurement_warms_up_in_its_own_mode_before_its_first_mark():
    device = FakeDevice()
    passes, _ = passes_of(device)
    passes.measure(decode(1), "graph", **COUNTS)
    for mode, call in (("eager", "eager"), ("graph", "launch")):
        device.calls.clear()
        passes.measure(decode(1), mode, **COUNTS)
        assert device.calls[: device.calls.index("record anchor")] == [call, call, "synchronize", "synchronize"]
        assert {"eager", "launch"} & set(device.calls) == {call}


def test_a_capture_that_fails_is_one_message_and_the_next_measurement_succeeds():
    device = FakeDevice(fails_to_capture=RuntimeError("operation not permitted when stream is capturing\nmore"))
    passes, _ = passes_of(device)
    with pytest.raises(WorkerError, match="measure mode eager alone") as caught:
        passes.measure(decode(2), "graph", **COUNTS)
    assert caught.value.kind == "capture"
    for words in ("decode of 2 sequences", "operation not permitted when stream is capturing"):
        assert words in str(caught.value)
    assert "more" not in str(caught.value)
    assert passes.measure(decode(2), "eager", **COUNTS)["duration_ns"]


def test_outputs_of_a_graph_that_differ_from_the_eager_ones_are_refused():
    device = FakeDevice()
    passes, model = passes_of(device)
    prepared = FakePass(device, decode(1))
    model.make = lambda point: prepared

    def capture(work, warmups):
        work()
        return lambda: setattr(prepared, "logits", torch.tensor([1.01]))

    device.capture = capture
    with pytest.raises(WorkerError, match=r"differ by 0\.0099 of the largest") as caught:
        passes.measure(decode(1), "graph", **COUNTS)
    assert caught.value.kind == "outputs"


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_outputs_that_are_not_finite_are_refused_in_either_mode(mode):
    passes, _ = passes_of(FakeDevice(), output=math.nan)
    with pytest.raises(WorkerError) as caught:
        passes.measure(decode(1), mode, **COUNTS)
    assert caught.value.kind == "outputs"


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
    ],
    ids=["cuda", "cpu", "system", "other"],
)
def test_after_memory_that_runs_out_the_next_measurement_succeeds(error, is_memory):
    assert is_out_of_memory(error) is is_memory
    passes, model = passes_of(FakeDevice(), failure=error)
    with pytest.raises(type(error)):
        passes.measure(decode(1), "eager", **COUNTS)
    model.failure = None
    assert passes.measure(decode(1), "eager", **COUNTS)["clock"] == "device"


def test_memory_that_runs_out_in_a_capture_is_no_failure_of_the_capture():
    passes, _ = passes_of(FakeDevice(fails_to_capture=OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(OutOfMemoryError):
        passes.measure(decode(1), "graph", **COUNTS)


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
