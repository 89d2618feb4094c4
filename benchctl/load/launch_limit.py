"""The limit of launches per second: asyncio-throttle, woken on time.

The throttle alone looks again after whole milliseconds, and counts its period from a launch that was late already:
of 2,000 launches per second it lets a third pass. Here a timer of the kernel wakes the launch when its period has
ended, and the next period is shorter by as much as the launch was late.
"""

import time
from types import TracebackType
from typing import Final, Self

from asyncio_throttle.throttler import Throttler

from benchctl.load.alarm import Alarm
from benchctl.units import NS_PER_S

MADE_UP_S: Final = 0.005
"""The longest delay that later launches make up for: so many seconds' worth of them may follow at once."""


class LaunchLimit:
    """At most ``rate_per_s`` launches per second, evenly spaced. Use as a context manager, inside an event loop."""

    def __init__(self, rate_per_s: float) -> None:
        self._interval_s = 1 / rate_per_s
        self._throttler = Throttler(rate_limit=1, period=self._interval_s, retry_interval=0)
        self._due_s = 0.0

    def __enter__(self) -> Self:
        self._alarm = Alarm().__enter__()
        self._due_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.__exit__(kind, error, trace)

    async def acquire(self) -> None:
        """Wait until one more launch keeps to the limit."""
        await self._alarm.sleep_until(round(self._due_s * NS_PER_S))
        await self._throttler.acquire()  # type: ignore[no-untyped-call]
        now_s = time.monotonic()
        late_s = min(now_s - self._due_s, MADE_UP_S)
        self._due_s = now_s - late_s + self._interval_s
        self._throttler.period = self._interval_s - late_s
