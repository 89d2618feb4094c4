"""The inside of a worker: the order in which a device is asked for passes, captures and replays."""

import contextlib
import gc
import itertools
import math
import types
from dataclasses import replace
from functools import partial

import pytest
from support.guided.tensors import torch

from benchctl.micro.inside import WorkerError, is_out_of_memory, peaks
from benchctl.micro.inside.model import PassPoint
from benchctl.micro.inside.passes import Passes
from benchctl.micro.inside.replays import open_device, timed_replays
from benchctl.micro.worker import cpu_cache_bytes

COUNTS = {"warmups": 2, "replays": 3}


class FakeTorch(types.ModuleType):
    """A torch that notes the calls of its CUDA part in order, without a device; work takes a millisecond.

    ``fails`` are the calls that raise.
    """

    def __init__(self, *, num_devices=1, fails=None):
        super().__init__("torch")
        self.calls, self.fails, self.ms, self.current = [], fails or {}, 0.0, "ordinary"
        self.__version__ = "2.99.0+fake"
        self.device = lambda kind, index=None: kind if index is None else f"{kind}:{index}"
        self.version = types.SimpleNamespace(cuda="99.0")
        allocations = itertools.count(3, 2)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: num_devices > 0,
            device_count=lambda: num_devices,
            set_device=lambda device: self.note(f"set device {device}"),
            synchronize=partial(self.note, "synchronize"),
            empty_cache=partial(self.note, "empty cache"),
            current_stream=lambda: self.stream(self.current),
            stream=self.on_stream,
            Stream=lambda: self.stream("side"),
            Event=lambda enable_timing: FakeEvent(self),
            CUDAGraph=lambda: types.SimpleNamespace(
                capture_begin=partial(self.note, "capture begins"),
                capture_end=partial(self.note, "capture ends"),
                replay=partial(self.work, "launch"),
            ),
            memory_stats=lambda: {"num_device_alloc": next(allocations)},
            mem_get_info=lambda: (1_000, 9_000),
            get_device_properties=lambda _: types.SimpleNamespace(
                name="Fake 100", total_memory=9_000, major=9, minor=0, multi_processor_count=132, uuid="0-1-2"
            ),
        )

    def note(self, call):
        self.calls.append(f"{call} on {self.current}" if self.current != "ordinary" else call)
        if call in self.fails:
            raise self.fails[call]

    def work(self, name="work"):
        self.note(name)
        self.ms += 1

    def stream(self, name):
        waits = lambda other: self.note(f"{name} waits for {other.name}")  # noqa: E731
        return types.SimpleNamespace(name=name, wait_stream=waits)

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class FakeEvent:
    def __init__(self, fake):
        self.fake = fake

    def record(self):
        self.fake.note("record")
        self.ms = self.fake.ms

    def elapsed_time(self, end):
        return end.ms - self.ms


class FakePass:
    """Its output is one number."""

    tolerance = 1e-3

    def __init__(self, work, point, output):
        self.point, self.logits, self._work = point, torch.tensor([output]), work

    def run(self):
        self.logits.neg()
        self._work("eager")

    def difference(self, logits):
        return float(((self.logits - logits) / self.logits).abs())


@pytest.fixture
def opened(monkeypatch):
    """Opens a device over a torch of the given sort."""

    def opened(name="cuda:0", **options):
        fake = FakeTorch(**options)
        monkeypatch.setattr("benchctl.micro.inside.replays.torch", fake)
        device = open_device(name)
        fake.calls.clear()
        return device, fake

    return opened


@pytest.fixture
def prepared(opened):
    """Passes on a device, its torch, and the model, whose ``points`` were made."""

    def prepared(*, failure=None, output=1.0, **options):
        device, fake = opened(**options)
        model = types.SimpleNamespace(name="tiny in float32 on fake:0", points=[], failure=failure)

        def make(point):
            if model.failure is not None:
                raise model.failure
            model.points.append(point)
            return FakePass(fake.work, point, output)

        model.make = make
        return Passes(device, model), fake, model

    return prepared


def decode(batch_size):
    return PassPoint(phase="decode", batch_size=batch_size, context_tokens=8)


def test_a_pass_is_prepared_once_and_serves_both_modes_until_another_point_takes_its_place(prepared):
    passes, fake, model = prepared()
    answers = [passes.measure(decode(1), mode, **COUNTS) for mode in ("eager", "graph", "eager", "graph")]
    assert (model.points, fake.calls.count("capture begins on side")) == ([decode(1)], 1)
    assert {answer["num_operators"] for answer in answers} == {1}
    assert all(len(answer["duration_ns"]) == len(answer["start_ns"]) == 3 for answer in answers)
    for batch_size in (5, 1):
        passes.measure(decode(batch_size), "graph", **COUNTS)
    assert [point.batch_size for point in model.points] == [1, 5, 1]
    assert fake.calls.count("capture begins on side") == 3


def test_every_measurement_warms_up_in_its_own_mode_before_its_first_mark(prepared):
    passes, fake, _ = prepared()
    passes.measure(decode(1), "graph", **COUNTS)
    for mode, call in (("eager", "eager"), ("graph", "launch")):
        fake.calls.clear()
        passes.measure(decode(1), mode, **COUNTS)
        assert fake.calls[:4] == [call, call, "synchronize", "record"]
        assert {"eager", "launch"} & set(fake.calls) == {call}


def test_a_capture_that_fails_is_one_message_and_the_next_measurement_succeeds(prepared):
    error = RuntimeError("operation not permitted when stream is capturing\nmore")
    passes, _, _ = prepared(fails={"capture begins": error})
    message = "decode of 2 sequences.*operation not permitted when stream is capturing.*measure mode eager alone"
    with pytest.raises(WorkerError, match=message) as caught:
        passes.measure(decode(2), "graph", **COUNTS)
    assert (caught.value.kind, "more" in str(caught.value)) == ("capture", False)
    assert passes.measure(decode(2), "eager", **COUNTS)["duration_ns"]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_outputs_that_are_not_finite_are_refused_in_either_mode(prepared, mode):
    with pytest.raises(WorkerError) as caught:
        prepared(output=math.nan)[0].measure(decode(1), mode, **COUNTS)
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
def test_after_memory_that_runs_out_the_next_measurement_succeeds(prepared, error, is_memory):
    assert is_out_of_memory(error) is is_memory
    passes, _, model = prepared(failure=error)
    with pytest.raises(type(error)):
        passes.measure(decode(1), "eager", **COUNTS)
    model.failure = None
    assert passes.measure(decode(1), "eager", **COUNTS)["clock"] == "device"


def test_memory_that_runs_out_in_a_capture_is_no_failure_of_the_capture(prepared):
    passes, _, _ = prepared(fails={"capture begins": OutOfMemoryError("CUDA out of memory.")})
    with pytest.raises(OutOfMemoryError):
        passes.measure(decode(1), "graph", **COUNTS)


def test_replays_are_event_record_launch_event_record_and_one_synchronisation(opened):
    device, fake = opened()
    times = timed_replays(device, fake.work, 2)
    made = ["record"] * 5 + ["synchronize"]  # events exist on the device from their first record
    replay = ["record", "work", "record"]
    assert fake.calls == [*made, "synchronize", "record", *replay, *replay, "synchronize"]
    assert (times["clock"], times["num_allocations"], times["duration_ns"]) == ("device", 2, [10**6, 10**6])
    first, second = times["start_ns"]
    assert second - first == 10**6
    names = ("free_bytes", "device_uuid", "compute_capability")
    assert [device.describe()[name] for name in names] == [1_000, "GPU-0-1-2", "9.0"]


def test_no_garbage_is_collected_during_the_replays_and_all_is_as_before_afterwards(opened):
    device, states = opened()[0], []
    timed_replays(device, lambda: states.append(gc.isenabled()), 3)
    assert (states, gc.isenabled()) == ([False] * 3, True)
    with pytest.raises(ZeroDivisionError):
        timed_replays(device, lambda: 1 // 0, 1)
    assert gc.isenabled()


def test_the_stream_of_the_warm_up_is_the_one_of_the_capture_and_waits_for_the_ordinary_one(opened):
    device, fake = opened("cuda")
    launch = device.capture(fake.work, 1)
    assert fake.calls == [
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
    fake.calls.clear()
    launch()
    assert fake.calls == ["launch"], "the graph is launched on the ordinary stream"


@pytest.mark.parametrize("failing", [["capture begins"], ["work", "capture ends"], ["capture ends"]])
def test_after_a_capture_that_fails_first_the_ordinary_stream_is_the_current_one(opened, failing):
    device, fake = opened(fails={call: RuntimeError(call) for call in failing})
    with pytest.raises(RuntimeError, match=failing[0]):
        device.capture(fake.work, 3)
    assert fake.current == "ordinary"


@pytest.mark.parametrize(
    ("num_devices", "name", "message"),
    [
        (0, "cuda:0", r"device cuda:0: torch 2\.99\.0\+fake sees no CUDA device; name another with --device"),
        (2, "cuda:2", "sees 2 CUDA devices"),
        (1, "cuda:x", "it must be cpu, cuda or cuda:N"),
        (1, "tpu", "it must be cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(opened, num_devices, name, message):
    with pytest.raises(WorkerError, match=message) as caught:
        opened(name, num_devices=num_devices)
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


@pytest.fixture(scope="module")
def pretended():
    """Peaks of a device that only pretends to compute, whose tensors have no elements, and the calls to it.

    Each call takes a millisecond of its own clock.
    """
    fake, product, memory_kernels = FakeTorch(), peaks.product, peaks.memory_kernels

    def counted(kernel):
        return replace(kernel, call=lambda: (fake.work(kernel.quantity), kernel.call()))

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(torch, "cuda", fake.cuda)
        patch.setattr(peaks, "product", lambda *arguments: counted(product(*arguments)))
        patch.setattr(peaks, "memory_kernels", lambda *arguments: [*map(counted, memory_kernels(*arguments))])
        device = open_device("cuda:0")
        device.torch_device = torch.device("meta")
        sizes = {"sizes": (64, 128), "buffer_bytes": 2**31}
        return peaks.measure_peaks(device, rounds=3, least_s=0.0005, **sizes), fake.calls


def medians(pretended, quantity):
    series = (each for each in pretended[0]["series"] if each["quantity"] == quantity)
    return {(each.get("dtype"), each["setting"]): sorted(each["values"])[1] for each in series}


def test_a_rate_is_the_work_of_a_call_over_the_time_between_two_events(pretended):
    products = medians(pretended, "matmul")
    assert {dtype for dtype, _ in products} == {"bfloat16", "float16", "float32", "fp8", "int8"}
    for (_, size), rate in products.items():
        assert rate == pytest.approx(2 * int(size) ** 3 / 1e-3)
    buffer_bytes = 2 * 2**30
    assert medians(pretended, "copy") == {(None, str(buffer_bytes)): pytest.approx(2 * buffer_bytes / 1e-3)}
    assert medians(pretended, "read") == {(None, str(buffer_bytes)): pytest.approx(buffer_bytes / 1e-3)}


def test_launches_are_timed_by_the_host_in_a_row_waited_for_and_in_a_graph_that_is_captured_once(pretended):
    launches = medians(pretended, "launch")
    assert [setting for _, setting in launches] == ["in a row", "and wait", "in a graph"]
    assert min(launches.values()) > 0
    peaks, notes = pretended
    assert notes.count("capture begins on side") == 1
    assert "all-reduce" not in {each["quantity"] for each in peaks["series"]}
    assert peaks["unmeasured"] == {}
