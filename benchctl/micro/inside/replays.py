"""Devices, and replays of one piece of work on them, in the order that makes their times right.

* **Warm-up** before anything is timed: libraries choose their kernels, load them and take their workspaces at the
  first call. Before a capture it runs on a side stream, as the capture does, because what is set up on first use
  must not be set up while capturing.
* **One pair of marks for each replay**, on the stream of the replay, and one synchronisation after the last. The
  device never waits for the host between replays, unless the host is the slower one, which is then what is
  measured: the times of eager passes that are bound by their launches.
* **Marks exist before the first replay**, and each was recorded once: a device makes an event at its first record.
* **Nothing else happens meanwhile**: the garbage collector is off, and memory that the device itself had to hand
  out during the replays is counted (0 where buffers and the allocator's cache hold everything).

Replays of a small model find their weights in the device's cache where they fit into it (50 MB on an H100): a
server, whose other work evicts them, has to read them from memory.
"""

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from typing import Any

import torch

from benchctl.micro.inside import WorkerError

Work = Callable[[], None]
MIN_CAPTURE_WARMUPS = 3
"""Passes on the side stream before a capture at least, as torch advises."""
NS_PER_MS = 1_000_000


class HostMark:
    """A moment on the host's monotonic clock."""

    def __init__(self) -> None:
        self.ns = 0

    def record(self) -> None:
        self.ns = monotonic_ns()


class CpuDevice:
    """The host itself: work is done when its call returns, and there are no graphs."""

    clock = "host"
    torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing: calls return when their work is done."""

    def marks(self, count: int) -> list[HostMark]:
        return [HostMark() for _ in range(count)]

    def elapsed_ns(self, start: HostMark, end: HostMark) -> int:
        return end.ns - start.ns

    def capture(self, _work: Work, _warmups: int) -> Work:
        raise WorkerError(
            "device", "mode graph needs a CUDA device, and this worker runs on cpu; measure mode eager alone there"
        )

    def num_allocations(self) -> int:
        """0: a CPU's memory is handed out by the system page by page, unseen by torch."""
        return 0

    def describe(self) -> dict[str, Any]:
        return {"cpu_capability": torch.backends.cpu.get_cpu_capability()}


class CudaDevice:
    """One CUDA device through torch, on its current stream."""

    clock = "device"

    def __init__(self, number: int) -> None:
        """Raises WorkerError when this torch sees no such device."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number >= count:
            devices = f"{count} CUDA devices" if count else "no CUDA device"
            raise WorkerError(
                "device",
                f"device cuda:{number}: torch {torch.__version__} sees {devices}; name another with --device (cpu "
                "is always there), or an interpreter whose torch was built for CUDA with --python",
            )
        self.torch_device = torch.device("cuda", number)
        torch.cuda.set_device(self.torch_device)
        self._side = torch.cuda.Stream()

    def synchronize(self) -> None:
        """Wait until all work is done."""
        torch.cuda.synchronize()

    def marks(self, count: int) -> list[torch.cuda.Event]:
        """Marks on the stream of the replays, each recorded once already."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        return events

    def elapsed_ns(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Time between two marks that the device has reached."""
        return round(start.elapsed_time(end) * NS_PER_MS)

    def capture(self, work: Work, warmups: int) -> Work:
        """The call that launches a graph of ``work``, after ``warmups`` runs of it, and at least three.

        As ``torch.cuda.graph``, which after a failure would leave its stream the current one.
        """
        ordinary = torch.cuda.current_stream()
        self._side.wait_stream(ordinary)
        with torch.cuda.stream(self._side):
            for _ in range(max(warmups, MIN_CAPTURE_WARMUPS)):
                work()
        ordinary.wait_stream(self._side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            graph.capture_begin()
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it says again that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay

    def num_allocations(self) -> int:
        """Pieces of memory that the device has handed out since the process began."""
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0))

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        uuid = getattr(properties, "uuid", None)
        return {
            "device_name": properties.name,
            "device_uuid": None if uuid is None else f"GPU-{uuid}",
            "free_bytes": torch.cuda.mem_get_info()[0],
            "total_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_processors": properties.multi_processor_count,
            "cache_bytes": getattr(properties, "L2_cache_size", None),
            "cuda_version": torch.version.cuda,
        }


def open_device(name: str) -> CpuDevice | CudaDevice:
    """The device of a name such as ``cpu`` or ``cuda:0``; WorkerError for one that is not there."""
    if name == "cpu":
        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d*))?", name)
    if match is None:
        raise WorkerError("settings", f"device is {name!r}; it must be cpu, cuda or cuda:N with a whole number N")
    return CudaDevice(int(match[1] or 0))


def warm_up(device: CpuDevice | CudaDevice, work: Work, count: int) -> None:
    for _ in range(count):
        work()
    device.synchronize()


def timed_replays(device: CpuDevice | CudaDevice, replay: Work, count: int) -> dict[str, Any]:
    """Times of ``count`` replays, as fields of ``benchctl.micro.worker.ForwardTimes``."""
    anchor, *marks = device.marks(1 + 2 * count)
    pairs = list(zip(marks[::2], marks[1::2], strict=True))
    collects_garbage = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        device.synchronize()
        allocations_before = device.num_allocations()
        anchor.record()
        begin_ns = monotonic_ns()
        for start, end in pairs:
            start.record()
            replay()
            end.record()
        device.synchronize()
        wall_ns = monotonic_ns() - begin_ns
    finally:
        if collects_garbage:
            gc.enable()
    return {
        "clock": device.clock,
        "start_ns": [begin_ns + device.elapsed_ns(anchor, start) for start, _ in pairs],
        "duration_ns": [device.elapsed_ns(start, end) for start, end in pairs],
        "wall_ns": wall_ns,
        "num_allocations": device.num_allocations() - allocations_before,
    }
