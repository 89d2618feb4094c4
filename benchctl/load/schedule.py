"""The schedule of a load: which request is sent when.

The receiver reports the end of a stream while it reads the sockets, and the next request of a closed loop leaves at
once, on the connection that became free. Only then is the answer that ended decoded, written and counted, in slices
of less than a millisecond between which the sockets are read. The first requests of all slots are prepared before
any is launched, so that they leave together. In an open loop, each request is sent at its planned time, whatever
the server does: a timer of the kernel launches it, or the receiver while it reads, because reading may take longer
than a timer can wait. Every request that was sent leaves exactly one record, whatever happens.

A slot is a user: one whose conversation has later turns keeps it while they think. The next turn is made of the
decoded answer, so that it cannot be sent before it; an alarm starts it when it is due.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from asyncio_throttle.throttler import Throttler

from benchctl.load.client import StreamClient
from benchctl.load.clocks import Alarm
from benchctl.load.exchange import CANCELLED, Activity, Exchange, LoadSummary
from benchctl.load.sockets import NEVER_NS
from benchctl.profile.arrival import Arrival
from benchctl.records.record import Call, RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S, s_from_ns
from benchctl.workload.turns import grouped, with_answers

LEAD_NS: Final = 100 * NS_PER_MS
"""How long before it is due a request of an open loop gets its connection, so that it is open by then."""
_MOST_PREPARED: Final = 1024
"""Requests that are bytes ahead of their time, or wait for a slot after it ..."""
_MOST_PREPARED_BYTES: Final = 8 << 20
"""... and their bytes: long prompts are not all in memory twice."""
_MOST_ENDED: Final = 16_384
"""Answers that wait to be recorded, beyond which no further request is prepared: a client that cannot keep up with
its server sends less, instead of keeping all that it received."""
_TURN_NS: Final = NS_PER_MS // 2
"""How long requests are prepared and answers recorded before the sockets are read again."""
_WAVE_GAP_NS: Final = 2 * NS_PER_MS
"""Answers that end within this of each other are one wave: all its slots are filled before one is decoded ..."""
_MOST_DELAY_NS: Final = 50 * NS_PER_MS
"""... but no later than this after the first of them: where answers end all the time, no moment is better."""
_FEW: Final = 16
_FEW_DELAY_NS: Final = 200 * NS_PER_MS
"""Fewer answers wait so long for others: one alone takes several times as long, with all that it needs out of the
processor's cache."""
_SAMPLE_NS: Final = 100 * NS_PER_MS
_BEAT_NS: Final = 20 * NS_PER_MS
"""Often enough to see most stalls of the loop; it costs a few thousandths of a core."""
MADE_UP_S: Final = 0.005
"""The longest delay that later launches make up for: so many seconds' worth of them may follow at once."""

SlotFreed: TypeAlias = tuple[int, bytes]
"""The read that freed a slot: its time, and the kernel's timestamp."""


class LaunchLimit:
    """At most ``rate_per_s`` launches per second, evenly spaced. Use as a context manager, inside an event loop.

    asyncio-throttle alone looks again after whole milliseconds, and counts its period from a launch that was late
    already: of 2,000 launches per second it lets a third pass. Here a timer of the kernel wakes the launch when its
    period has ended, and the next period is shorter by as much as the launch was late.
    """

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


class Load:
    """One load of one process. ``on_record`` gets each record when it is complete, ``on_sample`` samples of the
    process, ten times per second.

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
        self._on_record, self._on_sample, self._worker = on_record, on_sample, worker
        self._time_scale = time_scale
        self._is_open_loop = arrival.is_open_loop
        self._max_concurrency = arrival.max_concurrency
        self._most_prepared = min(arrival.max_concurrency or _MOST_PREPARED, _MOST_PREPARED)
        rate_per_s = arrival.launch_rate_limit
        self._limit = None if rate_per_s is None else LaunchLimit(rate_per_s * time_scale)
        self.summary = LoadSummary()
        self._calls: Iterator[tuple[Call, ...]] = iter(())
        """The turns of a conversation together, others alone."""
        self._is_exhausted = False
        """True when no call is left to prepare."""
        self._prepared: deque[Exchange] = deque()
        """Requests that are bytes and not due yet."""
        self._num_prepared_bytes = 0
        self._upcoming: deque[Exchange] = deque()
        """Requests of an open loop that have their connections and are not due yet."""
        self._waiting: deque[Exchange] = deque()
        """Requests of an open loop that are due and have no slot."""
        self._turns: list[tuple[int, int, Exchange]] = []
        """Heap of later turns by the time at which they are due."""
        self._has_turns = False
        self._in_slots: set[Exchange] = set()
        """Requests that are open; of a user who thinks the turn before, and then the next."""
        self._empty_slots: deque[SlotFreed] = deque()
        """Slots that became free while no request was prepared."""
        self._does_refill = False
        """True once the end of a stream sends the next request."""
        self._ended: deque[Exchange] = deque()
        """Requests that have ended and are not recorded yet, in the order of their ends."""
        self._is_recording = False
        self._is_cancelled = False
        self._error: BaseException | None = None
        """The first error, which ends the load: of a record that cannot be stored, or a fault of ours."""
        self._has_changed = asyncio.Event()

    def activity(self) -> Activity:
        return self._client.activity()

    async def drive(self, calls: Iterable[Call], begin: Callable[[], Awaitable[int]] | None = None) -> None:
        """Send all of ``calls``, in their order, and wait for the last to end.

        ``begin`` returns when the schedule starts; without it, that is now. It is awaited when the first requests
        are prepared; in an open loop it is awaited before, and returns a time at least ``LEAD_NS`` ahead. When this
        is cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that were
        not sent leave no record.
        """
        self._calls, self._is_exhausted = grouped(calls), False
        self._client.on_ready = self._has_changed.set
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(self._take_loop_error)
        helpers = {asyncio.create_task(self._sample()), asyncio.create_task(self._catch_up())}
        for helper in helpers:
            helper.add_done_callback(self._take_task_error)
        try:
            with Alarm(self._start_turns) as self._turn_alarm:
                with self._limit or nullcontext():
                    await self._send_all(begin)
                await self._until(lambda: not (self._in_slots or self._ended or self._is_recording))
        finally:
            await self._cancel_remaining()
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            loop.set_exception_handler(handler)
        self._raise_error()

    async def _send_all(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        if self._is_open_loop:
            await self._follow_plan(time.monotonic_ns() + LEAD_NS if begin is None else await begin())
        elif self._limit is not None:
            await _sleep_until_start(begin)
            await self._send_by_limit(self._limit)
        else:
            await self._launch_first(begin)
            self._does_refill = True
            self._fill_empty_slots()
            await self._until(lambda: self._is_exhausted and not self._prepared)

    async def _launch_first(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        """Launch the first request of every slot together; the end of each of them launches another."""
        while not self._is_exhausted and len(self._prepared) != self._max_concurrency:
            self._prepare_one()
        first = [*islice(iter(self._take_prepared, None), self._max_concurrency)]
        for exchange in first:
            self._in_slots.add(exchange)
            self._client.prepare(exchange)
        await self._until(lambda: all(map(self._client.is_ready, first)))
        await _sleep_until_start(begin)
        now_ns = time.monotonic_ns()
        for number, exchange in enumerate(first, 1):
            exchange.scheduled_ns = now_ns
            self._client.launch(exchange)
            # Launches in a row before the sockets are read again: 4 take about 0.1 ms
            if number % 4 == 0:
                self._client.receiver.read_ready()

    async def _send_by_limit(self, limit: LaunchLimit) -> None:
        """Send each request when a slot is free and the limit allows it; its connection is opened before."""
        while True:
            await self._until(lambda: bool(self._prepared) or self._is_exhausted)
            exchange = self._take_prepared()
            if exchange is None:
                return
            await self._until(self._has_free_slot)
            self._client.prepare(exchange)
            await limit.acquire()
            exchange.scheduled_ns = time.monotonic_ns()
            self._start(exchange)

    async def _follow_plan(self, start_ns: int) -> None:
        """Connect each request ahead and start it at its planned time after ``start_ns``; return after the last.

        The planned time stays as it is, so that every delay shows in the send.
        """
        receiver = self._client.receiver
        if self._limit is None:
            receiver.on_due = self._start_due
        try:
            with Alarm() as alarm:
                while True:
                    await self._until(lambda: bool(self._prepared or self._upcoming) or self._is_exhausted)
                    if not (self._prepared or self._upcoming):
                        return
                    await alarm.sleep_until(self._connect_ahead(start_ns))
                    if self._limit is None:
                        self._start_due()
                    elif self._upcoming and self._upcoming[0].scheduled_ns <= time.monotonic_ns():
                        await self._limit.acquire()
                        self._start_or_queue(self._upcoming.popleft())
        finally:
            receiver.due_ns, receiver.on_due = NEVER_NS, lambda: None

    def _connect_ahead(self, start_ns: int) -> int:
        """Connect the next request if it is time to; returns when there is something to do again.

        One at a time: requests that are due have to leave in between. A request that will have to wait for a slot
        needs no connection yet. Far behind, not all need to be in memory.
        """
        now_ns, next_ns = time.monotonic_ns(), NEVER_NS
        if len(self._waiting) > _MOST_PREPARED:
            next_ns = now_ns + 5 * NS_PER_MS
        elif self._prepared:
            exchange = self._prepared[0]
            exchange.scheduled_ns = start_ns + round(exchange.call.request.arrival_ns / self._time_scale)
            next_ns = exchange.scheduled_ns - LEAD_NS
            if next_ns <= now_ns:
                if self._has_free_slot(len(self._upcoming)):
                    self._client.prepare(exchange)
                self._take_prepared()
                self._upcoming.append(exchange)
        self._client.receiver.due_ns = self._upcoming[0].scheduled_ns if self._upcoming else NEVER_NS
        return min(next_ns, self._client.receiver.due_ns)

    def _start_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._upcoming and self._upcoming[0].scheduled_ns <= now_ns:
            self._start_or_queue(self._upcoming.popleft())
        self._client.receiver.due_ns = self._upcoming[0].scheduled_ns if self._upcoming else NEVER_NS

    def _has_free_slot(self, num_promised: int = 0) -> bool:
        """True when a request can be sent beside those in slots and ``num_promised`` more."""
        return self._max_concurrency is None or len(self._in_slots) + num_promised < self._max_concurrency

    def _start_or_queue(self, exchange: Exchange) -> None:
        if self._has_free_slot():
            self._start(exchange)
        else:
            self._waiting.append(exchange)

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
        if not exchange.later:  # else the slot is kept for the next turn
            self._in_slots.discard(exchange)
            if had_slot and not self._is_cancelled:
                self._fill_slot(exchange)
        if exchange.has_left:
            self._ended.append(exchange)
        self._has_changed.set()

    def _follow(self, ended: Exchange, record: RequestRecord) -> None:
        """Plan the turn behind one that has ended, with as much of an answer as there is."""
        self._in_slots.discard(ended)
        if self._is_cancelled:
            return
        answers = (*ended.earlier_answers, record.choices[0].text if record.choices else "")
        call = ended.later[0]
        exchange = self._client.begin(with_answers(call, answers), self._on_end)
        exchange.later, exchange.earlier_answers = ended.later[1:], answers
        exchange.scheduled_ns = ended.done_ns + round(call.request.think_ns / self._time_scale)
        self._in_slots.add(exchange)
        self._client.prepare(exchange)
        heapq.heappush(self._turns, (exchange.scheduled_ns, call.request.index, exchange))
        self._start_turns()

    def _start_turns(self) -> None:
        """Start the turns that are due, and set the alarm to the next."""
        now_ns = time.monotonic_ns()
        while self._turns and self._turns[0][0] <= now_ns:
            self._start(heapq.heappop(self._turns)[2])
        if self._turns:
            self._turn_alarm.set(self._turns[0][0])

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
        while self._empty_slots and (exchange := self._take_prepared()) is not None:
            self._start(exchange, self._empty_slots.popleft())

    def _take_prepared(self) -> Exchange | None:
        if not self._prepared:
            return None
        exchange = self._prepared.popleft()
        self._num_prepared_bytes -= len(exchange.wire)
        return exchange

    def _prepare_one(self) -> None:
        calls = next(self._calls, None)
        if calls is None:
            self._is_exhausted = True
            return
        exchange = self._client.begin(calls[0], self._on_end)
        if len(calls) > 1:
            exchange.later, self._has_turns = calls[1:], True
        self._num_prepared_bytes += len(exchange.wire)
        self._prepared.append(exchange)

    def _can_prepare(self) -> bool:
        if self._is_exhausted or len(self._ended) > _MOST_ENDED:
            return False
        return not self._prepared or (
            len(self._prepared) < self._most_prepared and self._num_prepared_bytes < _MOST_PREPARED_BYTES
        )

    async def _catch_up(self) -> None:
        """Prepare requests, and record those that have ended, whenever there is either; never returns."""
        while True:
            await self._wait(lambda: bool(self._ended) or self._can_prepare())
            wait_ns = self._wave_left_ns()
            if wait_ns > 0 and (self._prepared or self._is_exhausted):
                self._has_changed.clear()
                # The loop rounds to whole ms
                timer = asyncio.get_running_loop().call_later(
                    s_from_ns(wait_ns + NS_PER_MS // 2), self._has_changed.set
                )
                await self._has_changed.wait()
                timer.cancel()
                continue
            end_ns = time.monotonic_ns() + _TURN_NS
            try:
                self._prepare_until(end_ns)
            except Exception as error:  # noqa: BLE001 - any error ends the load
                self._fail(error)
                self._is_exhausted = True
            await self._record_one()
            while self._ended and time.monotonic_ns() < end_ns:
                await self._record_one()
            self._has_changed.set()
            await asyncio.sleep(0)

    def _wave_left_ns(self) -> int:
        """Time for which preparing and recording should wait, for others that end soon; users do not wait."""
        if not (self._ended and self._in_slots) or self._has_turns:
            return 0
        has_stock = self._is_exhausted or 2 * len(self._prepared) >= self._most_prepared
        end_ns = self._ended[0].done_ns + _FEW_DELAY_NS
        if len(self._ended) >= _FEW or not has_stock:
            end_ns = min(self._ended[-1].done_ns + _WAVE_GAP_NS, self._ended[0].done_ns + _MOST_DELAY_NS)
        return end_ns - time.monotonic_ns()

    def _prepare_until(self, end_ns: int) -> None:
        while self._can_prepare() and time.monotonic_ns() < end_ns:
            self._prepare_one()
            if self._does_refill:
                self._fill_empty_slots()

    async def _record_one(self) -> None:
        """Decode the answer that ended first, in slices that leave the loop free, and hand over its record."""
        if not self._ended:
            return
        exchange = self._ended.popleft()
        self._is_recording = True
        try:
            record = await exchange.record()
            self.summary.count(record)
            self._on_record(record)
            if exchange.later:
                self._follow(exchange, record)
        except Exception as error:  # noqa: BLE001 - any error; the other requests are recorded as far as possible
            self._fail(error)
        finally:
            self._is_recording = False

    async def _cancel_remaining(self) -> None:
        """End the requests that are still in flight, each with its record."""
        self._is_cancelled = True
        self._turns.clear()
        # Not asyncio.timeout, which Python 3.11.2 turns into a cancellation in a task that was cancelled before.
        finishing = asyncio.ensure_future(self._wait(lambda: not self._in_slots))
        # How long requests in flight may still end by themselves when the load is cancelled
        await asyncio.wait({finishing}, timeout=0.2)
        finishing.cancel()
        self._is_exhausted = True
        self._prepared.clear()
        self._client.stop_all(CANCELLED)
        await self._wait(lambda: not (self._ended or self._is_recording))

    async def _sample(self) -> None:
        """Report a sample ten times per second, with the longest lag since the one before; never returns."""
        clock, num_offsets, loop = self._client.clock, 0, asyncio.get_running_loop()
        lags_ns: list[int] = []

        def note_lag(due_ns: int) -> None:
            lags_ns.append(time.monotonic_ns() - due_ns)

        while self._on_sample is not None:
            lags_ns[:] = [0]
            now_ns = time.monotonic_ns()
            for beat_ns in range(_BEAT_NS, _SAMPLE_NS, _BEAT_NS):  # without a task, which would cost as much again
                loop.call_later(s_from_ns(beat_ns), note_lag, now_ns + beat_ns)
            await asyncio.sleep(s_from_ns(_SAMPLE_NS))
            note_lag(now_ns + _SAMPLE_NS)
            clock.sample()
            self._on_sample(
                ClientSample(
                    t_ns=time.monotonic_ns(),
                    worker=self._worker,
                    loop_lag_ns=max(lags_ns),
                    cpu_ns=time.process_time_ns(),
                    num_open=self.activity().num_open,
                    offset=clock.offsets[-1] if len(clock.offsets) > num_offsets else None,
                )
            )
            num_offsets = len(clock.offsets)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, whatever errors there are."""
        while not condition():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds. Raises the first error before or meanwhile."""
        await self._wait(lambda: self._error is not None or condition())
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._has_changed.set()

    def _take_task_error(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _take_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take an error in a callback of the event loop: it ends the load and does not stall it."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._fail(error)
        else:
            loop.default_exception_handler(context)


async def _sleep_until_start(begin: Callable[[], Awaitable[int]] | None) -> None:
    if begin is not None:
        with Alarm() as alarm:
            await alarm.sleep_until(await begin())
