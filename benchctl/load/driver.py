"""Drives a load: decides which request is sent when.

The receiver reports the end of a stream while it reads the sockets, and the next request of a closed loop leaves at
once, on the connection that became free. Only then is the answer that ended decoded, written and counted, in slices
of less than a millisecond between which the sockets are read. The first requests of all slots are prepared before
any is launched, so that they leave together. Every request that was sent leaves exactly one record, whatever
happens.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Final, TypeAlias

from benchctl.load.alarm import Alarm
from benchctl.load.backlog import Backlog
from benchctl.load.heartbeat import beat
from benchctl.load.launch_limit import LaunchLimit
from benchctl.load.open_loop import LEAD_NS, Launching, OpenLoop
from benchctl.load.prepared import MOST_PREPARED, PreparedRequests
from benchctl.load.progress import Progress
from benchctl.load.tally import Activity, LoadSummary, Tally
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.exchange import Call, Exchange
from benchctl.load.transport.failures import CANCELLED
from benchctl.profile.model import Arrival
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample

_FINISH_WAIT_S: Final = 0.2
"""How long requests in flight may still end by themselves when the load is cancelled."""
_SENDS_AT_ONCE: Final = 4
"""Launches in a row before the sockets are read again: 4 take about 0.1 ms."""
_SLICE_NS: Final = 500_000
"""Requests are prepared for this long before the sockets are read again."""
_RECHECK_S: Final = 0.001

SlotFreed: TypeAlias = tuple[int, bytes]
"""The read that freed a slot: its time, and the kernel's timestamp."""


class Load:
    """One load of one process. ``on_record`` gets each record when it is complete, ``on_sample`` samples of the
    process.

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
        self._is_open_loop = arrival.is_open_loop
        self._max_concurrency = arrival.max_concurrency
        rate_per_s = arrival.launch_rate_limit
        self._limit = None if rate_per_s is None else LaunchLimit(rate_per_s * time_scale)
        self._on_record = on_record
        self._tally = Tally()
        self._progress = Progress()
        self._prepared = PreparedRequests(iter(()), self._begin, 0)
        self._backlog = Backlog(self._record)
        self._in_slots: set[Exchange] = set()
        self._empty_slots: deque[SlotFreed] = deque()
        """Slots that became free while no request was prepared."""
        self._waiting: deque[Exchange] = deque()
        """Requests of an open loop that are due and have no slot."""
        self._does_refill = False
        """True once the end of a stream sends the next request."""
        self._is_cancelled = False
        self._has_work = asyncio.Event()

    def summary(self) -> LoadSummary:
        return self._tally.summary()

    def activity(self) -> Activity:
        return self._client.activity()

    async def drive(self, calls: Iterable[Call], begin: Callable[[], Awaitable[int]] | None = None) -> None:
        """Send all of ``calls``, in their order, and wait for the last to end.

        ``begin`` returns when the schedule starts; without it, that is now. It is awaited when the first requests
        are prepared; in an open loop it is awaited before, and returns a time at least ``LEAD_NS`` ahead. When this
        is cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that were
        not sent leave no record.
        """
        max_ahead = min(self._max_concurrency or MOST_PREPARED, MOST_PREPARED)
        self._prepared = PreparedRequests(iter(calls), self._begin, max_ahead)
        self._client.on_ready = self._progress.change
        with self._progress.recording_loop_errors(), self._limit or nullcontext():
            helping = (self._beat(), self._catch_up())
            helpers = {self._progress.follow(asyncio.create_task(helper)) for helper in helping}
            try:
                if self._is_open_loop:
                    start_ns = await begin() if begin is not None else time.monotonic_ns() + LEAD_NS
                    await self._open_loop().drive(start_ns)
                else:
                    await self._drive_by_slots(begin)
                await self._progress.until(lambda: not self._in_slots and self._backlog.is_done)
            finally:
                await self._cancel_remaining()
                for helper in helpers:
                    helper.cancel()
                await asyncio.wait(helpers)
        self._progress.raise_error()

    async def _beat(self) -> None:
        if self._on_sample is not None:
            await beat(self._client, self._on_sample, self._worker)

    def _begin(self, call: Call) -> Exchange:
        return self._client.begin(call, self._on_end)

    def _open_loop(self) -> OpenLoop:
        def can_connect_ahead(num_prepared: int) -> bool:
            return self._max_concurrency is None or len(self._in_slots) + num_prepared < self._max_concurrency

        launching = Launching(
            start=self._start_or_queue,
            can_connect_ahead=can_connect_ahead,
            num_waiting=lambda: len(self._waiting),
            limit=self._limit,
            time_scale=self._time_scale,
        )
        return OpenLoop(self._client, self._prepared, self._progress, launching)

    async def _drive_by_slots(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        """Launch the first request of every slot together, then each of the others when a slot becomes free."""
        await self._launch_first(begin)
        if self._limit is None:
            self._does_refill = True
            self._fill_empty_slots()
            self._has_work.set()
            await self._progress.until(lambda: self._prepared.is_done)
            return
        while (exchange := self._prepared.take()) is not None:
            await self._progress.until(lambda: len(self._in_slots) < (self._max_concurrency or 1))
            await self._limit.acquire()
            exchange.scheduled_ns = time.monotonic_ns()
            self._start(exchange)

    async def _launch_first(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        first = [*islice(iter(self._prepared.take, None), self._max_concurrency)]
        self._client.connections.max_spares = len(first)
        for exchange in first:
            self._in_slots.add(exchange)
            self._client.prepare(exchange)
        self._client.connections.fill()
        await self._progress.until(lambda: all(map(self._client.is_ready, first)))
        if begin is not None:
            with Alarm() as alarm:
                await alarm.sleep_until(await begin())
        now_ns = time.monotonic_ns()
        for number, exchange in enumerate(first, 1):
            exchange.scheduled_ns = now_ns
            if self._limit is not None:
                await self._limit.acquire()
                exchange.scheduled_ns = time.monotonic_ns()
            self._client.launch(exchange)
            if number % _SENDS_AT_ONCE == 0:
                self._client.receiver.read_ready()

    def _start_or_queue(self, exchange: Exchange) -> None:
        if self._max_concurrency is not None and len(self._in_slots) >= self._max_concurrency:
            self._waiting.append(exchange)
        else:
            self._start(exchange)

    def _start(self, exchange: Exchange, slot_freed: SlotFreed | None = None) -> None:
        """Launch it in a slot of its own; no effect when it has failed since it was prepared."""
        if exchange.has_ended:
            return
        self._in_slots.add(exchange)
        exchange.slot_freed = slot_freed
        self._client.launch(exchange)

    def _on_end(self, exchange: Exchange) -> None:
        """Send the next request when one has ended, which is decoded later. Called while sockets are read."""
        had_slot = exchange in self._in_slots
        self._in_slots.discard(exchange)
        if had_slot and not self._is_cancelled:
            self._fill_slot(exchange)
        if exchange.has_left:
            self._backlog.add(exchange)
        self._has_work.set()
        self._progress.change()

    def _fill_slot(self, ended: Exchange) -> None:
        is_whole = ended.failure is None and bool(ended.reads)
        slot_freed = ended.reads[-1][:2] if is_whole else (time.monotonic_ns(), b"")
        if self._waiting:
            self._start(self._waiting.popleft(), slot_freed)
        elif self._max_concurrency is not None and not self._is_open_loop and self._limit is None:
            self._empty_slots.append(slot_freed)
            if self._does_refill:
                self._fill_empty_slots()

    def _fill_empty_slots(self) -> None:
        while self._empty_slots and (exchange := self._prepared.take_ready()) is not None:
            self._start(exchange, self._empty_slots.popleft())

    async def _catch_up(self) -> None:
        """Prepare requests, and record those that have ended, whenever there is either; never returns."""
        while True:
            self._has_work.clear()
            while self._prepared.has_room or not self._backlog.is_empty:
                if self._backlog.is_growing and not self._prepared.is_empty:
                    await asyncio.sleep(_RECHECK_S)
                    continue
                self._prepare_some()
                await self._record_one()
                self._progress.change()
                await asyncio.sleep(0)
            await self._has_work.wait()

    def _prepare_some(self) -> None:
        end_ns = time.monotonic_ns() + _SLICE_NS
        try:
            while self._prepared.has_room and time.monotonic_ns() < end_ns:
                self._prepared.make_one()
                if self._does_refill:
                    self._fill_empty_slots()
        except Exception as error:  # noqa: BLE001 - any error ends the load
            self._progress.record_error(error)
            self._prepared.give_up()

    async def _record_one(self) -> None:
        if self._backlog.is_empty:
            return
        try:
            await self._backlog.record_first()
        except Exception as error:  # noqa: BLE001 - any error; the other requests are recorded as far as possible
            self._progress.record_error(error)

    def _record(self, record: RequestRecord) -> None:
        self._tally.count(record)
        self._on_record(record)

    async def _cancel_remaining(self) -> None:
        """End the requests that are still in flight, each with its record."""
        self._is_cancelled = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_WAIT_S):
                await self._progress.wait(lambda: not self._in_slots)
        self._prepared.give_up()
        self._client.stop_all(CANCELLED)
        await self._progress.wait(lambda: self._backlog.is_done)
