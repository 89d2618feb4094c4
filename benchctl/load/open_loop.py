"""An open loop: each request is sent at its planned time, whatever the server does.

Connections are laid ready shortly before a request is due. A timer of the kernel launches it, or a look at the
clock in the midst of reading, which may take longer than a timer can wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from asyncio_throttle.throttler import Throttler

from benchctl.load.alarm import Alarm
from benchctl.load.prepared import MOST_PREPARED, PreparedRequests
from benchctl.load.progress import Progress
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.exchange import Exchange
from benchctl.load.transport.receiver import NEVER_NS
from benchctl.units import NS_PER_S

LEAD_NS: Final = 100_000_000
"""How long before it is due a request is laid ready: its connection must be open by then."""
_POLL_S: Final = 0.005


class OpenLoop:
    """Sends the requests of one load by its plan. ``start`` gets each when it is due.

    ``can_lay`` says whether a connection may be opened ahead for one more, beside the given number that lie ready:
    one that will have to wait for a slot needs none yet.
    """

    def __init__(
        self,
        client: StreamClient,
        prepared: PreparedRequests,
        progress: Progress,
        *,
        start: Callable[[Exchange], None],
        can_lay: Callable[[int], bool],
        num_waiting: Callable[[], int],
        throttle: Throttler | None,
        time_scale: float,
    ) -> None:
        self._client, self._prepared, self._progress = client, prepared, progress
        self._start, self._can_lay, self._num_waiting = start, can_lay, num_waiting
        self._throttle = throttle
        self._time_scale = time_scale
        self._laid: deque[Exchange] = deque()
        """Not due yet."""

    async def drive(self, start_ns: int) -> None:
        """Start each at its planned time after ``start_ns``, and lay it ready before; return after the last."""
        laying = self._progress.follow(asyncio.create_task(self._lay_ahead(start_ns)))
        receiver = self._client.receiver
        if self._throttle is None:
            receiver.on_due = self._start_due
        try:
            with Alarm() as alarm:
                while True:
                    await self._progress.until(lambda: bool(self._laid) or laying.done())
                    if not self._laid:
                        return
                    receiver.due_ns = self._laid[0].scheduled_ns
                    await alarm.sleep_until(self._laid[0].scheduled_ns)
                    if self._throttle is None:
                        self._start_due()
                    else:
                        await self._throttle.acquire()  # type: ignore[no-untyped-call]
                        self._start(self._laid.popleft())
        finally:
            receiver.due_ns, receiver.on_due = NEVER_NS, lambda: None
            laying.cancel()
            await asyncio.wait({laying})

    def _start_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._laid and self._laid[0].scheduled_ns <= now_ns:
            self._start(self._laid.popleft())
        self._client.receiver.due_ns = self._laid[0].scheduled_ns if self._laid else NEVER_NS

    async def _lay_ahead(self, start_ns: int) -> None:
        """The planned time is kept whatever a cap or the client does, so that every delay shows in the send."""
        while (exchange := self._prepared.take()) is not None:
            exchange.scheduled_ns = start_ns + round(exchange.call.request.arrival_ns / self._time_scale)
            # Others have their turn also when this is behind: what is laid has to leave.
            await asyncio.sleep(max(exchange.scheduled_ns - LEAD_NS - time.monotonic_ns(), 0) / NS_PER_S)
            while self._num_waiting() > MOST_PREPARED:  # noqa: ASYNC110 - far behind its cap: not all need be held
                await asyncio.sleep(_POLL_S)
            if self._can_lay(len(self._laid)):
                self._client.lay(exchange)
            self._laid.append(exchange)
            self._progress.change()
