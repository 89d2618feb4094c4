"""A neighbour: one server of a baseline under its own load, again and again, until nobody wants it any more.

    python -m benchctl.cluster.neighbours.neighbour DIRECTORY LOG

It serves the baseline and the request set of the result directory DIRECTORY, on the devices and cores that it was
started on. It prints ``loading`` when the server has begun to answer the load, and ends when its standard input
does, a pipe that only its parent holds open: however the parent ends, no neighbour is left behind. Then it prints
one line of JSON, ``NeighbourReport``. Its answers are not kept, because nobody asks how fast a neighbour is.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from benchctl.engines.engine import Engine, LaunchSite, engine_for
from benchctl.errors import BenchctlError
from benchctl.load.demand import size_of
from benchctl.load.driver import Load
from benchctl.load.transport.client import StreamClient
from benchctl.load.workers.workers import load_for, num_processes, num_workers
from benchctl.measure.interrupt import run_interruptible
from benchctl.measure.measured_run import ignore
from benchctl.measure.redaction import server_env
from benchctl.measure.result_directory import ReopenedExperiment, reopen_experiment
from benchctl.measure.sending import ServerUnderTest, send_requests
from benchctl.measure.server.cores import CoreSplit, process_on, split_cores
from benchctl.measure.server.port import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.measure.warmup import warmup_bursts, warmup_requests
from benchctl.profile.model import Arrival
from benchctl.profile.planning import variant_settings
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Count, Record

LOADING = "loading"
"""Line by which a neighbour says that its server answers the load."""
_POLL_S = 0.05


class NeighbourReport(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The loads of a neighbour, and the reason of its end."""

    num_loads: Count = 0
    """Times that it sent the whole load."""
    num_sent: Count = 0
    """Requests of the load, without those that its end cut short."""
    num_failed: Count = 0
    """Requests that failed."""
    problem: str | None = None
    """Why it ended before it was told to; None otherwise."""


class _Neighbour:
    """One server and the loads that it gets."""

    def __init__(self, reopened: ReopenedExperiment, log: Path) -> None:
        self._profile, self._requests, self._log = reopened.profile, reopened.requests, log
        self._engine: Engine = engine_for(self._profile.engine.kind)
        self._settings = variant_settings(self._profile, self._profile.baseline, {})
        self._size = size_of(self._requests)
        self.report = NeighbourReport()

    async def serve(self) -> None:
        """Serve and load until standard input ends. Raises RunError when server or load fail."""
        serving = asyncio.create_task(self._serve())
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with _at_end_of_input(lambda: None if ended.done() else ended.set_result(None)):
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    async def _serve(self) -> None:
        cores = self._cores()
        with tempfile.TemporaryDirectory(prefix="benchctl-neighbour-") as directory:
            launch = self._launch(Path(directory), cores)
            with ServerProcess(launch) as server, process_on(cores.client if cores else None):
                async with StreamClient(launch.base_url, self._profile.timeouts) as client:
                    await server.wait_ready(client.control)
                    target = ServerUnderTest(
                        engine=self._engine,
                        settings=self._settings,
                        client=client,
                        server=server,
                        stall_s=self._profile.timeouts.stall_s,
                    )
                    await self._warm_up(target)
                    await self._load(target)

    def _cores(self) -> CoreSplit | None:
        """Cores of server and client, divided as those of the measured run are."""
        option, arrival = self._profile.load.workers, self._profile.workload.arrival
        count = num_workers(option, arrival, self._size, len(os.sched_getaffinity(0)))
        return split_cores(self._settings.server.client_cores_kept, num_processes(count))

    def _launch(self, directory: Path, cores: CoreSplit | None) -> Launch:
        engine, settings = self._engine, self._settings
        site = LaunchSite(port=choose_port(None), directory=directory)
        return Launch(
            argv=engine.argv(settings, site),
            env=server_env(os.environ, engine.env(settings, site), settings.request.variables),
            port=site.port,
            health_path=engine.health_path(settings),
            log=self._log,
            timeouts=self._profile.timeouts,
            diagnose=engine.diagnose,
            essential_processes=engine.essential_processes,
            cores=cores.server if cores else None,
            sent={
                name: os.environ[name]
                for name in settings.request.variables | settings.server.secret_variables
                if name in os.environ
            },
        )

    async def _warm_up(self, target: ServerUnderTest) -> None:
        load = Load(target.client, Arrival(kind="burst"), ignore)
        bursts = warmup_bursts(self._requests, self._profile, self._settings) or (
            warmup_requests(self._requests, 1),
        )
        for burst in bursts:
            await send_requests(target, load, burst, is_warmup=True)

    async def _load(self, target: ServerUnderTest) -> None:
        """Send the load again and again; never returns."""
        loading = asyncio.create_task(self._say_when_loading(target.client))
        try:
            while True:
                load = load_for(target.client, self._profile, self._size, ignore)
                await send_requests(
                    target, load, self._again(), arrival=self._profile.workload.arrival, is_warmup=False
                )
                summary, report = load.summary(), self.report
                self.report = msgspec.structs.replace(
                    report,
                    num_loads=report.num_loads + 1,
                    num_sent=report.num_sent + summary.num_sent,
                    num_failed=report.num_failed + summary.num_failed,
                )
        finally:
            loading.cancel()

    def _again(self) -> Sequence[PreparedRequest]:
        """The request set with names that no earlier load used."""
        number = self.report.num_loads
        return [msgspec.structs.replace(each, request_id=f"{each.request_id}-{number}") for each in self._requests]

    async def _say_when_loading(self, client: StreamClient) -> None:
        began_ns = time.monotonic_ns()
        while client.activity().last_arrival_ns < began_ns and not self.report.num_loads:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_POLL_S)
        _say(LOADING)


@contextmanager
def _at_end_of_input(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` when the parent has closed our standard input."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            act()

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _say(line: str) -> None:
    """A line to the parent, which may be gone."""
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> None:
    """Be a neighbour; the exit code is 0 where the parent wanted the end."""
    directory, log = Path(sys.argv[1]), Path(sys.argv[2])
    neighbour, problem = None, None
    try:
        neighbour = _Neighbour(reopen_experiment(directory, None), log)
        run_interruptible(neighbour.serve())
    except BenchctlError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "it was ended by a signal"
    report = NeighbourReport() if neighbour is None else neighbour.report
    _say(msgspec.json.encode(msgspec.structs.replace(report, problem=problem)).decode())
    raise SystemExit(0 if problem is None else 1)


if __name__ == "__main__":
    main()
