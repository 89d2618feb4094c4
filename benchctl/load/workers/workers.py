"""A load that is split over several processes of this host, for servers that one process cannot keep up with.

Request i goes to worker i mod N, and each worker drives its share as a load of its own, with its share of the slots
and of the launch rate. The schedule is one: every worker lays its first requests ready and says so, then all are
told the same moment at which it starts, on the clock that the processes of a host share. Everything is handed out
before that: during the load nothing goes to the workers, and from them come only records of what has ended.

A worker that ends too early ends the load; one that the load leaves behind ends with it.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import msgspec

from benchctl.load.demand import LoadSize, expected_cores, most_open
from benchctl.load.driver import OPEN_LOOP, Load
from benchctl.load.open_loop import LEAD_NS
from benchctl.load.priority import load_priority
from benchctl.load.tally import Activity, LoadSummary, Tally
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.exchange import Call
from benchctl.load.workers.started_worker import StartedWorker
from benchctl.load.workers.wire import (
    AllCalls,
    AllDone,
    Assignment,
    Begin,
    CallToMake,
    FromWorker,
    KeptRecord,
    Pulse,
    Ready,
    Stop,
)
from benchctl.profile.model import PriorityOption, Profile, Timeouts
from benchctl.profile.workload import Arrival
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S

WORKER_CORES: Final = 0.5
"""Of its core, that ``auto`` lets a process be busy on average; the rest is for moments at which much comes."""
_HEADSTART_NS: Final = 20 * NS_PER_MS
"""From naming the start to the start itself, within which every worker has heard of it."""
_LOOK_S: Final = 1.0
_CALL_DOWN_S: Final = 10.0
"""For recording what was in flight when the load is called off."""


def num_workers(option: Literal["auto"] | int, arrival: Arrival, size: LoadSize, num_cores: int) -> int:
    """How many processes carry a load: never more than slots or requests, of which each worker needs one.

    ``auto`` takes as many as keep each below half a core, by what the load is expected to bring, and leaves one of
    the cores free.
    """
    by_load = min(math.ceil(expected_cores(arrival, size) / WORKER_CORES), num_cores - 1)
    wanted = by_load if option == "auto" else option
    return max(1, min(wanted, most_open(arrival, size)))


def num_processes(num_workers: int) -> int:
    """Those of a whole load: beside several workers there is one that gathers what they record."""
    return num_workers if num_workers == 1 else num_workers + 1


def shares(arrival: Arrival, count: int) -> tuple[Arrival, ...]:
    """The arrival of each of ``count`` workers: slots and launch rate together come to those of ``arrival``."""
    slots, rate = arrival.max_concurrency, arrival.launch_rate_limit
    return tuple(
        arrival.model_copy(
            update={
                "max_concurrency": None if slots is None else slots // count + (i < slots % count),
                "launch_rate_limit": None if rate is None else rate / count,
            }
        )
        for i in range(count)
    )


class WorkerLoad:
    """In place of a ``Load``: the same calls, driven by ``count`` processes."""

    def __init__(
        self,
        base_url: str,
        timeouts: Timeouts,
        arrival: Arrival,
        on_record: Callable[[RequestRecord], None],
        *,
        count: int,
        priority: PriorityOption = "none",
        time_scale: float = 1.0,
        on_sample: Callable[[ClientSample], None] | None = None,
    ) -> None:
        self.num_processes = num_processes(count)
        self.priorities: set[str] = set()
        """What the workers got of ``priority``, as far as they have said so."""
        self._arrival = arrival
        self._time_scale = time_scale
        self._on_record = on_record
        self._on_sample = on_sample
        self._assignments = [
            Assignment(
                worker=i,
                base_url=base_url,
                arrival=share.model_dump(),
                timeouts=timeouts.model_dump(),
                time_scale=time_scale,
                priority=priority,
                num_processes=self.num_processes,
            )
            for i, share in enumerate(shares(arrival, count))
        ]
        self._workers: list[StartedWorker] = []
        self._tally = Tally()

    def summary(self) -> LoadSummary:
        """What has been recorded until now."""
        return self._tally.summary()

    @property
    def error_kinds(self) -> frozenset[str]:
        """The ways in which requests have failed until now."""
        return self._tally.error_kinds

    def activity(self) -> Activity:
        """What is open, and when something last came of it, as of a tenth of a second ago."""
        told = [worker.activity for worker in self._workers]
        return Activity(
            num_open=sum(one.num_open for one in told),
            oldest_sent_ns=min((one.oldest_sent_ns for one in told if one.num_open), default=0),
            heard_ns=max((one.heard_ns for one in told), default=0),
        )

    async def drive(self, calls: Iterable[Call]) -> None:
        """Send all of ``calls`` and wait for the last to end.

        When cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that
        were not sent leave no record. Raises LoadError when a worker ends or hangs before its share is done; the
        others are then called off in the same way.
        """
        tasks: set[asyncio.Task[None]] = set()
        self._workers = []
        try:
            for assignment in self._assignments:
                self._workers.append(StartedWorker(assignment, len(self._assignments)))
            for worker in self._workers:
                await worker.connect()
            tasks = {asyncio.create_task(self._follow(worker)) for worker in self._workers}
            tasks.add(asyncio.create_task(self._hand_out(calls)))
            await self._watch(tasks)
        finally:
            await self._call_down(tasks)

    async def _hand_out(self, calls: Iterable[Call]) -> None:
        """Give each worker its share, without what only the engine's dialect needed to know of a request."""
        for i, call in enumerate(calls):
            worker = self._workers[i % len(self._workers)]
            worker.num_calls += 1
            worker.send(CallToMake(call=_bare(call)))
            await worker.drain()
        for worker in self._workers:
            worker.send(AllCalls())

    async def _watch(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for all of ``tasks``, and raise what the first of them to fail has raised."""
        while tasks:
            done, tasks = await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            for worker in self._workers:
                worker.look(_LOOK_S)

    async def _follow(self, worker: StartedWorker) -> None:
        """Take what a worker says, to its end."""
        while not worker.has_ended:
            self._take(worker, await worker.receive())

    def _take(self, worker: StartedWorker, message: FromWorker) -> None:
        match message:
            case KeptRecord(record=record):
                worker.num_records += 1
                self._tally.count(record)
                self._on_record(record)
            case Pulse(sample=sample, activity=activity):
                worker.activity = activity
                if self._on_sample is not None:
                    self._on_sample(sample)
            case Ready(priority=priority):
                self.priorities.add(priority)
                worker.is_ready = True
                if all(other.is_ready for other in self._workers):
                    self._begin()
            case AllDone():
                worker.end_well()

    def _begin(self) -> None:
        """Name the start. Workers that share a launch rate take turns from the first launch on."""
        is_open_loop, rate = self._arrival.kind in OPEN_LOOP, self._arrival.launch_rate_limit
        start_ns = time.monotonic_ns() + (LEAD_NS if is_open_loop else _HEADSTART_NS)
        turn_ns = 0 if is_open_loop or rate is None else round(NS_PER_S / (rate * self._time_scale))
        for i, worker in enumerate(self._workers):
            worker.send(Begin(start_ns=start_ns + i * turn_ns))

    async def _call_down(self, tasks: set[asyncio.Task[None]]) -> None:
        """Let every worker record what is in flight, then see to it that none is left."""
        for worker in self._workers:
            if not worker.has_ended:
                worker.send(Stop())
        if tasks:
            await asyncio.wait(tasks, timeout=_CALL_DOWN_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # what matters of them has been raised
        await asyncio.gather(*(worker.end() for worker in self._workers))


def _bare(call: Call) -> Call:
    """A call without the prompt beside its body: it would go over the wire twice."""
    request = msgspec.structs.replace(call.request, prompt=None, messages=None, answer=None)
    return Call(request=request, path=call.path, headers=call.headers, body=call.body, is_warmup=call.is_warmup)


AnyLoad: TypeAlias = Load | WorkerLoad
"""What drives a load, wherever it does so."""


def load_for(
    client: StreamClient,
    profile: Profile,
    size: LoadSize,
    on_record: Callable[[RequestRecord], None],
    *,
    priority: PriorityOption = "none",
    time_scale: float = 1.0,
    on_sample: Callable[[ClientSample], None] | None = None,
) -> AnyLoad:
    """The load of a profile, in this process or in as many as ``load.workers`` comes to.

    ``priority`` is what its workers ask for; this process does so with ``prioritised``.
    """
    arrival = profile.workload.arrival
    count = num_workers(profile.load.workers, arrival, size, len(os.sched_getaffinity(0)))
    if count == 1:
        return Load(client, arrival, on_record, time_scale=time_scale, on_sample=on_sample)
    return WorkerLoad(
        str(client.control.base_url),
        profile.timeouts,
        arrival,
        on_record,
        count=count,
        priority=priority,
        time_scale=time_scale,
        on_sample=on_sample,
    )


@contextmanager
def prioritised(load: AnyLoad, option: PriorityOption, tell: Callable[[str], None]) -> Iterator[None]:
    """Priority for the thread that drives ``load``; ``tell`` hears what those who time it got, at the end."""
    with load_priority(option, load.num_processes if isinstance(load, WorkerLoad) else 1) as own:
        try:
            yield
        finally:
            those_that_time = load.priorities if isinstance(load, WorkerLoad) else {str(own)}
            tell(" and ".join(sorted(those_that_time)) or "unknown")
