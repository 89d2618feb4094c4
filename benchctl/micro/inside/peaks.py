"""Kernels that show the peaks of a device: matrix products, copies, reductions, launches.

    timed kernels ▸ rounds, in each of which every kernel runs once ▸ one rate for each kernel and round

A round takes the kernels in an order of its own, so that a slow phase of the machine does not always meet the same
one. One value is the rate of enough equal calls to last ``least_s``: between two events on the stream of a GPU, on
the host's clock on a CPU. Buffers of copies and reductions are many times the last-level cache.
"""

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchctl.micro.inside.all_reduce import all_reduce_series

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": getattr(torch, "float8_e4m3fn", None),
}
_CACHES = 8
"""Buffers are as many times the last-level cache."""
_LEAST_BUFFER_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
_MOST_MEMORY = 8
"""A buffer takes no more of the device's memory than 1 / 8."""
_MOST_CALL_S = 0.5
"""A product that takes longer is the last of its arithmetic: larger ones would take minutes."""
_GRAPH_NODES = 200
_LEAST_CALL_S = 1e-9


@dataclass(frozen=True)
class PeakSettings:
    """Device and effort of a measurement; None chooses what suits the device."""

    device: str = "cpu"
    dtypes: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    """Sides of square matrices."""
    buffer_bytes: int | None = None
    """Bytes of the buffer that is read, and of each of the two of a copy."""
    memory_bytes: int | None = None
    """Memory of the device, which bounds the buffers that nobody chose."""
    rounds: int = 9
    least_s: float | None = None
    """Duration of the calls of one value."""
    seed: int = 0
    """Of the order of kernels in a round."""
    all_reduce_ranks: int | None = None
    """Devices that reduce together; None for all GPUs of the machine, and none on a CPU."""


@dataclass(frozen=True)
class Kernel:
    """One kernel at one size. ``amount`` is its FLOPs, bytes or launches in one call.

    A value is a rate, or the seconds for each launch. A GPU's launches are timed by the host, which makes them.
    """

    quantity: str
    setting: str
    amount: float
    call: Callable[[], object]
    dtype: str | None = None

    @property
    def is_launch(self) -> bool:
        return self.quantity == "launch"


@dataclass
class Series:
    """The values of one kernel at one size, one for each round: FLOP/s, bytes/s or seconds."""

    quantity: str
    dtype: str | None
    setting: str
    values: list[float] = field(default_factory=list)


def measure_peaks(settings: PeakSettings) -> dict[str, Any]:
    """Measure the peaks of one device; the document holds every value of every kernel.

    What the device or this torch does not have is in ``unmeasured``, with the reason.
    """
    settings = completed(settings)
    unmeasured: dict[str, str] = {}
    with torch.inference_mode():
        kernels = list(_runnable(settings, unmeasured))
        calls = [_calls(kernel, settings) for kernel in kernels]
        series = [Series(kernel.quantity, kernel.dtype, kernel.setting) for kernel in kernels]
        order, shuffle = list(range(len(kernels))), random.Random(settings.seed).shuffle  # noqa: S311 - no secret
        for _ in range(settings.rounds):
            shuffle(order)
            for index in order:
                kernel = kernels[index]
                one_s = timed_s(kernel, calls[index], settings.device) / (calls[index] * kernel.amount)
                series[index].values.append(one_s if kernel.is_launch else 1 / one_s)
    documents = [{key: value for key, value in asdict(each).items() if value is not None} for each in series]
    return {
        "cache_bytes": last_level_cache_bytes(settings.device),
        "num_devices": 1 if settings.device == "cpu" else torch.cuda.device_count(),
        "buffer_bytes": settings.buffer_bytes,
        "series": [*documents, *_all_reduce(settings, unmeasured)],
        "unmeasured": unmeasured,
    }


def completed(settings: PeakSettings) -> PeakSettings:
    """The settings with what suits their device where they choose nothing."""
    is_cpu = settings.device == "cpu"
    dtypes = ("bfloat16", "float32") if is_cpu else ("bfloat16", "float16", "float32", "fp8", "int8")
    sizes = (512, 1024, 2048) if is_cpu else (2048, 4096, 8192, 16384)
    least_bytes = _LEAST_BUFFER_BYTES["cpu" if is_cpu else "cuda"]
    buffer_bytes = max(_CACHES * (last_level_cache_bytes(settings.device) or 0), least_bytes)
    if settings.memory_bytes is not None:
        buffer_bytes = min(buffer_bytes, settings.memory_bytes // _MOST_MEMORY)
    ranks = settings.all_reduce_ranks
    return replace(
        settings,
        dtypes=tuple(settings.dtypes or dtypes),
        sizes=tuple(sorted(settings.sizes or sizes)),
        buffer_bytes=settings.buffer_bytes or buffer_bytes,
        least_s=settings.least_s or (0.05 if is_cpu else 0.02),
        all_reduce_ranks=ranks if ranks is not None else 1 if is_cpu else torch.cuda.device_count(),
    )


def timed_s(kernel: Kernel, calls: int, device: str) -> float:
    """Seconds of so many equal calls: between two events of the GPU's stream, or on the host's clock."""
    if device == "cpu" or kernel.is_launch:
        _synchronize(device)
        begin_ns = time.monotonic_ns()
        for _ in range(calls):
            kernel.call()
        _synchronize(device)
        return (time.monotonic_ns() - begin_ns) / 1e9
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        kernel.call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _calls(kernel: Kernel, settings: PeakSettings) -> int:
    """Calls that last ``least_s``; finding their number warms the kernel up for at least half as long."""
    least_s = settings.least_s or 0.0
    calls, duration_s = 1, timed_s(kernel, 1, settings.device)
    while duration_s < least_s / 2:
        calls = max(2 * calls, round(calls * least_s / max(duration_s, _LEAST_CALL_S) / 2))
        duration_s = timed_s(kernel, calls, settings.device)
    return max(1, round(calls * least_s / duration_s))


def _runnable(settings: PeakSettings, unmeasured: dict[str, str]) -> Iterator[Kernel]:
    """Every kernel that runs on this device, once called."""
    for dtype in settings.dtypes or ():
        for size in settings.sizes or ():
            try:
                kernel = product(dtype, size, settings.device)
                kernel.call()
                call_s = timed_s(kernel, 1, settings.device)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                unmeasured[dtype if size == min(settings.sizes) else f"{dtype} {size}"] = first_line(error)
                break
            yield kernel
            if call_s > _MOST_CALL_S:
                break
    for kernel in (*memory_kernels(settings), *launch_kernels(settings.device)):
        kernel.call()
        yield kernel


def product(dtype: str, size: int, device: str) -> Kernel:
    """A square matrix product: 2 size³ FLOPs. Raises RuntimeError where this torch does not have the arithmetic."""
    if DTYPES.get(dtype) is None:
        raise RuntimeError(f"torch {torch.__version__} has no {dtype}")
    call = _product_call(dtype, _matrix(dtype, size, device), _matrix(dtype, size, device))
    return Kernel(quantity="matmul", dtype=dtype, setting=f"{size}", amount=2.0 * size**3, call=call)


def _product_call(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    if dtype == "int8":
        return lambda: torch._int_mm(a, b)  # noqa: SLF001 - torch has no public product of these
    if dtype == "fp8":
        one, column_major = torch.ones((), device=a.device), b.t()
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return lambda: torch._scaled_mm(a, column_major, **options)  # noqa: SLF001 - nor of these
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _matrix(dtype: str, size: int, device: str) -> torch.Tensor:
    """Random elements: a GPU draws less power, and clocks higher, on zeros."""
    if dtype == "int8":
        return torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device)
    return torch.randn(size, size, device=device).to(DTYPES[dtype])


def memory_kernels(settings: PeakSettings) -> list[Kernel]:
    """A copy, which reads and writes its buffer, and a sum, which reads it."""
    num_bytes = int(settings.buffer_bytes or 0)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=settings.device)
    target = torch.empty_like(source)
    moved, setting = 4.0 * source.numel(), f"{num_bytes}"
    return [
        Kernel(quantity="copy", setting=setting, amount=2 * moved, call=lambda: target.copy_(source)),
        Kernel(quantity="read", setting=setting, amount=moved, call=source.sum),
    ]


def launch_kernels(device: str) -> list[Kernel]:
    """The smallest kernel: launched in a row, launched and waited for, and replayed in a CUDA graph."""
    number = torch.zeros(1, device=device)

    def add() -> None:
        number.add_(1)

    def add_and_wait() -> None:
        number.add_(1)
        torch.cuda.synchronize()

    launches = [Kernel(quantity="launch", setting="in a row", amount=1.0, call=add)]
    if device != "cpu":
        graph = _graph(add)
        launches += [
            Kernel(quantity="launch", setting="and wait", amount=1.0, call=add_and_wait),
            Kernel(quantity="launch", setting="in a graph", amount=float(_GRAPH_NODES), call=graph.replay),
        ]
    return launches


def _graph(add: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A captured graph of many of the smallest kernel, one after the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_NODES):
            add()
    return graph


def _all_reduce(settings: PeakSettings, unmeasured: dict[str, str]) -> list[dict[str, Any]]:
    ranks = settings.all_reduce_ranks or 1
    if ranks < 2:
        return []
    if settings.device != "cpu":
        torch.cuda.empty_cache()
    kind, most_bytes = settings.device.partition(":")[0], settings.buffer_bytes or 0
    try:
        return all_reduce_series(kind, ranks, rounds=settings.rounds, most_bytes=most_bytes)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        unmeasured["all-reduce"] = first_line(error)
        return []


def first_line(error: Exception) -> str:
    """The beginning of an error's message: torch appends pages of advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def last_level_cache_bytes(device: str) -> int | None:
    """The largest cache of a core, or the L2 cache of a GPU; None where the system does not say."""
    if device != "cpu":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
    units, sizes = {"K": 2**10, "M": 2**20, "G": 2**30}, []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
    return max(sizes, default=None)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
