"""Drives a load: decides which request is sent when."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from asyncio_throttle.throttler import Throttler

from benchctl.load.client import StreamClient
from benchctl.load.clocks import Alarm
from benchctl.load.exchange import Exchange
from benchctl.load.failures import CANCELLED
from benchctl.load.sockets import NEVER_NS
from benchctl.load.tally import Activity, LoadSummary, Tally
from benchctl.profile.model import Arrival
from benchctl.records.record import Call, RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S, s_from_ns

MOST_PREPARED: Final = 1024
"""Requests that are prepared ahead of their time, or wait for a slot after it."""
_MOST_BYTES: Final = 8 << 20
"""Bytes of prepared requests: long prompts are not all in memory twice."""


class PreparedRequests:
    """Turns calls into exchanges, in their order, up to ``max_ahead`` in advance."""

    def __init__(self, calls: Iterator[Call], begin: Callable[[Call], Exchange], max_ahead: int) -> None:
        self._calls, self._begin, self._max_ahead = calls, begin, max_ahead
        self._ready: deque[Exchange] = deque()
        self._num_bytes = 0
        self.is_exhausted = False
        """True when no call is left to prepare."""

    @property
    def is_done(self) -> bool:
        return self.is_exhausted and not self._ready

    @property
    def is_empty(self) -> bool:
        """True when none is prepared although calls are left."""
        return not self._ready and not self.is_exhausted

    @property
    def has_room(self) -> bool:
        """True when one more should be prepared."""
        return not self.is_exhausted and (
            not self._ready or (len(self._ready) < self._max_ahead and self._num_bytes < _MOST_BYTES)
        )

    def make_one(self) -> None:
        call = next(self._calls, None)
        if call is None:
            self.is_exhausted = True
            return
        exchange = self._begin(call)
        self._num_bytes += len(exchange.wire)
        self._ready.append(exchange)

    def take_ready(self) -> Exchange | None:
        """The next prepared request; None when it is not prepared yet, or after the last."""
        if not self._ready:
            return None
        exchange = self._ready.popleft()
        self._num_bytes -= len(exchange.wire)
        return exchange

    def take(self) -> Exchange | None:
        """The next request, prepared now if necessary; None after the last."""
        if not self._ready and not self.is_exhausted:
            self.make_one()
        return self.take_ready()

    def give_up(self) -> None:
        """Prepare and hand out no more."""
        self.is_exhausted = True
        self._ready.clear()


_WAVE_GAP_NS: Final = 2 * NS_PER_MS
"""Answers that end within this of each other are one wave: all its slots are filled before one is decoded ..."""
_MOST_DELAY_NS: Final = 50 * NS_PER_MS
"""... but no later than this after the first of them: where answers end all the time, no moment is better."""


class Backlog:
    """Exchanges that have ended, in the order of their ends. ``on_record`` gets the record of each."""

    def __init__(self, on_record: Callable[[RequestRecord], None]) -> None:
        self._on_record = on_record
        self._ended: deque[Exchange] = deque()
        self._is_recording = False

    def add(self, exchange: Exchange) -> None:
        self._ended.append(exchange)

    @property
    def is_empty(self) -> bool:
        """True when no answer waits; one may be being recorded."""
        return not self._ended

    @property
    def is_done(self) -> bool:
        """True when every answer has been recorded."""
        return not self._ended and not self._is_recording

    @property
    def is_growing(self) -> bool:
        """True while answers end one after another, so that recording them should wait."""
        if not self._ended:
            return False
        now_ns = time.monotonic_ns()
        is_wave = now_ns - self._ended[-1].done_ns < _WAVE_GAP_NS
        return is_wave and now_ns - self._ended[0].done_ns < _MOST_DELAY_NS

    async def record_first(self) -> None:
        """Decode the one that ended first, in slices that leave the loop free, and hand over its record."""
        exchange = self._ended.popleft()
        self._is_recording = True
        try:
            self._on_record(await exchange.record())
        finally:
            self._is_recording = False


class Progress:
    """Wakes waiting tasks whenever something has changed, and ends all waiting with the first error.

    A record that cannot be stored (a full disk) ends the load: its numbers would be lost one by one.
    """

    def __init__(self) -> None:
        self._has_changed = asyncio.Event()
        self._error: BaseException | None = None

    def change(self) -> None:
        """Report that something has changed that others may wait for."""
        self._has_changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds. Raises the first error that is recorded before or meanwhile."""
        await self.wait(lambda: self._error is not None or condition())
        self.raise_error()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, whatever errors there are."""
        while not condition():
            self._has_changed.clear()
            await self._has_changed.wait()

    def record_error(self, error: BaseException) -> None:
        self._error = self._error or error
        self.change()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def follow(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Record the error with which ``task`` ends, if it does."""
        task.add_done_callback(self._record_error_of)
        return task

    def _record_error_of(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.record_error(error)

    @contextmanager
    def recording_loop_errors(self) -> Iterator[None]:
        """Record errors in callbacks of the event loop: they end the load and do not stall it."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def record(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, BaseException):
                self.record_error(error)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(record)
        try:
            yield
        finally:
            loop.set_exception_handler(before)


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


_BEAT_NS: Final = 20_000_000
"""Often enough to see most stalls of the loop; it costs a thousandth of a core."""
_BEATS_PER_SAMPLE: Final = 5


async def beat(client: StreamClient, on_sample: Callable[[ClientSample], None], worker: int) -> None:
    """Report a sample ten times per second, with the longest lag since the one before; never returns."""
    num_offsets = 0
    while True:
        lag_ns = 0
        for _ in range(_BEATS_PER_SAMPLE):
            due_ns = time.monotonic_ns() + _BEAT_NS
            await asyncio.sleep(s_from_ns(_BEAT_NS))
            lag_ns = max(lag_ns, time.monotonic_ns() - due_ns)
        client.clock.sample()
        offsets = client.clock.offsets
        on_sample(
            ClientSample(
                t_ns=time.monotonic_ns(),
                worker=worker,
                loop_lag_ns=lag_ns,
                cpu_ns=time.process_time_ns(),
                num_open=client.activity().num_open,
                offset=offsets[-1] if len(offsets) > num_offsets else None,
            )
        )
        num_offsets = len(offsets)


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
