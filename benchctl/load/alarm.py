"""Waking at a moment, to the tenth of a millisecond.

An event loop rounds its waits to whole milliseconds, which would gather the requests of an open loop into bunches.
Linux has timers that are files (``timerfd``): the loop waits for one like for a socket, and it rings on time.
"""

import asyncio
import ctypes
import os
import time
from contextlib import suppress
from typing import Final, Self

from benchctl.units import NS_PER_S

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
