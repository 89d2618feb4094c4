"""One run in virtual time, without server, client or network: the same plan, warm-up, steps and checks.

    begin ▸ configuration ▸ warm-up ▸ load ▸ verdict

The simulator runs in this process, and its steps are those that its server would log for the same run. The times of
the requests are on its clock, too, as a client without any delay would take them.
"""

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from typing import Final, Literal, TypeAlias

from benchctl import __version__
from benchctl.engines.engine import engine_for
from benchctl.load.tally import Tally
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.run import RunContext, noise_seed
from benchctl.measure.warmup import warmup_bursts
from benchctl.records.directory import RunDirectory
from benchctl.records.files import JsonlWriter
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun, RequestRecord, RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.sim.virtual_server import VirtualServer

Kept: TypeAlias = Literal["requests", "all"]
"""The records that a run keeps: those of its requests, or those of its steps as well."""


def simulate_run(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, *, keep: Kept = "all"
) -> RunRecord:
    """Simulate one run of an experiment on the engine ``sim``; returns its final record, which is also on disk.

    Raises UsageError where the simulator cannot serve these settings, and KeyboardInterrupt on SIGINT or SIGTERM;
    in both cases the record says so.
    """
    return _SimulatedRun(context, planned, directory, keep).simulate()


class _SimulatedRun:
    """A run on its way, and the files that its steps and requests go to."""

    def __init__(self, context: RunContext, planned: PlannedRun, directory: RunDirectory, keep: Kept) -> None:
        self._context: Final = context
        self._directory: Final = directory
        self._keeps_steps: Final = keep == "all"
        self._noise_seed: Final = noise_seed(context.profile, planned)
        self._run: Final = MeasuredRun(
            context.profile, planned, directory, engine_for(context.profile.engine.kind), node=None
        )

    def simulate(self) -> RunRecord:
        with self._run.begun(can_resume=False):
            self._run.journal.update(time_scale=1.0)  # requests and steps are on one clock
            error = self._run.perform(self._serve())
            return self._end() if error is None else self._run.journal.record

    async def _serve(self) -> None:
        profile, run = self._context.profile, self._run
        with ExitStack() as files:
            keep_step = files.enter_context(self._directory.append("steps")).write if self._keeps_steps else ignore
            server = VirtualServer(run.settings, noise_seed=self._noise_seed, on_step=keep_step)
            run.note_configuration({"version": __version__, **server.config.server_info()})
            writer = files.enter_context(self._directory.append("requests"))
            if bursts := warmup_bursts(self._context.requests, profile, run.settings):
                run.begin_warmup(server.now_ns)
                warmup = Tally()
                for burst in bursts:
                    await self._record(server.send_burst(burst), writer, warmup)
                run.judge_warmup(warmup.summary())
            run.simulated = Tally()
            load = server.send_load(self._context.requests, profile.workload.arrival)
            await self._record(load, writer, run.simulated, shows_progress=True)
            run.journal.time(stop_ns=server.now_ns)

    async def _record(
        self, records: Iterable[RequestRecord], writer: JsonlWriter, tally: Tally, *, shows_progress: bool = False
    ) -> None:
        for number, record in zip(count(1), records):
            writer.write(record)
            tally.count(record)
            if shows_progress:
                self._context.on_progress(number)
            await asyncio.sleep(0)  # where an interrupt ends the run

    def _end(self) -> RunRecord:
        run = self._run
        run.judge_failures()
        if run.has_no_answer:
            return run.conclude()
        run.journal.count(run.load_summary)
        loaded = load_run(self._directory)
        if not self._keeps_steps:
            message = "the steps were not kept (--keep requests): time per step is unknown"
            run.journal.warn(ResultWarning(code="steps-unknown", message=message))
        run.judge_records(loaded, self._context.requests)
        return run.conclude()
