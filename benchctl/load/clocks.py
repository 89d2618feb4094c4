"""The clocks of a load: the kernel's receive timestamps, and waking at a moment to the tenth of a millisecond."""

import asyncio
import ctypes
import os
import socket
import struct
import time
from bisect import bisect_right
from contextlib import suppress
from typing import Final, Self

from benchctl.records.schema import ClockOffset
from benchctl.units import NS_PER_S

SO_TIMESTAMPNS: Final = 35
"""Of Linux's generic ABI (x86, Arm, RISC-V); the standard library has no name for it."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(16)
TIMESPEC: Final = struct.Struct("@qq")
_STEP_NS: Final = 20_000
"""The difference of the clocks changes by more only when the wall clock is set."""
FUTURE_NS: Final = 5_000
"""A mapped timestamp may be this much later than its own read: the inaccuracy of a sample."""
_TRIES: Final = 5
_GOOD_BRACKET_NS: Final = 2_000


def stamp_arrivals(sock: socket.socket) -> bool:
    """Request timestamps for what arrives on ``sock``; False where the kernel has none."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def realtime_less_monotonic() -> tuple[int, int, int]:
    """(monotonic time, difference of the clocks, inaccuracy), in ns: the tightest bracket of a few."""
    best = (0, 0, 1 << 62)
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        real = time.time_ns()
        width = time.monotonic_ns() - before
        if width < best[2]:
            best = (before, real - before - width // 2, width)
        if width <= _GOOD_BRACKET_NS:
            break
    return best


class KernelClock:
    """Maps receive timestamps to the monotonic clock, and knows when it cannot.

    ``sample`` compares the clocks; a timestamp between two samples that differ has no time.
    """

    def __init__(self) -> None:
        t_ns, offset_ns, _ = realtime_less_monotonic()
        self._sampled_ns = t_ns
        self._epochs: list[tuple[int, int]] = [(t_ns, offset_ns)]
        """Each difference with the time from which it is known to hold, until the start of the gap before the
        next."""
        self._gaps: list[int] = [0]
        """For each epoch, the last sample before it: between that and the epoch the clock was set."""

    @property
    def offsets(self) -> tuple[ClockOffset, ...]:
        """Every difference that held, with the time from which it did."""
        return tuple(ClockOffset(t_ns=t_ns, realtime_less_monotonic_ns=offset) for t_ns, offset in self._epochs)

    @property
    def num_steps(self) -> int:
        """The number of times that the wall clock was set meanwhile."""
        return len(self._epochs) - 1

    def sample(self) -> None:
        t_ns, offset_ns, width_ns = realtime_less_monotonic()
        if width_ns > _STEP_NS:
            return  # interrupted in every try: this shows nothing
        if abs(offset_ns - self._epochs[-1][1]) > _STEP_NS:
            self._gaps.append(self._sampled_ns)
            self._epochs.append((t_ns, offset_ns))
        self._sampled_ns = t_ns

    def steady_offset_ns(self, until_ns: int) -> int | None:
        """The difference of the clocks where it has been the same until ``until_ns``; None after a step."""
        if until_ns > self._sampled_ns:
            self.sample()
        return self._epochs[0][1] if len(self._epochs) == 1 else None

    def arrival_ns(self, stamp: bytes, read_ns: int) -> int | None:
        """Arrival of the bytes read at ``read_ns``, monotonic; None where their timestamp cannot be trusted."""
        if read_ns > self._sampled_ns:
            self.sample()
        epoch = self._epoch_at(read_ns)
        if epoch is None or len(stamp) != TIMESPEC.size:
            return None
        since_ns, offset_ns = epoch
        seconds, nanoseconds = TIMESPEC.unpack(stamp)
        arrival_ns: int = seconds * NS_PER_S + nanoseconds - offset_ns
        is_plausible = since_ns <= arrival_ns <= read_ns + FUTURE_NS
        return min(arrival_ns, read_ns) if is_plausible else None

    def _epoch_at(self, t_ns: int) -> tuple[int, int] | None:
        """The difference at ``t_ns``, with the time from which it holds before it; None in the gap around a
        step.
        """
        i = max(bisect_right(self._epochs, (t_ns, 1 << 62)) - 1, 0)
        if i + 1 < len(self._epochs) and t_ns >= self._gaps[i + 1]:
            return None
        return self._epochs[i] if i else (0, self._epochs[0][1])


_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
"""By definition the same bits as ``TFD_NONBLOCK`` and ``TFD_CLOEXEC``."""
_ABSOLUTE: Final = 1


class _Setting(ctypes.Structure):
    """``struct itimerspec``: the period, which stays zero, and the moment."""

    _fields_ = (
        ("period_s", ctypes.c_long),
        ("period_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm:
    """Wakes one waiting task at a time. Use as a context manager, inside an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        create = getattr(self._libc, "timerfd_create", None)
        self._file: int = -1 if create is None else create(time.CLOCK_MONOTONIC, _FLAGS)

    def __enter__(self) -> Self:
        if self._file >= 0:
            self._loop.add_reader(self._file, self._ring)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    async def sleep_until(self, due_ns: int) -> None:
        """Sleep until ``due_ns`` of the monotonic clock; others have their turn also when that is past."""
        await asyncio.sleep(0)
        while (early_ns := due_ns - time.monotonic_ns()) > 0:
            if not self._set(due_ns):
                await asyncio.sleep(early_ns / NS_PER_S)  # may fire early, and is then set again for the rest
                continue
            self._rung = self._loop.create_future()
            try:
                await self._rung
            finally:
                self._rung = None

    def _set(self, due_ns: int) -> bool:
        if self._file < 0:
            return False
        setting = _Setting(0, 0, *divmod(due_ns, NS_PER_S))
        return bool(self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None) == 0)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
