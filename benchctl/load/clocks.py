"""The clocks of a load: the kernel's receive timestamps, and waking at a moment to the tenth of a millisecond.

Linux stamps each segment when it reaches this host (``SO_TIMESTAMPNS``, socket(7)), however late the client then
reads it. Its clock is ``CLOCK_REALTIME``; ours is ``CLOCK_MONOTONIC``. Both tick at the same corrected rate: their
difference is constant until the wall clock is set.

An event loop rounds its waits to whole milliseconds, which would gather the requests of an open loop into bunches.
Linux has timers that are files (``timerfd``): the loop waits for one like for a socket, and it rings on time.
"""

import asyncio
import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable
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
_TRIES: Final = 5
_ABSOLUTE: Final = 1


def stamp_arrivals(sock: socket.socket) -> bool:
    """Request timestamps for what arrives on ``sock``; False where the kernel has none."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def realtime_less_monotonic() -> tuple[int, int, int]:
    """(inaccuracy, monotonic time, difference of the clocks), in ns: the tightest bracket of a few."""
    looks = ((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_TRIES))
    return min((after - before, before, real - (before + after) // 2) for before, real, after in looks)


class KernelClock:
    """Maps receive timestamps to the monotonic clock, until a look at both clocks shows that one was set.

    Reads since the last look before that have no kernel time, nor has any later one.
    """

    def __init__(self) -> None:
        _, t_ns, offset_ns = realtime_less_monotonic()
        self._offset_ns = offset_ns
        self._sampled_ns = t_ns
        """The last look at which the difference of the clocks was still the same."""
        self.offsets = [ClockOffset(t_ns=t_ns, realtime_less_monotonic_ns=offset_ns)]
        """Every difference that held, with the time from which it did."""

    def sample(self) -> None:
        width_ns, t_ns, offset_ns = realtime_less_monotonic()
        if width_ns > _STEP_NS:
            return  # interrupted in every try: this shows nothing
        if abs(offset_ns - self.offsets[-1].realtime_less_monotonic_ns) > _STEP_NS:
            self.offsets.append(ClockOffset(t_ns=t_ns, realtime_less_monotonic_ns=offset_ns))
        if len(self.offsets) == 1:
            self._sampled_ns = t_ns

    def steady_offset_ns(self, until_ns: int) -> int | None:
        """Realtime less monotonic, if it has been the same from the start until ``until_ns``; None after a step."""
        if until_ns > self._sampled_ns and len(self.offsets) == 1:
            self.sample()
        return self._offset_ns if len(self.offsets) == 1 or until_ns <= self._sampled_ns else None

    def arrival_ns(self, stamp: bytes, read_ns: int) -> int | None:
        """Arrival of the bytes read at ``read_ns``, monotonic; None where their timestamp cannot be trusted."""
        offset_ns = self.steady_offset_ns(read_ns)
        if offset_ns is None or len(stamp) != TIMESPEC.size:
            return None
        seconds, nanoseconds = TIMESPEC.unpack(stamp)
        arrival_ns: int = seconds * NS_PER_S + nanoseconds - offset_ns
        # A mapped timestamp may be this much later than its own read: the inaccuracy of a sample
        return min(arrival_ns, read_ns) if arrival_ns <= read_ns + 5_000 else None


class _Setting(ctypes.Structure):
    """``struct itimerspec``: the period, which stays zero, and the moment."""

    _fields_ = (
        ("period_s", ctypes.c_long),
        ("period_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm:
    """Wakes one waiting task at a time, and calls ``on_ring``. Use as a context manager, inside an event loop."""

    def __init__(self, on_ring: Callable[[], None] = lambda: None) -> None:
        self._on_ring = on_ring

    def __enter__(self) -> Self:
        self._rung = asyncio.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        # By definition the same bits as ``TFD_NONBLOCK`` and ``TFD_CLOEXEC``
        self._file: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        asyncio.get_running_loop().add_reader(self._file, self._ring)
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)

    async def sleep_until(self, due_ns: int) -> None:
        """Sleep until ``due_ns`` of the monotonic clock; others have their turn also when that is past."""
        await asyncio.sleep(0)
        while due_ns > time.monotonic_ns():
            self._rung.clear()
            self.set(due_ns)
            await self._rung.wait()

    def set(self, due_ns: int) -> None:
        """Ring once at ``due_ns`` of the monotonic clock, instead of any time that was set before."""
        setting = _Setting(0, 0, *divmod(due_ns, NS_PER_S))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        self._rung.set()
        self._on_ring()
