"""Prints the peaks of a device that only pretends to compute: tensors have shapes and no elements, and events a
clock of their own, by which each call between two of them takes a microsecond.

Run by an interpreter that has torch. What a GPU is asked for, and in which order, is held without one.
"""

import contextlib
import dataclasses
import json
import runpy
import types
from pathlib import Path

ROOT = Path(__file__).parents[3]
runpy.run_path(str(ROOT / "benchctl" / "micro" / "inside" / "program.py"))

import torch  # noqa: E402

from benchctl.micro.inside import peaks  # noqa: E402
from benchctl.micro.inside.replays import CudaDevice  # noqa: E402

CALL_US = 1.0
notes, clock = [], {"us": 0.0}


class Event:
    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.us = clock["us"]

    def elapsed_time(self, end):
        return (end.us - self.us) / 1e3


class Stream:
    def wait_stream(self, other):
        notes.append("wait for stream")


class Graph:
    def capture_begin(self):
        notes.append("capture")

    def capture_end(self):
        pass

    def replay(self):
        clock["us"] += CALL_US


@contextlib.contextmanager
def on_stream(stream):
    yield


def counted(kernel):
    """The kernel with a call that takes a microsecond of the pretended clock."""

    def call():
        clock["us"] += CALL_US
        return kernel.call()

    return dataclasses.replace(kernel, call=call)


torch.cuda = types.SimpleNamespace(
    Event=Event,
    Stream=Stream,
    CUDAGraph=Graph,
    is_available=lambda: True,
    set_device=lambda device: None,
    stream=on_stream,
    current_stream=Stream,
    synchronize=lambda: notes.append("synchronize"),
    device_count=lambda: 1,
    empty_cache=lambda: notes.append("empty cache"),
    mem_get_info=lambda: (80 * 10**9, 80 * 10**9),
    memory_reserved=lambda: 0,
    memory_allocated=lambda: 0,
    get_device_properties=lambda _: types.SimpleNamespace(
        name="pretended",
        total_memory=80 * 10**9,
        major=9,
        minor=0,
        multi_processor_count=1,
        L2_cache_size=50 * 2**20,
    ),
)
product, memory_kernels = peaks.product, peaks.memory_kernels
peaks.product = lambda *arguments: counted(product(*arguments))
peaks.memory_kernels = lambda *arguments: [counted(kernel) for kernel in memory_kernels(*arguments)]
device = CudaDevice(0)
device.torch_device = torch.device("meta")
with torch.inference_mode():
    measured = peaks.measure_peaks(device, rounds=3, buffer_bytes=2 * 2**30, least_s=0.0005, sizes=(64, 128))
print(json.dumps({"peaks": measured, "notes": notes}))  # noqa: T201 - the answer
