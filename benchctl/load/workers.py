"""A load that is split over several processes of this host, for servers that one process cannot keep up with.

Request i goes to worker i mod N, a conversation as a whole, and each worker drives its share as a load of its own,
with its share of the slots and of the launch rate. There is one schedule: every worker prepares its first requests
and reports it, then all get the same start time, on the clock that the processes of a host share. All requests are
handed out before that: during the load the workers are sent nothing. Each writes its records to a file of its own,
so that nothing holds up its loop, and the load takes them from there as they come.

A worker that ends too early ends the load; a worker that outlives the load is ended.
"""

import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import uvloop

from benchctl.errors import LoadError, as_run_error, failure_in_text
from benchctl.load.client import StreamClient
from benchctl.load.demand import LoadSize, num_processes, num_workers, shares
from benchctl.load.exchange import Activity, LoadSummary
from benchctl.load.process import load_priority, steady_interpreter
from benchctl.load.schedule import LEAD_NS, Load
from benchctl.profile.arrival import Arrival
from benchctl.profile.model import Profile
from benchctl.profile.sections import PriorityOption, Timeouts
from benchctl.records.files import encode
from benchctl.records.record import Call, RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.workload.turns import grouped

LOOK_S: Final = 0.1
_MAX_SILENT_LOOKS: Final = 300
"""Looks in a row without a report until a worker counts as hung; it reports ten times per second. Looks are counted
and not time: a worker is not blamed when the load itself was asleep."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals to all of benchctl's processes, which the load handles for its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """A load, and the processes that share it; for each of these its share, with its number in ``worker``."""

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
    worker: int = 0


class _Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file of a worker: a record, a sample ten times per second, or a turning point."""

    record: RequestRecord | None = None
    sample: ClientSample | None = None
    activity: Activity | None = None
    priority: str | None = None
    """What it was granted; reported when its first requests are prepared."""
    failure: str | None = None
    """The traceback of the error that ends it."""
    has_ended: bool = False
    """True when its share has ended."""


def _work(plan: WorkerPlan, path: str, connection: Connection) -> None:
    """The program of a worker, which ends with the process that started it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with Path(path).open("ab", buffering=0) as file:

        def report(one: _Report) -> None:
            file.write(encode(one) + b"\n")

        try:
            uvloop.run(_carry_out(plan, deque(iter(connection.recv, None)), connection, report))
        except BaseException as error:
            report(_Report(failure=traceback.format_exc()))
            raise SystemExit(1) from error
        report(_Report(has_ended=True))


async def _carry_out(
    plan: WorkerPlan, calls: deque[Call], connection: Connection, report: Callable[[_Report], None]
) -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def begin() -> int:
        report(_Report(priority=str(priority)))
        return await started

    async with StreamClient(plan.base_url, plan.timeouts) as client:
        load = Load(
            client,
            plan.arrival,
            lambda record: report(_Report(record=record)),
            time_scale=plan.time_scale,
            on_sample=lambda sample: report(_Report(sample=sample, activity=client.activity())),
            worker=plan.worker,
        )
        shrinking = (calls.popleft() for _ in range(len(calls)))
        with steady_interpreter(), load_priority(plan.priority, num_processes(plan.count)) as priority:
            driving = asyncio.create_task(load.drive(shrinking, begin))
            asyncio.get_running_loop().add_reader(connection.fileno(), _obey, connection, started, driving)
            await asyncio.wait({driving})
            asyncio.get_running_loop().remove_reader(connection.fileno())
    if not driving.cancelled():
        driving.result()


def _obey(connection: Connection, started: asyncio.Future[int], driving: asyncio.Task[None]) -> None:
    """Begin at the time that the load names, cancel when it names none, and end at once when it has gone."""
    try:
        start_ns: int | None = connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    if start_ns is None:
        driving.cancel()
    elif not started.done():  # the load may have been cancelled before
        started.set_result(start_ns)


class _Worker:
    """A worker process as the load sees it: started, supervised, and ended for certain.

    Raises LoadError where the system cannot start one more process.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.activity = Activity()
        self.num_calls = 0
        self.num_records = 0
        self.is_ready = False
        self.has_ended = False
        """True when it has reported the end of its share."""
        self._name = f"worker {plan.worker + 1} of {plan.count} of the load generator"
        self._num_silent_looks = 0
        self._failure = ""
        self._file = tempfile.NamedTemporaryFile(prefix="benchctl-worker-")  # noqa: SIM115 - `end` closes it
        self._beginning = b""
        """The part of a line that is not written to its end."""
        self._connection, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_work, args=(plan, self._file.name, theirs), daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it ignores them
        try:
            self._process.start()
        except OSError as error:
            failure = as_run_error(error, "its interpreter", next_step=", or lower load.workers")
            raise LoadError(f"{self._name} cannot be started: {failure}", cause=failure.cause) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive() and not self.has_ended

    def send(self, message: Call | int | None) -> None:
        """Send a call, or None after the last; then the start of the schedule, and None to cancel the load. No
        effect on a worker that has gone.
        """
        with suppress(OSError):
            self._connection.send(message)

    def look(self, max_silent_looks: int) -> Iterator[_Report]:
        """The reports since the last look. Raises LoadError when it has ended early or is silent for long."""
        is_alive = self._process.is_alive()
        *lines, self._beginning = (self._beginning + self._file.read()).split(b"\n")
        for line in lines:
            report = msgspec.json.decode(line, type=_Report)
            self.num_records += report.record is not None
            self.activity = report.activity or self.activity
            self.is_ready = self.is_ready or report.priority is not None
            self.has_ended = report.has_ended
            self._failure = report.failure or ""
            yield report
        self._num_silent_looks = 0 if lines or self.has_ended else self._num_silent_looks + 1
        if not is_alive and not self.has_ended:
            raise self._death_error()
        if self._num_silent_looks > max_silent_looks:
            raise LoadError(
                f"{self._name} (process {self._process.pid}) has reported nothing for "
                f"{max_silent_looks * LOOK_S:.0f} s after {self._progress()}: it was stopped, or the machine lacks "
                "processor time or memory",
                cause="worker-hung",
            )

    def end(self) -> None:
        """End it: soon by itself if its share is complete, else at once."""
        if self.has_ended:
            self._process.join(2.0)
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._file.close()

    def _death_error(self) -> LoadError:
        code, failure = self._process.exitcode or 0, failure_in_text(self._failure)
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            remedy = "the system does this when memory runs out (see dmesg): lower load.workers or the load"
        elif failure is not None:
            remedy = f"{failure.problem}; {failure.remedy}"
        else:
            remedy = (self._failure.splitlines() or ["it reported no error"])[-1]
        message = f"{self._name} (process {self._process.pid}) ended {how} after {self._progress()}: {remedy}"
        cause = "worker-died" if failure is None else failure.cause
        return LoadError(message, cause=cause, log_tail=self._failure)

    def _progress(self) -> str:
        return f"{self.num_records} of its {self.num_calls} requests"


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
        self.max_silent_looks = _MAX_SILENT_LOOKS
        self._plan = plan
        self._on_record, self._on_sample = on_record, on_sample
        self._workers: list[_Worker] = []
        self.summary = LoadSummary()

    def activity(self) -> Activity:
        """The open requests and the last arrival for one of them, as of some tenths of a second ago."""
        activities = [worker.activity for worker in self._workers if not worker.has_ended]
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
        self._workers = []
        has_begun = False
        try:
            for i, share in enumerate(shares(self._plan.arrival, self._plan.count)):
                self._workers.append(_Worker(replace(self._plan, worker=i, arrival=share)))
            handing_out = asyncio.create_task(asyncio.to_thread(self._hand_out, calls))
            while not all(worker.has_ended for worker in self._workers):
                await asyncio.sleep(LOOK_S)
                if handing_out.done():
                    handing_out.result()
                for worker in self._workers:
                    self._take_reports(worker)
                if not has_begun and all(worker.is_ready for worker in self._workers):
                    has_begun = True
                    self._begin()
        finally:
            await self._end_all()

    def _hand_out(self, calls: Iterable[Call]) -> None:
        for i, turns in enumerate(grouped(calls)):
            worker = self._workers[i % len(self._workers)]
            worker.num_calls += len(turns)
            for call in turns:
                # The body contains the prompt already.
                request = msgspec.structs.replace(call.request, prompt=None, messages=None, answer=None)
                worker.send(msgspec.structs.replace(call, request=request))
        for worker in self._workers:
            worker.send(None)

    def _begin(self) -> None:
        """Announce the start. Workers that share a launch rate take turns from the first launch on."""
        is_open_loop, rate = self._plan.arrival.is_open_loop, self._plan.arrival.launch_rate_limit
        # From the announcement of the start to the start, within which it reaches every worker
        start_ns = time.monotonic_ns() + (LEAD_NS if is_open_loop else 20 * NS_PER_MS)
        turn_ns = 0 if is_open_loop or rate is None else round(NS_PER_S / (rate * self._plan.time_scale))
        for i, worker in enumerate(self._workers):
            worker.send(start_ns + i * turn_ns)

    def _take_reports(self, worker: _Worker) -> None:
        for report in worker.look(self.max_silent_looks):
            if report.record is not None:
                self.summary.count(report.record)
                self._on_record(report.record)
            if report.sample is not None and self._on_sample is not None:
                self._on_sample(report.sample)
            if report.priority is not None:
                self.priorities.add(report.priority)

    async def _end_all(self) -> None:
        """Let every worker record what is in flight, then end all workers."""
        under_way = [worker for worker in self._workers if worker.is_ready]
        for worker in under_way:
            worker.send(None)
        deadline_s = time.monotonic() + self._plan.cancel_wait_s
        are_running = bool(under_way)
        try:
            while are_running and time.monotonic() < deadline_s:
                are_running = any(worker.is_running for worker in under_way)
                for worker in under_way:
                    with suppress(LoadError):  # an earlier error has been raised
                        self._take_reports(worker)
                await asyncio.sleep(LOOK_S)
        finally:
            for worker in self._workers:
                worker.end()


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
