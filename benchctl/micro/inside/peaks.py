"""Kernels that show the peaks of a device: matrix products, copies, reductions, launches, all-reduce.

    kernels that run ▸ rounds, in each of which every kernel runs once ▸ one rate for each kernel and round

A round takes the kernels in an order of its own, so that a slow phase of the machine does not always meet the same
one. One value is the rate of enough equal calls to last ``least_s``: between two events on the stream of a GPU, on
the host's clock on a CPU. Buffers of copies and reductions are many times the last-level cache.

All-reduce runs over the devices of one machine, NCCL between GPUs and gloo between processes of a CPU. Its rate is
that of the bus: of a buffer of n bytes, each of p devices sends 2 (p - 1) / p n bytes in one direction, whatever
the algorithm.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchctl.micro.inside import first_line
from benchctl.micro.inside.replays import CpuDevice, CudaDevice

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": getattr(torch, "float8_e4m3fn", None),
}
NS_PER_S = 1_000_000_000
_MOST_CALL_S = 0.5
"""A product that takes longer is the last of its arithmetic: larger ones would take minutes."""
_GRAPH_NODES = 200
_LEAST_CALL_S = 1e-9
_SMALL_BYTES = 8 * 2**10
_LARGE_BYTES = (64 * 2**20, 256 * 2**20)
_CALLS = 10
"""All-reduces of one value."""
_LIMIT_S = 300.0
"""For a rank to wait for the others."""


@dataclass(kw_only=True)
class Kernel:
    """One kernel at one size. ``amount`` is its FLOPs, bytes or launches in one call.

    A value is a rate, or the seconds for each launch. A GPU's launches are timed by the host, which makes them.
    """

    quantity: str
    setting: str
    amount: float
    call: Callable[[], object]
    dtype: str | None = None
    num_calls: int = 1
    """Calls of one value."""
    values: list[float] = field(default_factory=list)
    """One for each round: FLOP/s, bytes/s or seconds."""

    @property
    def is_launch(self) -> bool:
        return self.quantity == "launch"

    def document(self) -> dict[str, Any]:
        dtype = {} if self.dtype is None else {"dtype": self.dtype}
        return {"quantity": self.quantity, "setting": self.setting, "values": self.values, **dtype}


def measure_peaks(
    device: CpuDevice | CudaDevice,
    *,
    rounds: int,
    buffer_bytes: int,
    dtypes: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    least_s: float | None = None,
    all_reduce_ranks: int | None = None,
) -> dict[str, Any]:
    """Measure the peaks of one device; the document holds every value of every kernel.

    ``buffer_bytes`` are those of the buffer that is read, and of each of the two of a copy; ``sizes`` the sides of
    square matrices; ``least_s`` the duration of the calls of one value; ``all_reduce_ranks`` the devices that
    reduce together. None chooses what suits the device: of ranks all GPUs of the machine, and none on a CPU. What
    the device or this torch does not have is in ``unmeasured``, with the reason.
    """
    kind = device.torch_device.type
    num_devices = 1 if kind == "cpu" else torch.cuda.device_count()
    least_s = least_s or (0.05 if kind == "cpu" else 0.02)
    unmeasured: dict[str, str] = {}
    kernels = [*_products(device, dtypes, sizes, unmeasured), *memory_kernels(device, buffer_bytes)]
    kernels += launch_kernels(device)
    for kernel in kernels:
        kernel.num_calls = _num_calls(device, kernel, least_s)
    order, shuffle = list(kernels), random.Random(0).shuffle  # noqa: S311 - no secret
    for _ in range(rounds):
        shuffle(order)
        for kernel in order:
            one_s = timed_s(device, kernel, kernel.num_calls) / (kernel.num_calls * kernel.amount)
            kernel.values.append(one_s if kernel.is_launch else 1 / one_s)
    series = [kernel.document() for kernel in kernels]
    ranks = all_reduce_ranks or num_devices
    if ranks > 1:
        try:
            series += all_reduce_series(kind, ranks, rounds=rounds, most_bytes=buffer_bytes)
        except (RuntimeError, OSError, torch.multiprocessing.ProcessException) as error:
            unmeasured["all-reduce"] = str(error).strip().rpartition("\n")[2][:200]
    return {
        "num_devices": num_devices,
        "buffer_bytes": buffer_bytes,
        "series": series,
        "unmeasured": unmeasured,
    }


def timed_s(device: CpuDevice | CudaDevice, kernel: Kernel, num_calls: int) -> float:
    """Seconds of so many equal calls: between two events of the GPU's stream, or on the host's clock."""
    if kernel.is_launch:
        device.synchronize()
        begin_ns = time.monotonic_ns()
        for _ in range(num_calls):
            kernel.call()
        device.synchronize()
        return (time.monotonic_ns() - begin_ns) / NS_PER_S
    begin, end = device.marks(2)
    begin.record()
    for _ in range(num_calls):
        kernel.call()
    end.record()
    device.synchronize()
    return device.elapsed_ns(begin, end) / NS_PER_S


def _num_calls(device: CpuDevice | CudaDevice, kernel: Kernel, least_s: float) -> int:
    """Calls that last ``least_s``; finding their number warms the kernel up for at least half as long."""
    num_calls, duration_s = 1, timed_s(device, kernel, 1)
    while duration_s < least_s / 2:
        num_calls = max(2 * num_calls, round(num_calls * least_s / max(duration_s, _LEAST_CALL_S) / 2))
        duration_s = timed_s(device, kernel, num_calls)
    return max(1, round(num_calls * least_s / duration_s))


def _products(
    device: CpuDevice | CudaDevice,
    dtypes: Sequence[str] | None,
    sizes: Sequence[int] | None,
    unmeasured: dict[str, str],
) -> Iterator[Kernel]:
    """Every product that runs on this device, once called."""
    is_cpu = device.torch_device.type == "cpu"
    usual = ("bfloat16", "float32") if is_cpu else ("bfloat16", "float16", "float32", "fp8", "int8")
    sizes = sorted(sizes or ((512, 1024, 2048) if is_cpu else (2048, 4096, 8192, 16384)))
    for dtype in dtypes or usual:
        for size in sizes:
            try:
                kernel = product(device, dtype, size)
                kernel.call()
                call_s = timed_s(device, kernel, 1)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                unmeasured[dtype if size == sizes[0] else f"{dtype} {size}"] = first_line(error)
                break
            yield kernel
            if call_s > _MOST_CALL_S:
                break


def product(device: CpuDevice | CudaDevice, dtype: str, size: int) -> Kernel:
    """A square matrix product: 2 size³ FLOPs. Raises RuntimeError where this torch does not have the arithmetic."""
    if DTYPES.get(dtype) is None:
        raise RuntimeError(f"torch {torch.__version__} has no {dtype}")
    call = _product_call(dtype, _matrix(device, dtype, size), _matrix(device, dtype, size))
    return Kernel(quantity="matmul", dtype=dtype, setting=f"{size}", amount=2.0 * size**3, call=call)


def _product_call(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    if dtype == "int8":
        return partial(torch._int_mm, a, b)  # noqa: SLF001 - torch has no public product of these
    if dtype == "fp8":
        one = torch.ones((), device=a.device)
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return partial(torch._scaled_mm, a, b.t(), **options)  # noqa: SLF001 - nor of these
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _matrix(device: CpuDevice | CudaDevice, dtype: str, size: int) -> torch.Tensor:
    """Random elements: a GPU draws less power, and clocks higher, on zeros."""
    if dtype == "int8":
        return torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device.torch_device)
    return torch.randn(size, size, device=device.torch_device).to(DTYPES[dtype])


def memory_kernels(device: CpuDevice | CudaDevice, buffer_bytes: int) -> list[Kernel]:
    """A copy, which reads and writes its buffer, and a sum, which reads it."""
    source = torch.ones(buffer_bytes // 4, dtype=torch.float32, device=device.torch_device)
    target = torch.empty_like(source)
    moved, setting = 4.0 * source.numel(), f"{buffer_bytes}"
    return [
        Kernel(quantity="copy", setting=setting, amount=2 * moved, call=partial(target.copy_, source)),
        Kernel(quantity="read", setting=setting, amount=moved, call=source.sum),
    ]


def launch_kernels(device: CpuDevice | CudaDevice) -> list[Kernel]:
    """The smallest kernel: launched in a row, launched and waited for, and replayed in a CUDA graph."""
    number = torch.zeros(1, device=device.torch_device)

    def add() -> None:
        number.add_(1)

    def add_and_wait() -> None:
        number.add_(1)
        device.synchronize()

    def add_often() -> None:
        for _ in range(_GRAPH_NODES):
            number.add_(1)

    launches = [Kernel(quantity="launch", setting="in a row", amount=1.0, call=add)]
    if device.torch_device.type != "cpu":
        graph = device.capture(add_often, warmups=1)
        launches += [
            Kernel(quantity="launch", setting="and wait", amount=1.0, call=add_and_wait),
            Kernel(quantity="launch", setting="in a graph", amount=float(_GRAPH_NODES), call=graph),
        ]
    return launches


def all_reduce_series(kind: str, ranks: int, *, rounds: int, most_bytes: int) -> list[dict[str, Any]]:
    """Values of every round: bytes/s of large buffers, seconds of a small one. ``kind`` is cpu or cuda.

    Large buffers are of the usual sizes, or of ``most_bytes`` where these are smaller. Each rank is a process of
    its own. Raises torch's ProcessException with the words of a rank that fails.
    """
    large_bytes = sorted({min(size, most_bytes) for size in _LARGE_BYTES})
    if kind == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="benchctl-all-reduce-") as directory:
        arguments = (kind, ranks, [_SMALL_BYTES, *large_bytes], rounds, Path(directory))
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=ranks)
        small_s, *large_s = json.loads((Path(directory) / "times").read_bytes())
    return [
        {"quantity": "all-reduce-time", "setting": f"{_SMALL_BYTES} x {ranks}", "values": small_s},
        *(
            {
                "quantity": "all-reduce",
                "setting": f"{size} x {ranks}",
                "values": [2 * (ranks - 1) / ranks * size / time_s for time_s in times_s],
            }
            for size, times_s in zip(large_bytes, large_s, strict=True)
        ),
    ]


def _run_rank(rank: int, kind: str, ranks: int, sizes: list[int], rounds: int, directory: Path) -> None:
    """One device of an all-reduce; the first writes seconds of one call, by size and round."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        init_method=f"file://{directory / 'meeting'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    buffers = [torch.zeros(size // 4, device=kind) for size in sizes]
    for buffer in buffers:  # the first call of each size sets up connections
        _all_reduce_s(buffer, 2)
    times_s = [[_all_reduce_s(buffer, _CALLS) for buffer in buffers] for _ in range(rounds)]
    dist.destroy_process_group()
    if rank == 0:
        (directory / "times").write_text(json.dumps(list(zip(*times_s, strict=True))))


def _all_reduce_s(buffer: torch.Tensor, num_calls: int) -> float:
    """Seconds of one call, the mean of so many in a row that all ranks begin together."""
    dist.barrier()
    _synchronize(buffer)
    begin_ns = time.monotonic_ns()
    for _ in range(num_calls):
        dist.all_reduce(buffer)
    _synchronize(buffer)
    return (time.monotonic_ns() - begin_ns) / NS_PER_S / num_calls


def _synchronize(buffer: torch.Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize()
