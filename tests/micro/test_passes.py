"""The passes of a worker: prepared once for both modes, captured once, and given back when memory runs out."""

import math

import pytest
import torch
from fake_device import FakeDevice

from benchctl.micro.inside import WorkerError, is_out_of_memory
from benchctl.micro.inside.model import PassPoint
from benchctl.micro.inside.passes import Passes


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
