"""The device that runs a pass, for a CPU and for a CUDA device."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any, Literal

import torch

from benchctl.micro.inside.failures import WorkerError
from benchctl.micro.inside.replays import Mark, Work

NS_PER_MS = 1_000_000
_GROUP = Path("/sys/fs/cgroup")


class HostMark:
    """A moment on the host's monotonic clock."""

    def __init__(self) -> None:
        self.ns = 0

    def record(self) -> None:
        self.ns = monotonic_ns()


class CpuDevice:
    """The host itself: work is done when its call returns, and there are no graphs."""

    clock: Literal["host"] = "host"
    can_capture = False
    torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing: calls return when their work is done."""

    def marks(self, count: int) -> list[HostMark]:
        return [HostMark() for _ in range(count)]

    def elapsed_ns(self, start: HostMark, end: HostMark) -> int:
        return end.ns - start.ns

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture(self, _work: Work) -> Work:
        raise WorkerError(
            "device", "mode graph needs a CUDA device, and this worker runs on cpu; measure mode eager alone there"
        )

    def num_allocations(self) -> int:
        """0: a CPU's memory is handed out by the system page by page, unseen by torch."""
        return 0

    def free_bytes(self) -> int:
        """Memory that can be had without swapping, within the limit of a container; 0 where it is unknown."""
        return min(_available_bytes(), _container_bytes())

    def describe(self) -> Mapping[str, Any]:
        return {
            "device_name": _cpu_name(),
            "total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "cache_bytes": cpu_cache_bytes(os.sched_getaffinity(0)),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


class CudaDevice:
    """One CUDA device through torch, on its current stream."""

    clock: Literal["device"] = "device"
    can_capture = True

    def __init__(self, name: str) -> None:
        """Raises WorkerError when this torch sees no such device."""
        self.torch_device = _cuda_device(name)
        torch.cuda.set_device(self.torch_device)
        self._side = torch.cuda.Stream()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def marks(self, count: int) -> list[Mark]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        return events

    def elapsed_ns(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        return round(start.elapsed_time(end) * NS_PER_MS)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        ordinary = torch.cuda.current_stream()
        self._side.wait_stream(ordinary)
        with torch.cuda.stream(self._side):
            yield
        ordinary.wait_stream(self._side)

    def capture(self, work: Work) -> Work:
        """As ``torch.cuda.graph``, which after a failure would leave its stream the current one."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._side):
            graph.capture_begin()
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says again that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay

    def num_allocations(self) -> int:
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0))

    def free_bytes(self) -> int:
        """Memory that the driver has left, and what torch holds of it without using it."""
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def describe(self) -> Mapping[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        uuid = getattr(properties, "uuid", None)
        return {
            "device_name": properties.name,
            "device_uuid": None if uuid is None else f"GPU-{uuid}",
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
    if name == "cuda" or name.startswith("cuda:"):
        return CudaDevice(name)
    raise WorkerError("settings", f"device is {name!r}; it must be cpu, cuda or cuda:N")


def _cuda_device(name: str) -> torch.device:
    number = name.removeprefix("cuda").removeprefix(":") or "0"
    if not number.isdecimal():
        raise WorkerError("settings", f"device is {name!r}; it must be cpu, cuda or cuda:N with a whole number N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number) >= count:
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise WorkerError(
            "device",
            f"device {name}: torch {torch.__version__} sees {devices}; name another with --device (cpu is always "
            "there), or an interpreter whose torch was built for CUDA with --python",
        )
    return torch.device("cuda", int(number))


def cpu_cache_bytes(cores: Iterable[int], directory: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """The last cache of these cores, one that several share counted once; None where the system does not say."""
    sizes: dict[str, int] = {}
    for core in cores:
        last = max((directory / f"cpu{core}" / "cache").glob("index[0-9]"), default=None)
        if last is None:
            return None
        try:
            shared, size = ((last / name).read_text().strip() for name in ("shared_cpu_list", "size"))
            sizes[shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            return None
    return sum(sizes.values())


def _cpu_name() -> str:
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _available_bytes() -> int:
    with contextlib.suppress(OSError), Path("/proc/meminfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int:
    """The rest of this container's limit (control groups, version 2); very much where there is none."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(counts["inactive_file"])  # files that the system can forget
    return 1 << 62
