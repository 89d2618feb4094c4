"""Prints the peaks of a device that only pretends to compute: tensors have shapes and no elements, and events a
clock of their own, by which each call between two of them takes a microsecond.

Run by an interpreter that has torch. What a GPU is asked for, and in which order, is held without one.
"""

import contextlib
import json
import runpy
import types
from pathlib import Path

ROOT = Path(__file__).parents[3]
runpy.run_path(str(ROOT / "benchctl" / "micro" / "inside" / "launch.py"))["stand_in_for_packages"]()

import torch  # noqa: E402

from benchctl.micro.inside import peaks  # noqa: E402

CALL_US = 1.0
notes, clock = [], {"us": 0.0}


class Event:
    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.us = clock["us"]

    def synchronize(self):
        notes.append("wait for event")

    def elapsed_time(self, end):
        return (end.us - self.us) / 1e3


class Stream:
    def wait_stream(self, other):
        notes.append("wait for stream")


class Graph:
    def replay(self):
        clock["us"] += CALL_US


@contextlib.contextmanager
def capturing(graph):
    notes.append("capture")
    yield


@contextlib.contextmanager
def on_stream(stream):
    yield


def counted(kernel):
    """The kernel with a call that takes a microsecond of the pretended clock."""

    def call():
        clock["us"] += CALL_US
        return kernel.call()

    return peaks.replace(kernel, call=call)


torch.cuda = types.SimpleNamespace(
    Event=Event,
    Stream=Stream,
    CUDAGraph=Graph,
    graph=capturing,
    stream=on_stream,
    current_stream=Stream,
    synchronize=lambda: notes.append("synchronize"),
    device_count=lambda: 1,
    empty_cache=lambda: notes.append("empty cache"),
    get_device_properties=lambda _: types.SimpleNamespace(L2_cache_size=50 * 2**20),
)
product, memory_kernels = peaks.product, peaks.memory_kernels
peaks.product = lambda *arguments: counted(product(*arguments))
peaks.memory_kernels = lambda settings: [counted(kernel) for kernel in memory_kernels(settings)]
settings = peaks.PeakSettings(device="meta", rounds=3, least_s=0.0005, sizes=(64, 128), memory_bytes=80 * 10**9)
print(json.dumps({"peaks": peaks.measure_peaks(settings), "notes": notes}))  # noqa: T201 - the answer
