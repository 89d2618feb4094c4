"""Driving the load: which request is sent when.

Requests go through two hands, in their order. The first lays each ready shortly before it is due: it waits for a
free slot and opens the connection. The second launches each when it is due *and* the rate limit allows it; where
the connection is not open by then, the request leaves as soon as it is, and holds up none of those that follow. A
closed loop is the case in which nothing but the slot counts, an open loop the one in which nothing but the time
does, a burst the one in which nothing does. What the slots hold at the start is laid ready as a whole and then
launched in one go, so that "at once" means within the time that writing takes. Every request that was sent leaves
exactly one record, whatever happens.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from asyncio_throttle.throttler import Throttler

from benchctl.load.alarm import Alarm
from benchctl.load.client import StreamClient
from benchctl.load.exchange import Call, Exchange
from benchctl.load.heartbeat import beat
from benchctl.load.tally import Activity, LoadSummary, Tally
from benchctl.profile.model import Arrival
from benchctl.records.run import ClientSample, RequestRecord
from benchctl.units import NS_PER_S

OPEN_LOOP: Final = frozenset({"constant", "poisson", "gamma", "trace"})
LEAD_NS: Final = 100_000_000
"""How long before it is due a request is laid ready: its connection must be open by then."""
_LAST_WORDS_S: Final = 0.2
"""How long requests in flight may still end by themselves when the load is called off."""
_SENDS_AT_ONCE: Final = 4
"""Launches in a row before what has arrived meanwhile is read: 4 take some 0.1 ms."""


class Load:
    """One load of one process. ``on_record`` gets each record as it completes, ``on_sample`` how the process does.

    The schedule is on the engine's clock: with a virtual one, ``time_scale`` seconds of it pass in each second.
    """

    def __init__(
        self,
        client: StreamClient,
        arrival: Arrival,
        on_record: Callable[[RequestRecord], None],
        *,
        time_scale: float = 1.0,
        on_sample: Callable[[ClientSample], None] | None = None,
        worker: int = 0,
    ) -> None:
        self._client = client
        self._on_sample = on_sample
        self._worker = worker
        self._time_scale = time_scale
        self._is_open_loop = arrival.kind in OPEN_LOOP
        self._max_concurrency = arrival.max_concurrency
        self._slots = asyncio.Semaphore(arrival.max_concurrency) if arrival.max_concurrency else None
        self._throttle = _throttler(arrival.launch_rate_limit, time_scale)
        self._on_record = on_record
        self._tally = Tally()
        self._flights: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    def summary(self) -> LoadSummary:
        """What has been recorded until now."""
        return self._tally.summary()

    @property
    def error_kinds(self) -> frozenset[str]:
        """The ways in which requests have failed until now."""
        return self._tally.error_kinds

    def activity(self) -> Activity:
        """What is open now, and when something last came of it."""
        return self._client.activity()

    async def drive(self, calls: Iterable[Call], begin: Callable[[], Awaitable[int]] | None = None) -> None:
        """Send all of ``calls``, in their order, and wait for the last to end.

        ``begin`` says when the schedule starts, in place of at once. It is awaited when what leaves at the start is
        ready; in an open loop before anything is, and then names a moment that leaves time for it (``LEAD_NS``).
        When cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that
        were not sent leave no record.
        """
        beating = asyncio.create_task(self._beat())
        try:
            if self._is_open_loop:
                start_ns = await begin() if begin is not None else time.monotonic_ns() + LEAD_NS
                await self._drive_by_time(iter(calls), start_ns)
            else:
                await self._drive_by_slots(iter(calls), begin)
            while self._flights:
                await asyncio.wait(self._flights, return_when=asyncio.FIRST_EXCEPTION)
                self._raise_fault()
        finally:
            await self._call_down()
            beating.cancel()
            await asyncio.wait({beating})
            self._note_fault(beating)
        self._raise_fault()

    async def _beat(self) -> None:
        if self._on_sample is not None:
            await beat(self._client, self._on_sample, self._worker)

    async def _drive_by_slots(self, calls: Iterator[Call], begin: Callable[[], Awaitable[int]] | None) -> None:
        """Launch what the slots hold in one go, then each of the others as a slot frees."""
        await self._launch_first(calls, begin)
        for call in calls:
            exchange = await self._lay(call)
            exchange.leave(await self._throttled(exchange.scheduled_ns))
            self._raise_fault()

    async def _launch_first(self, calls: Iterator[Call], begin: Callable[[], Awaitable[int]] | None) -> None:
        first = [await self._lay(call) for call in islice(calls, self._max_concurrency)]
        for exchange in first:
            await exchange.launch.ready()
        if begin is not None:
            with Alarm() as alarm:
                await alarm.sleep_until(await begin())
        now_ns = time.monotonic_ns()
        for number, exchange in enumerate(first, 1):
            exchange.leave(await self._throttled(now_ns))
            if number % _SENDS_AT_ONCE == 0:
                self._client.breathe()

    async def _drive_by_time(self, calls: Iterator[Call], start_ns: int) -> None:
        """Launch each at its planned time, and lay it ready before."""
        laid: asyncio.Queue[Exchange | None] = asyncio.Queue()
        laying = asyncio.create_task(self._lay_ahead(calls, start_ns, laid))
        try:
            with Alarm() as alarm:
                while (exchange := await laid.get()) is not None:
                    await alarm.sleep_until(exchange.scheduled_ns)
                    await self._throttled(0)
                    exchange.leave(exchange.scheduled_ns)
                    self._raise_fault()
        finally:
            laying.cancel()
            await asyncio.wait({laying})
        await laying

    async def _lay_ahead(self, calls: Iterator[Call], start_ns: int, laid: asyncio.Queue[Exchange | None]) -> None:
        """The planned time is kept whatever a cap or the client does, so that every delay shows in the send."""
        try:
            for call in calls:
                due_ns = start_ns + round(call.request.arrival_ns / self._time_scale)
                # Others have their turn also when this is behind: what is laid has to leave.
                await asyncio.sleep(max(due_ns - LEAD_NS - time.monotonic_ns(), 0) / NS_PER_S)
                exchange = await self._lay(call)
                exchange.scheduled_ns = due_ns
                laid.put_nowait(exchange)
        finally:
            laid.put_nowait(None)

    async def _lay(self, call: Call) -> Exchange:
        """Begin an exchange as soon as there is a slot for it; it is due from then on, unless there is a plan."""
        if self._slots is not None:
            await self._slots.acquire()
        exchange = self._client.begin(call)
        exchange.scheduled_ns = time.monotonic_ns()
        flight = asyncio.create_task(self._fly(exchange))
        self._flights.add(flight)
        flight.add_done_callback(self._landed)
        return exchange

    async def _throttled(self, due_ns: int) -> int:
        """Wait for the rate limit; returns ``due_ns``, or the time at which a limit allowed it."""
        if self._throttle is None:
            return due_ns
        await self._throttle.acquire()  # type: ignore[no-untyped-call]
        return time.monotonic_ns()

    async def _fly(self, exchange: Exchange) -> None:
        try:
            await self._client.carry_out(exchange)
        finally:  # also when it raised, which it never should: the next request must not wait for ever
            if self._slots is not None:
                self._slots.release()
        if not exchange.has_left:
            return
        # The next request goes out before this one is understood: the slot must not stay empty meanwhile.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        self._keep(await _understood(exchange))

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        self._note_fault(flight)

    def _note_fault(self, ended: asyncio.Task[None]) -> None:
        """Keep the first; all are asked for, because asyncio complains of those that nobody asked for."""
        fault = None if ended.cancelled() else ended.exception()
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
        self._tally.count(record)
        self._on_record(record)


async def _understood(exchange: Exchange) -> RequestRecord:
    """Read the exchange to the end; a cancellation that arrives meanwhile only means to be quick."""
    try:
        return await exchange.understood()
    except asyncio.CancelledError:
        return await exchange.understood()


def _throttler(rate_per_s: float | None, time_scale: float) -> Throttler | None:
    if rate_per_s is None:
        return None
    return Throttler(rate_limit=1, period=1 / (rate_per_s * time_scale), retry_interval=0.001)
