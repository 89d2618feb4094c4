"""A worker without torch, whose passes take the time that a test plants."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import psutil

from benchctl.errors import BenchctlError, UsageError
from benchctl.micro.worker import ForwardTimes, WorkerInfo
from benchctl.profile.choices import ForwardPoint, Mode
from benchctl.profile.model import Profile
from benchctl.workload.seeded import named_stream

CPU = "AMD EPYC"
A100 = "NVIDIA A100-SXM4-80GB"


def info_of(device_name: str) -> WorkerInfo:
    return WorkerInfo(
        python="/usr/bin/python",
        python_version="3.11.7",
        torch_version="2.9.0",
        device="cpu",
        device_name=device_name,
        num_threads=1,
        float32_precision="highest",
        free_bytes=1 << 34,
        total_bytes=1 << 35,
    )


@dataclass
class FakeWorkers:
    """Workers of a device; ``time_us`` has the mean of a pass, which scatters by a percent."""

    time_us: Callable[[ForwardPoint, Mode], float]
    device_name: str = CPU
    seed: int = 0
    """Of the scatter."""
    error: BenchctlError | BaseException | None = None
    """Raised by the pass number ``fails_at``, counted over all workers."""
    fails_at: int = 0
    num_allocations: int = 0
    too_large: UsageError | None = None
    """Raised by the start of a worker."""
    num_started: int = 0
    num_ended: int = 0
    measured: list[tuple[int, ForwardPoint, Mode]] = field(default_factory=list)
    """Number of the worker, point and mode of each measurement."""

    @contextmanager
    def start(self, _profile: Profile) -> "Iterator[FakeWorker]":
        self.num_started += 1
        try:
            if self.too_large is not None:
                raise self.too_large
            yield FakeWorker(self, self.num_started)
        finally:
            self.num_ended += 1


class FakeWorker:
    def __init__(self, workers: FakeWorkers, number: int) -> None:
        self._workers = workers
        self._number = number
        self.info = info_of(workers.device_name)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def measure(self, point: ForwardPoint, mode: Mode, *, warmups: int, replays: int) -> ForwardTimes:
        workers = self._workers
        index = len(workers.measured)
        workers.measured.append((self._number, point, mode))
        if workers.error is not None and index == workers.fails_at:
            raise workers.error
        stream = named_stream(workers.seed, f"planted-{index}")
        mean_ns = workers.time_us(point, mode) * 1000
        durations = tuple(round(mean_ns * stream.gauss(1.0, 0.01)) for _ in range(replays))
        start_ns = next(_starts)
        starts = tuple(start_ns + sum(durations[:i]) for i in range(replays))
        return ForwardTimes(
            clock="host",
            start_ns=starts,
            duration_ns=durations,
            wall_ns=sum(durations),
            num_allocations=workers.num_allocations,
            num_operators=31,
        )


_starts = count(1_000_000_000, 60_000_000_000)
