"""An open loop: each request is sent at its planned time, whatever the server does.

The connection of a request is opened shortly before it is due. A timer of the kernel launches it, or the receiver
while it reads, because reading may take longer than a timer can wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchctl.load.alarm import Alarm
from benchctl.load.launch_limit import LaunchLimit
from benchctl.load.prepared import MOST_PREPARED, PreparedRequests
from benchctl.load.progress import Progress
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.exchange import Exchange
from benchctl.load.transport.receiver import NEVER_NS
from benchctl.units import NS_PER_S

LEAD_NS: Final = 100_000_000
"""How long before it is due a request is prepared, so that its connection is open by then."""
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """The ways in which an open loop launches requests and keeps within the limits of its load."""

    start: Callable[[Exchange], None]
    """Called with each request when it is due."""
    can_connect_ahead: Callable[[int], bool]
    """True when one more connection may be opened ahead, beside the given number of prepared requests: a request
    that will have to wait for a slot needs none yet."""
    num_waiting: Callable[[], int]
    """Requests that are due and wait for a slot."""
    limit: LaunchLimit | None
    time_scale: float


class OpenLoop:
    """Sends the requests of one load by its plan."""

    def __init__(
        self, client: StreamClient, prepared: PreparedRequests, progress: Progress, launching: Launching
    ) -> None:
        self._client, self._prepared, self._progress = client, prepared, progress
        self._start, self._limit = launching.start, launching.limit
        self._launching = launching
        self._upcoming: deque[Exchange] = deque()
        """Prepared and not due yet."""

    async def drive(self, start_ns: int) -> None:
        """Prepare each request and start it at its planned time after ``start_ns``; return after the last."""
        preparing = self._progress.follow(asyncio.create_task(self._prepare_ahead(start_ns)))
        receiver = self._client.receiver
        if self._limit is None:
            receiver.on_due = self._start_due
        try:
            with Alarm() as alarm:
                while True:
                    await self._progress.until(lambda: bool(self._upcoming) or preparing.done())
                    if not self._upcoming:
                        return
                    receiver.due_ns = self._upcoming[0].scheduled_ns
                    await alarm.sleep_until(self._upcoming[0].scheduled_ns)
                    if self._limit is None:
                        self._start_due()
                    else:
                        await self._limit.acquire()
                        self._start(self._upcoming.popleft())
        finally:
            receiver.due_ns, receiver.on_due = NEVER_NS, lambda: None
            preparing.cancel()
            await asyncio.wait({preparing})

    def _start_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._upcoming and self._upcoming[0].scheduled_ns <= now_ns:
            self._start(self._upcoming.popleft())
        self._client.receiver.due_ns = self._upcoming[0].scheduled_ns if self._upcoming else NEVER_NS

    async def _prepare_ahead(self, start_ns: int) -> None:
        """Prepare requests in time. The planned time stays as it is, so that every delay shows in the send."""
        launching = self._launching
        while (exchange := self._prepared.take()) is not None:
            exchange.scheduled_ns = start_ns + round(exchange.call.request.arrival_ns / launching.time_scale)
            # Always yield, also when behind: prepared requests have to leave.
            await asyncio.sleep(max(exchange.scheduled_ns - LEAD_NS - time.monotonic_ns(), 0) / NS_PER_S)
            while launching.num_waiting() > MOST_PREPARED:  # noqa: ASYNC110 - far behind: not all need to be in memory
                await asyncio.sleep(_POLL_S)
            if launching.can_connect_ahead(len(self._upcoming)):
                self._client.prepare(exchange)
            self._upcoming.append(exchange)
            self._progress.change()
