"""A worker without torch, whose passes take the time that a test plants."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace

from psutil import Process

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
    def start(self, _profile: Profile) -> Iterator[SimpleNamespace]:
        self.num_started += 1
        try:
            if self.too_large is not None:
                raise self.too_large
            measure = partial(self._measure, self.num_started)
            yield SimpleNamespace(info=info_of(self.device_name), processes=lambda: [Process()], measure=measure)
        finally:
            self.num_ended += 1

    def _measure(self, worker: int, point: ForwardPoint, mode: Mode, *, warmups: int, replays: int) -> ForwardTimes:
        index = len(self.measured)
        self.measured.append((worker, point, mode))
        if self.error is not None and index == self.fails_at:
            raise self.error
        stream = named_stream(self.seed, f"planted-{index}")
        mean_ns = self.time_us(point, mode) * 1000
        durations = tuple(round(mean_ns * stream.gauss(1.0, 0.01)) for _ in range(replays))
        start_ns = next(_starts)
        return ForwardTimes(
            clock="host",
            start_ns=tuple(start_ns + sum(durations[:i]) for i in range(replays)),
            duration_ns=durations,
            wall_ns=sum(durations),
            num_allocations=self.num_allocations,
            num_operators=31,
        )


_starts = count(1_000_000_000, 60_000_000_000)
