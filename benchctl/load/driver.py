"""Driving the load: which request is sent when.

One dispatcher goes through the prepared requests in their order and starts each when it is due *and* a slot is
free *and* the rate limit allows it. A closed loop is the case in which nothing but the slot counts, an open
loop the one in which nothing but the time does, a burst the one in which nothing does. Every request that was
sent leaves exactly one record, whatever happens.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncio_throttle.throttler import Throttler

from benchctl.load.client import Call, Exchange, StreamClient, understand
from benchctl.profile.model import Arrival
from benchctl.records.run import RequestRecord
from benchctl.units import NS_PER_S

_OPEN_LOOP: Final = frozenset({"constant", "poisson", "gamma", "trace"})
_LAST_WORDS_S: Final = 0.2
"""How long requests in flight may still end by themselves when the load is called off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """What one load came to."""

    num_sent: int
    num_failed: int
    first_send_ns: int | None
    last_token_ns: int | None
    first_error: str | None = None
    """What the first failed request failed with."""


NOTHING_SENT: Final = LoadSummary(num_sent=0, num_failed=0, first_send_ns=None, last_token_ns=None)


class Load:
    """One load. ``on_record`` gets each record as it completes.

    The schedule is on the engine's clock: with a virtual one, ``time_scale`` seconds of it pass in each second.
    """

    def __init__(
        self,
        client: StreamClient,
        arrival: Arrival,
        on_record: Callable[[RequestRecord], None],
        *,
        time_scale: float = 1.0,
    ) -> None:
        self._client = client
        self._time_scale = time_scale
        self._is_open_loop = arrival.kind in _OPEN_LOOP
        self._slots = asyncio.Semaphore(arrival.max_concurrency) if arrival.max_concurrency else None
        self._throttle = _throttler(arrival.launch_rate_limit, time_scale)
        self._on_record = on_record
        self._records: list[RequestRecord] = []
        self._flights: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    def summary(self) -> LoadSummary:
        """What has been recorded until now."""
        sends = [record.sent_ns for record in self._records if record.sent_ns is not None]
        tokens = [c.chunk_ns[-1] for record in self._records for c in record.choices if c.chunk_ns]
        errors = [record.error for record in self._records if record.error is not None]
        return LoadSummary(
            num_sent=len(self._records),
            num_failed=len(errors),
            first_send_ns=min(sends, default=None),
            last_token_ns=max(tokens, default=None),
            first_error=f"{errors[0].kind}: {errors[0].message}" if errors else None,
        )

    @property
    def error_kinds(self) -> frozenset[str]:
        """The ways in which requests have failed until now."""
        return frozenset(record.error.kind for record in self._records if record.error is not None)

    async def drive(self, calls: Sequence[Call]) -> None:
        """Send all of ``calls``, in their order, and wait for the last to end.

        When cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that
        were not sent leave no record.
        """
        start_ns = time.monotonic_ns()
        try:
            for call in calls:
                scheduled_ns = await self._turn(call, start_ns)
                flight = asyncio.create_task(self._fly(call, scheduled_ns))
                self._flights.add(flight)
                flight.add_done_callback(self._landed)
                self._raise_fault()
            while self._flights:
                await asyncio.wait(self._flights)
        finally:
            await self._call_down()
        self._raise_fault()

    async def _turn(self, call: Call, start_ns: int) -> int:
        """Wait until ``call`` may go; returns when it was scheduled.

        In an open loop that is the planned time, so that every delay of the client or of a cap shows as the
        difference to the send. Elsewhere a request is due the moment nothing holds it back.
        """
        offset_ns = round(call.request.arrival_ns / self._time_scale) if self._is_open_loop else 0
        due_ns = start_ns + offset_ns
        await _sleep_until(due_ns)
        if self._slots is not None:
            await self._slots.acquire()
        if self._throttle is not None:
            await self._throttle.acquire()  # type: ignore[no-untyped-call]
        return due_ns if self._is_open_loop else time.monotonic_ns()

    async def _fly(self, call: Call, scheduled_ns: int) -> None:
        exchange = await self._client.exchange(call, scheduled_ns)
        if self._slots is not None:
            self._slots.release()
        # The next request goes out before this one is read: the slot must not stay empty meanwhile.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        self._keep(await _understood(exchange))

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        if not flight.cancelled():
            fault = flight.exception()  # asked for each, because asyncio complains of those that nobody asked for
            self._fault = self._fault or fault

    def _raise_fault(self) -> None:
        """A record that cannot be kept (a full disk) ends the load: its numbers would be lost one by one."""
        if self._fault is not None:
            raise self._fault

    async def _call_down(self) -> None:
        """Bring down what is still in flight, each with its record."""
        if self._flights:
            await asyncio.wait(self._flights, timeout=_LAST_WORDS_S)
        late = set(self._flights)
        for flight in late:
            flight.cancel()
        if late:
            await asyncio.wait(late)

    def _keep(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._on_record(record)


async def _sleep_until(due_ns: int) -> None:
    """Sleep until ``due_ns``; a timer that fires early is set again for the rest."""
    while (early_ns := due_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110 - the condition is the time itself
        await asyncio.sleep(early_ns / NS_PER_S)


async def _understood(exchange: Exchange) -> RequestRecord:
    """Read the exchange to the end; a cancellation that arrives meanwhile only means to be quick."""
    try:
        return await understand(exchange)
    except asyncio.CancelledError:
        return await understand(exchange)


def _throttler(rate_per_s: float | None, time_scale: float) -> Throttler | None:
    if rate_per_s is None:
        return None
    return Throttler(rate_limit=1, period=1 / (rate_per_s * time_scale), retry_interval=0.001)
