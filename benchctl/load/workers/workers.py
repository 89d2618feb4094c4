"""A load that is split over several processes of this host, for servers that one process cannot keep up with.

Request i goes to worker i mod N, and each worker drives its share as a load of its own, with its share of the slots
and of the launch rate. There is one schedule: every worker prepares its first requests and reports it, then all get
the same start time, on the clock that the processes of a host share. All requests are handed out before that:
during the load nothing is sent to the workers, and they send only records and samples.

A worker that ends too early ends the load; a worker that outlives the load is ended.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import msgspec

from benchctl.load.client import StreamClient
from benchctl.load.demand import LoadSize, expected_cores, max_open
from benchctl.load.process import load_priority
from benchctl.load.schedule import LEAD_NS, Load
from benchctl.load.tally import Activity, LoadSummary, Tally
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
from benchctl.profile.model import Arrival, Profile
from benchctl.profile.sections import PriorityOption, Timeouts
from benchctl.records.record import Call, RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S

WORKER_CORES: Final = 0.5
"""Share of its core that ``auto`` lets a process use on average; the rest is for bursts of arrivals."""
_START_DELAY_NS: Final = 20 * NS_PER_MS
"""From the announcement of the start to the start, within which it reaches every worker."""
_CHECK_S: Final = 1.0
MAX_SILENT_CHECKS: Final = 30
"""Checks in a row without a message until a worker counts as hung; it sends a sample ten times per second. Checks
are counted and not time: a worker is not blamed when the load itself was asleep."""


def num_workers(option: Literal["auto"] | int, arrival: Arrival, size: LoadSize, num_cores: int) -> int:
    """Number of processes that send a load: at most one per slot or request, of which each worker needs one.

    ``auto`` is the number that keeps each below half a core, by the expected tokens per second, and leaves one of
    the cores free.
    """
    by_load = min(math.ceil(expected_cores(arrival, size) / WORKER_CORES), num_cores - 1)
    return max(1, min(by_load if option == "auto" else option, max_open(arrival, size)))


def num_processes(num_workers: int) -> int:
    """Processes of a whole load: several workers need one more that gathers their records."""
    return num_workers if num_workers == 1 else num_workers + 1


def shares(arrival: Arrival, count: int) -> tuple[Arrival, ...]:
    """The arrival of each of ``count`` workers: their slots and launch rates add up to those of ``arrival``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """A load, and the processes that share it."""

    base_url: str
    timeouts: Timeouts
    arrival: Arrival
    count: int
    """Number of workers."""
    priority: PriorityOption = "none"
    """The scheduling priority that each process requests."""
    time_scale: float = 1.0
    cancel_wait_s: float = 10.0
    """Time for the workers to record what is in flight when the load is cancelled."""


class WorkerLoad:
    """A load with the methods of ``Load``, driven by several processes."""

    def __init__(
        self,
        plan: WorkerPlan,
        on_record: Callable[[RequestRecord], None],
        on_sample: Callable[[ClientSample], None] | None = None,
    ) -> None:
        self.num_processes = num_processes(plan.count)
        self.priorities: set[str] = set()
        """The priorities that the workers were granted, as far as they have reported."""
        self.max_silent_checks = MAX_SILENT_CHECKS
        self._plan = plan
        self._on_record = on_record
        self._on_sample = on_sample
        self._assignments = [
            Assignment(
                worker=i,
                base_url=plan.base_url,
                arrival=share.model_dump(),
                timeouts=plan.timeouts.model_dump(),
                time_scale=plan.time_scale,
                priority=plan.priority,
                num_processes=self.num_processes,
            )
            for i, share in enumerate(shares(plan.arrival, plan.count))
        ]
        self._workers: list[StartedWorker] = []
        self._tally = Tally()

    def summary(self) -> LoadSummary:
        return self._tally.summary()

    def activity(self) -> Activity:
        """The open requests and the last arrival for one of them, as of a tenth of a second ago."""
        activities = [worker.activity for worker in self._workers]
        return Activity(
            num_open=sum(one.num_open for one in activities),
            oldest_sent_ns=min((one.oldest_sent_ns for one in activities if one.num_open), default=0),
            last_arrival_ns=max((one.last_arrival_ns for one in activities), default=0),
        )

    async def drive(self, calls: Iterable[Call]) -> None:
        """Send all of ``calls`` and wait for the last to end.

        When cancelled, requests in flight are recorded as ``cancelled`` with what they had received; those that
        were not sent leave no record. Raises LoadError when a worker ends or hangs before its share is complete;
        the others are then cancelled in the same way.
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
            await self._wait_for(tasks)
        finally:
            await self._cancel_remaining(tasks)

    async def _hand_out(self, calls: Iterable[Call]) -> None:
        for i, call in enumerate(calls):
            worker = self._workers[i % len(self._workers)]
            worker.num_calls += 1
            # The body contains the prompt already.
            request = msgspec.structs.replace(call.request, prompt=None, messages=None, answer=None)
            worker.send(CallToMake(call=replace(call, request=request)))
            await worker.drain()
        for worker in self._workers:
            worker.send(AllCalls())

    async def _wait_for(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for all of ``tasks``. Raises the first error of one of them."""
        while tasks:
            ended, tasks = await asyncio.wait(tasks, timeout=_CHECK_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
            for worker in self._workers:
                worker.check_heard(_CHECK_S, self.max_silent_checks)

    async def _follow(self, worker: StartedWorker) -> None:
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
                worker.mark_ended()

    def _begin(self) -> None:
        """Announce the start. Workers that share a launch rate take turns from the first launch on."""
        is_open_loop, rate = self._plan.arrival.is_open_loop, self._plan.arrival.launch_rate_limit
        start_ns = time.monotonic_ns() + (LEAD_NS if is_open_loop else _START_DELAY_NS)
        turn_ns = 0 if is_open_loop or rate is None else round(NS_PER_S / (rate * self._plan.time_scale))
        for i, worker in enumerate(self._workers):
            worker.send(Begin(start_ns=start_ns + i * turn_ns))

    async def _cancel_remaining(self, tasks: set[asyncio.Task[None]]) -> None:
        """Let every worker record what is in flight, then end all workers."""
        for worker in self._workers:
            if not worker.has_ended:
                worker.send(Stop())
        if tasks:
            await asyncio.wait(tasks, timeout=self._plan.cancel_wait_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # their errors have been raised
        await asyncio.gather(*(worker.end() for worker in self._workers))


AnyLoad: TypeAlias = Load | WorkerLoad
"""A load, in this process or in several."""


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
    """The load of a profile, in this process or in as many as ``load.workers`` says.

    ``priority`` is what its workers request; this process requests it with ``prioritized``.
    """
    arrival = profile.workload.arrival
    count = num_workers(profile.load.workers, arrival, size, len(os.sched_getaffinity(0)))
    if count == 1:
        return Load(client, arrival, on_record, time_scale=time_scale, on_sample=on_sample)
    plan = WorkerPlan(
        base_url=str(client.control.base_url),
        timeouts=profile.timeouts,
        arrival=arrival,
        count=count,
        priority=priority,
        time_scale=time_scale,
    )
    return WorkerLoad(plan, on_record, on_sample)


@contextmanager
def prioritized(load: AnyLoad, option: PriorityOption, on_granted: Callable[[str], None]) -> Iterator[None]:
    """Priority for the thread that drives ``load``; ``on_granted`` gets that of its timing threads, at the end."""
    with load_priority(option, load.num_processes if isinstance(load, WorkerLoad) else 1) as own:
        try:
            yield
        finally:
            priorities = load.priorities if isinstance(load, WorkerLoad) else {str(own)}
            on_granted(" and ".join(sorted(priorities)) or "unknown")
