"""Replays of one piece of work: warm-up, capture, and times, in the order that makes the times right.

Nothing here imports torch: ``Device`` is all that is asked of a device.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import Literal, Protocol

Work = Callable[[], None]
MIN_CAPTURE_WARMUPS = 3
"""Passes on the side stream before a capture at least, as torch advises."""


class Mark(Protocol):
    """A moment in the work of a device."""

    def record(self) -> None: ...


class Device(Protocol):
    """Everything that replays need of a device."""

    clock: Literal["host", "device"]
    can_capture: bool

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def marks(self, count: int) -> list[Mark]:
        """Marks on the stream of the replays, each recorded once already."""

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Time between two marks that the device has reached."""

    def side_stream(self) -> AbstractContextManager[None]:
        """A stream of its own, which begins after and ends before the work of the ordinary one."""

    def capture(self, work: Work) -> Work:
        """A graph of ``work``, which is not run; the call that launches it is returned. Raises WorkerError."""

    def num_allocations(self) -> int:
        """Pieces of memory that the device has handed out since the process began."""


@dataclass(frozen=True)
class ReplayTimes:
    """The replays in the order in which they ran: see ``benchctl.micro.forward_times.ForwardTimes``."""

    clock: Literal["host", "device"]
    start_ns: list[int]
    duration_ns: list[int]
    wall_ns: int
    num_allocations: int
    """Pieces of memory that the device handed out meanwhile."""


def warm_up(device: Device, work: Work, count: int) -> None:
    for _ in range(count):
        work()
    device.synchronize()


def captured(device: Device, work: Work, warmups: int) -> Work:
    """The call that launches a graph of ``work``, which has been run on a side stream before."""
    with device.side_stream():
        for _ in range(max(warmups, MIN_CAPTURE_WARMUPS)):
            work()
    device.synchronize()
    return device.capture(work)


def timed_replays(device: Device, replay: Work, count: int) -> ReplayTimes:
    """Times of ``count`` replays; what runs on ``device`` before the first of them has ended."""
    anchor, *marks = device.marks(1 + 2 * count)
    pairs = list(zip(marks[::2], marks[1::2], strict=True))
    with _collector_off():
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
    return ReplayTimes(
        clock=device.clock,
        start_ns=[begin_ns + device.elapsed_ns(anchor, start) for start, _ in pairs],
        duration_ns=[device.elapsed_ns(start, end) for start, end in pairs],
        wall_ns=wall_ns,
        num_allocations=device.num_allocations() - allocations_before,
    )


@contextmanager
def _collector_off() -> Iterator[None]:
    """No collection of garbage begins inside; what had gathered is collected first."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
