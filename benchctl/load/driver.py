"""Driving the load: which request is sent when.

A closed loop is filled from below: the end of a stream is told while the sockets are read, and the request that lies
ready next leaves at once, on the connection that became free. Only then is the answer that ended decoded, written
and counted, in slices of less than a millisecond between which the sockets are read. An open loop sends by its plan:
connections are laid ready shortly before a request is due, and a timer of the kernel, or a look at the clock in the
midst of reading, launches it. What the slots hold at the start is laid ready as a whole and then launched in one go,
so that "at once" means within the time that writing takes. Every request that was sent leaves exactly one record,
whatever happens.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final, TypeAlias

from asyncio_throttle.throttler import Throttler

from benchctl.load.alarm import Alarm
from benchctl.load.client import StreamClient
from benchctl.load.exchange import Call, Exchange
from benchctl.load.failures import CANCELLED
from benchctl.load.heartbeat import beat
from benchctl.load.prepared import PreparedRequests
from benchctl.load.receiver import NEVER_NS
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
_MOST_PREPARED: Final = 1024
_SLICE_NS: Final = 500_000
"""Requests are made ready for so long, and then what has arrived is read."""
_POLL_S: Final = 0.005

SlotFreed: TypeAlias = tuple[int, bytes]
"""The read that freed a slot: its time, and the kernel's stamp."""


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
        self._throttle = _throttler(arrival.launch_rate_limit, time_scale)
        self._on_record = on_record
        self._tally = Tally()
        self._prepared = PreparedRequests(iter(()), self._begin, 0)
        self._in_slots: set[Exchange] = set()
        self._does_refill = False
        """Whether the end of a stream sends the next request."""
        self._empty_slots: deque[SlotFreed] = deque()
        """Slots that became free while no request lay ready."""
        self._laid: deque[Exchange] = deque()
        """Of an open loop: not due yet."""
        self._waiting: deque[Exchange] = deque()
        """Of an open loop: due, and without a slot."""
        self._ended: deque[Exchange] = deque()
        """Not decoded yet."""
        self._is_recording = False
        self._is_called_off = False
        self._has_work = asyncio.Event()
        self._has_changed = asyncio.Event()
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
        most = min(self._max_concurrency or _MOST_PREPARED, _MOST_PREPARED)
        self._prepared = PreparedRequests(iter(calls), self._begin, most)
        self._client.on_ready = self._has_changed.set
        with self._noting_faults():
            helping = [asyncio.create_task(self._beat()), asyncio.create_task(self._catch_up())]
            for task in helping:
                task.add_done_callback(self._note_fault_of)
            try:
                if self._is_open_loop:
                    start_ns = await begin() if begin is not None else time.monotonic_ns() + LEAD_NS
                    await self._drive_by_time(start_ns)
                else:
                    await self._drive_by_slots(begin)
                await self._until(lambda: not self._in_slots and self._is_caught_up)
            finally:
                await self._call_down()
                for task in helping:
                    task.cancel()
                await asyncio.wait(helping)
        self._raise_fault()

    async def _beat(self) -> None:
        if self._on_sample is not None:
            await beat(self._client, self._on_sample, self._worker)

    def _begin(self, call: Call) -> Exchange:
        return self._client.begin(call, self._take_end)

    async def _drive_by_slots(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        """Launch what the slots hold in one go, then each of the others as a slot frees."""
        await self._launch_first(begin)
        if self._throttle is None:
            self._does_refill = True
            num_free = (self._max_concurrency or 0) - len(self._in_slots)
            self._empty_slots.extend([(time.monotonic_ns(), b"")] * num_free)
            self._has_work.set()
            await self._until(lambda: self._prepared.is_done)
            return
        while (exchange := self._prepared.take()) is not None:
            await self._until(lambda: len(self._in_slots) < (self._max_concurrency or NEVER_NS))
            await self._throttle.acquire()  # type: ignore[no-untyped-call]
            exchange.scheduled_ns = time.monotonic_ns()
            self._start(exchange)

    async def _launch_first(self, begin: Callable[[], Awaitable[int]] | None) -> None:
        first = [*islice(iter(self._prepared.take, None), self._max_concurrency)]
        self._client.connections.most_spares = len(first)
        self._client.connections.fill()
        for exchange in first:
            self._in_slots.add(exchange)
            self._client.lay(exchange)
        await self._until(lambda: all(map(self._client.is_ready, first)))
        if begin is not None:
            with Alarm() as alarm:
                await alarm.sleep_until(await begin())
        now_ns = time.monotonic_ns()
        for number, exchange in enumerate(first, 1):
            exchange.scheduled_ns = now_ns
            if self._throttle is not None:
                await self._throttle.acquire()  # type: ignore[no-untyped-call]
                exchange.scheduled_ns = time.monotonic_ns()
            self._client.launch(exchange)
            if number % _SENDS_AT_ONCE == 0:
                self._client.take_in()

    async def _drive_by_time(self, start_ns: int) -> None:
        """Launch each at its planned time, and lay it ready before."""
        laying = asyncio.create_task(self._lay_ahead(start_ns))
        laying.add_done_callback(self._note_fault_of)
        receiver = self._client.receiver
        if self._throttle is None:
            receiver.on_due = self._launch_due
        try:
            with Alarm() as alarm:
                while True:
                    await self._until(lambda: bool(self._laid) or laying.done())
                    if not self._laid:
                        return
                    receiver.due_ns = self._laid[0].scheduled_ns
                    await alarm.sleep_until(self._laid[0].scheduled_ns)
                    if self._throttle is None:
                        self._launch_due()
                    else:
                        await self._throttle.acquire()  # type: ignore[no-untyped-call]
                        self._start_or_queue(self._laid.popleft())
        finally:
            receiver.due_ns, receiver.on_due = NEVER_NS, lambda: None
            laying.cancel()
            await asyncio.wait({laying})

    def _launch_due(self) -> None:
        """Launch all that is due; also called in the midst of reading, which may take longer than their time."""
        now_ns = time.monotonic_ns()
        while self._laid and self._laid[0].scheduled_ns <= now_ns:
            self._start_or_queue(self._laid.popleft())
        self._client.receiver.due_ns = self._laid[0].scheduled_ns if self._laid else NEVER_NS

    def _start_or_queue(self, exchange: Exchange) -> None:
        if self._max_concurrency is not None and len(self._in_slots) >= self._max_concurrency:
            self._waiting.append(exchange)
        else:
            self._start(exchange)

    async def _lay_ahead(self, start_ns: int) -> None:
        """The planned time is kept whatever a cap or the client does, so that every delay shows in the send."""
        while (exchange := self._prepared.take()) is not None:
            exchange.scheduled_ns = start_ns + round(exchange.call.request.arrival_ns / self._time_scale)
            # Others have their turn also when this is behind: what is laid has to leave.
            await asyncio.sleep(max(exchange.scheduled_ns - LEAD_NS - time.monotonic_ns(), 0) / NS_PER_S)
            while len(self._waiting) > _MOST_PREPARED:  # far behind its cap: no need to hold them all
                await asyncio.sleep(_POLL_S)
            num_expected = len(self._in_slots) + len(self._laid)
            if self._max_concurrency is None or num_expected < self._max_concurrency:
                self._client.lay(exchange)
            self._laid.append(exchange)
            self._has_changed.set()
            self._has_work.set()

    def _start(self, exchange: Exchange, slot_freed: SlotFreed | None = None) -> None:
        """Launch it in a slot of its own; no effect where it has failed while it lay ready."""
        if exchange.has_ended:
            return
        self._in_slots.add(exchange)
        exchange.slot_freed = slot_freed
        self._client.launch(exchange)

    def _take_end(self, exchange: Exchange) -> None:
        """A request has ended: the next one leaves, and this one is decoded later. Called while sockets are read."""
        had_slot = exchange in self._in_slots
        self._in_slots.discard(exchange)
        if had_slot and not self._is_called_off:
            self._fill_slot(exchange)
        if exchange.has_left:
            self._ended.append(exchange)
        self._has_work.set()
        self._has_changed.set()

    def _fill_slot(self, ended: Exchange) -> None:
        is_whole = ended.failure is None and bool(ended.reads)
        slot_freed = ended.reads[-1][:2] if is_whole else (time.monotonic_ns(), b"")
        if self._waiting:
            self._start(self._waiting.popleft(), slot_freed)
        elif self._does_refill:
            exchange = self._prepared.take_ready()
            if exchange is not None:
                self._start(exchange, slot_freed)
            elif not self._prepared.is_exhausted:
                self._empty_slots.append(slot_freed)

    async def _catch_up(self) -> None:
        """Make requests ready, and decode what has ended, whenever there is either; never returns."""
        while True:
            self._has_work.clear()
            while self._prepared.has_room or self._ended:
                try:
                    self._make_ready()
                except Exception as fault:
                    self._note_fault(fault)
                    self._prepared.give_up()
                if self._ended:
                    await self._record(self._ended.popleft())
                self._has_changed.set()
                await asyncio.sleep(0)
            await self._has_work.wait()

    def _make_ready(self) -> None:
        end_ns = time.monotonic_ns() + _SLICE_NS
        while self._prepared.has_room and time.monotonic_ns() < end_ns:
            self._prepared.make_one()
            if self._empty_slots and (exchange := self._prepared.take_ready()) is not None:
                self._start(exchange, self._empty_slots.popleft())

    async def _record(self, exchange: Exchange) -> None:
        self._is_recording = True
        try:
            record = await exchange.record()
            self._tally.count(record)
            self._on_record(record)
        except Exception as fault:
            self._note_fault(fault)  # the others are recorded all the same, as far as they can be
        finally:
            self._is_recording = False

    @property
    def _is_caught_up(self) -> bool:
        return not self._ended and not self._is_recording

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so. Raises the first fault that was noted meanwhile."""
        await self._wait(lambda: self._fault is not None or is_so())
        self._raise_fault()

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _call_down(self) -> None:
        """Bring down what is still in flight, each with its record."""
        self._is_called_off = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._wait(lambda: not self._in_slots)
        self._prepared.give_up()
        self._client.stop_all(CANCELLED)
        await self._wait(lambda: self._is_caught_up)

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        """A fault in what the event loop calls ends the load, and does not stall it."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            fault = context.get("exception")
            if isinstance(fault, BaseException):
                self._note_fault(fault)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(note)
        try:
            yield
        finally:
            loop.set_exception_handler(before)

    def _note_fault_of(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._note_fault(fault)

    def _note_fault(self, fault: BaseException) -> None:
        """Keep the first."""
        self._fault = self._fault or fault
        self._has_changed.set()

    def _raise_fault(self) -> None:
        """A record that cannot be kept (a full disk) ends the load: its numbers would be lost one by one."""
        if self._fault is not None:
            raise self._fault


def _throttler(rate_per_s: float | None, time_scale: float) -> Throttler | None:
    if rate_per_s is None:
        return None
    return Throttler(rate_limit=1, period=1 / (rate_per_s * time_scale), retry_interval=0.001)
