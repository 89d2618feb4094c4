"""The passes of a worker: prepared once, captured once, and refused before they take memory that is not there."""

import math

import pytest
import torch
from fake_device import FakeDevice

from benchctl.micro.inside.dimensions import PassPoint, WorkerError
from benchctl.micro.inside.model import GIB
from benchctl.micro.inside.passes import PassStore


class FakePass:
    """Its output is one number."""

    tolerance = 1e-3

    def __init__(self, device, output=1.0):
        self.logits, self._work = torch.tensor([output]), device.work("eager")

    def run(self):
        self.logits.neg()
        self._work()

    def difference(self, logits):
        return float(((self.logits - logits) / self.logits).abs())


class FakeModel:
    """Each sequence of a pass needs a GiB."""

    name = "tiny in float32 on fake:0"

    def __init__(self, device, *, total=10, failure=None, output=1.0):
        self.device, self.total, self.failure, self.output = device, total * GIB, failure, output
        self.points, self.store = [], None

    def need(self, point):
        return point.batch_size * GIB, 0

    def make(self, point):
        if self.failure is not None:
            raise self.failure
        self.points.append(point)
        return FakePass(self.device, self.output)

    def free_bytes(self):
        return self.total - sum(point.batch_size * GIB for point in self.store._entries)


def store_of(device, **options):
    model = FakeModel(device, **options)
    device.free_bytes = model.free_bytes
    model.store = PassStore(device, model)
    return model.store, model


def decode(batch_size):
    return PassPoint(phase="decode", batch_size=batch_size, context_tokens=8)


COUNTS = {"warmups": 2, "replays": 3}


def test_a_pass_is_prepared_once_and_serves_both_modes():
    device = FakeDevice()
    store, model = store_of(device)
    modes = ("eager", "graph", "eager", "graph")
    answers = [store.measure(decode(1), mode, **COUNTS) for mode in modes]
    assert model.points == [decode(1)]
    assert device.calls.count("capture after 2") == 1
    assert {answer["num_operators"] for answer in answers} == {1}
    assert [answer["output_difference"] for answer in answers] == [None, 0.0, None, 0.0]
    assert all(len(answer["duration_ns"]) == len(answer["start_ns"]) == 3 for answer in answers)


def test_every_measurement_warms_up_in_its_own_mode_before_its_first_mark():
    device = FakeDevice()
    store, _ = store_of(device)
    store.measure(decode(1), "graph", **COUNTS)
    device.calls.clear()
    store.measure(decode(1), "eager", **COUNTS)
    assert device.calls[: device.calls.index("record anchor")] == ["eager", "eager", "synchronize", "synchronize"]
    device.calls.clear()
    store.measure(decode(1), "graph", **COUNTS)
    assert device.calls[: device.calls.index("record anchor")] == ["launch", "launch", "synchronize", "synchronize"]
    assert "eager" not in device.calls


def test_a_capture_that_fails_is_one_message_and_the_next_measurement_succeeds():
    device = FakeDevice(fails_to_capture=RuntimeError("operation not permitted when stream is capturing\nmore"))
    store, _ = store_of(device)
    with pytest.raises(WorkerError, match="measure mode eager alone") as caught:
        store.measure(decode(2), "graph", **COUNTS)
    assert caught.value.kind == "capture"
    assert "decode of 2 sequences" in str(caught.value)
    assert "operation not permitted when stream is capturing" in str(caught.value)
    assert "more" not in str(caught.value)
    assert store.measure(decode(2), "eager", **COUNTS)["output_difference"] is None


def test_outputs_of_a_graph_that_differ_from_the_eager_ones_are_refused():
    device = FakeDevice()
    store, model = store_of(device)
    prepared = FakePass(device)
    model.make = lambda point: prepared

    def capture(work, warmups):
        work()
        return lambda: setattr(prepared, "logits", torch.tensor([1.01]))

    device.capture = capture
    with pytest.raises(WorkerError, match=r"differ by 0\.0099 of the largest") as caught:
        store.measure(decode(1), "graph", **COUNTS)
    assert caught.value.kind == "outputs"


def test_outputs_that_are_not_finite_are_refused_in_either_mode():
    for mode in ("eager", "graph"):
        store, _ = store_of(FakeDevice(), output=math.nan)
        with pytest.raises(WorkerError) as caught:
            store.measure(decode(1), mode, **COUNTS)
        assert caught.value.kind == "outputs"


def test_a_pass_that_does_not_fit_is_refused_before_anything_is_allocated():
    store, model = store_of(FakeDevice())
    with pytest.raises(WorkerError, match=r"need 11\.00 GiB .* 10\.00 GiB are free.*smaller batch size") as caught:
        store.measure(decode(11), "eager", **COUNTS)
    assert caught.value.kind == "memory"
    assert model.points == []


def test_points_are_checked_one_by_one_and_nothing_is_allocated():
    store, model = store_of(FakeDevice())
    store.check_fits([decode(6), decode(7)])
    with pytest.raises(WorkerError, match="decode of 11 sequences"):
        store.check_fits([decode(6), decode(11)])
    assert model.points == []


def test_the_pass_that_was_not_used_for_longest_makes_room():
    store, model = store_of(FakeDevice())
    for batch_size in (4, 5, 4, 3):  # 3 does not fit beside 4 and 5, and 5 was used before 4
        store.measure(decode(batch_size), "eager", **COUNTS)
    assert [point.batch_size for point in store._entries] == [4, 3]
    assert [point.batch_size for point in model.points] == [4, 5, 3]


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "system"],
)
def test_memory_that_runs_out_nevertheless_is_one_message_and_the_next_measurement_succeeds(error):
    store, model = store_of(FakeDevice(), failure=error)
    with pytest.raises(WorkerError, match=r"memory ran out .*; choose a smaller batch size") as caught:
        store.measure(decode(1), "eager", **COUNTS)
    assert caught.value.kind == "memory"
    model.failure = None
    assert store.measure(decode(1), "eager", **COUNTS)["clock"] == "device"


def test_memory_that_runs_out_in_a_capture_is_no_failure_of_the_capture():
    store, _ = store_of(FakeDevice(fails_to_capture=OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(WorkerError) as caught:
        store.measure(decode(1), "graph", **COUNTS)
    assert caught.value.kind == "memory"
    assert not store._entries, "what it held is given back"


def test_another_error_stays_what_it_is():
    store, _ = store_of(FakeDevice(), failure=RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        store.measure(decode(1), "eager", **COUNTS)
