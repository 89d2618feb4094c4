"""One run of an experiment: a fresh server, a warm-up, the load with its telemetry, and everything of it on disk.

    begin ▸ server up ▸ effective configuration ▸ warm-up ▸ load ∥ samplers ▸ server down ▸ steps ▸ verdict

``run.json`` is replaced at each transition. A run that fails keeps its data and does not stop the experiment; an
interrupt and a usage error do, after they are recorded.
"""

import gc
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from benchctl.analysis.validity.checks import underfilled_batch_warnings
from benchctl.analysis.validity.machines import chooses_devices
from benchctl.analysis.validity.usable import clock_warnings
from benchctl.engines.engine import Engine, LaunchSite, engine_for, raw_step_log
from benchctl.errors import RecordError, ServerStartError, UsageError
from benchctl.load.client import StreamClient
from benchctl.load.demand import num_processes, num_workers, size_of
from benchctl.measure.machine import this_node
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.redaction import recorded_env, redact_file, redacted_argv, server_env
from benchctl.measure.sending import ServerUnderTest, control_errors
from benchctl.measure.server.attached import AttachedServer
from benchctl.measure.server.resources import choose_port, process_on, split_cores
from benchctl.measure.server.server import AnyServer, Launch, ServerProcess
from benchctl.measure.telemetry.gpus import (
    FORGOTTEN_LIMIT_S,
    foreign_processes,
    memory_used_bytes,
    open_gpu,
    wait_memory_returned,
)
from benchctl.measure.telemetry.reading import GpuReader
from benchctl.measure.telemetry.samplers import SampledServer, sampling
from benchctl.measure.warmup import warmup_bursts, warmup_requests
from benchctl.profile.model import Profile
from benchctl.records.directory import RunDirectory, cell_name
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun, PreparedRequest, RunFailure, RunRecord
from benchctl.records.schema import ResultWarning, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The values that all runs of an experiment share."""

    profile: Profile
    requests: tuple[PreparedRequest, ...]
    on_progress: Callable[[int], None] = ignore
    """Called with the number of requests that have ended."""
    on_log_line: Callable[[str], None] = ignore
    """Called with the last line of a server's log while it starts."""
    engine: Engine | None = None
    """Instead of the one that the profile names."""
    keeps_raw_logs: bool = False
    """True to keep the servers' logs with their secrets, too."""


def measure_run(context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
    """Measure one run; returns its final record, which is also on disk.

    A failed run is a record with state ``failed``. Raises UsageError when no run of this profile can succeed,
    and KeyboardInterrupt on SIGINT or SIGTERM; in both cases the record says so and no process is left.
    """
    try:
        return _ExperimentRun(context, planned, directory).measure()
    finally:
        gc.collect()  # a run leaves cycles with an event loop in them, half a megabyte that nothing else would free


def decline_run(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, failure: RunFailure
) -> RunRecord:
    engine = context.engine or engine_for(context.profile.engine.kind)
    run = MeasuredRun(context.profile, planned, directory, engine, node=this_node())
    run.journal.begin()
    return run.close("failed", failure)


def noise_seed(profile: Profile, planned: PlannedRun) -> int:
    """Seed of a run's own variation: the first 32 bits of a hash of what identifies the run."""
    identity = f"{profile.seed}:{planned.block}:{planned.variant}:{cell_name(planned.cell)}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4])


class _ExperimentRun:
    """The parts of one run around its load: its server, its devices, its steps, and the verdict."""

    def __init__(self, context: RunContext, planned: PlannedRun, directory: RunDirectory) -> None:
        self._context = context
        self._profile = context.profile
        self._planned = planned
        self._directory = directory
        self._engine = context.engine or engine_for(context.profile.engine.kind)
        self._run = MeasuredRun(
            context.profile, planned, directory, self._engine, context.on_progress, node=this_node()
        )
        self._journal, self._settings = self._run.journal, self._run.settings
        self._load_size = size_of(context.requests)
        option, arrival = self._profile.load.workers, self._profile.workload.arrival
        # The number of processes is that of a load with all cores that benchctl may use.
        count = num_workers(option, arrival, self._load_size, len(os.sched_getaffinity(0)))
        self._cores = split_cores(self._settings.server.client_cores_kept, num_processes(count))

    def measure(self) -> RunRecord:
        with self._run.begun():
            error = self._run.perform(self._serve_and_measure())
            if error is None:
                return self._end()
        if isinstance(error, ServerStartError) and error.is_profile_error:
            raise UsageError(f"{self._planned.run_id}: {error}", log_tail=error.log_tail) from error
        return self._journal.record

    async def _serve_and_measure(self) -> None:
        engine, settings = self._engine, self._settings
        engine.check_available(settings)
        port = choose_port(settings.server.fixed_port) if engine.is_launched else 0
        site = LaunchSite(
            port=port, directory=self._directory.path, noise_seed=noise_seed(self._profile, self._planned)
        )
        env = server_env(os.environ, engine.env(settings, site), settings.request.variables)
        with ExitStack() as stack:
            gpu = self._open_gpu(stack, env.get("CUDA_VISIBLE_DEVICES"))
            gpus = () if gpu is None else gpu.described()
            self._journal.update(node=this_node(gpus, engine.build(settings)))
            empty = gpu if engine.is_launched else None  # one that we attach to is on its devices all the time
            if empty is not None:
                self._journal.warn(*foreign_processes(empty, "before the server was started"))
            held_bytes = memory_used_bytes(empty) if empty is not None else {}
            try:
                await self._measure_server(self._server(site, env), site, gpu)
            finally:
                self._count_redactions(redact_file(site.description, self._run.redactor))
                self._write_steps()
            if empty is not None:
                self._journal.warn(*wait_memory_returned(empty, held_bytes))
                self._journal.warn(*foreign_processes(empty, "after the server was stopped", FORGOTTEN_LIMIT_S))

    def _open_gpu(self, stack: ExitStack, visible: str | None) -> GpuReader | None:
        """Open the devices of a server that we start; a simulator uses none, and those of an attached one are
        unknown unless its options name them.
        """
        if self._engine.clock == "virtual" or not (self._engine.is_launched or chooses_devices(self._settings)):
            return None
        warn = self._journal.warn if self._profile.telemetry.gpu_hz else ignore
        return stack.enter_context(open_gpu(visible, warn=warn))

    def _server(self, site: LaunchSite, env: dict[str, str]) -> AnyServer:
        settings, engine, timeouts = self._settings, self._engine, self._profile.timeouts
        health_path = engine.health_path(settings)
        if not engine.is_launched:
            return AttachedServer(engine.base_url(settings, site.port), health_path, timeouts.ready_s)
        argv = engine.argv(settings, site)
        redactor = self._run.redactor
        recorded = recorded_env(env, engine.env(settings, site), redactor)
        self._journal.update(argv=redacted_argv(argv, redactor), env=recorded)
        return ServerProcess(
            Launch(
                argv=argv,
                env=env,
                port=site.port,
                health_path=health_path,
                log=self._directory.server_log,
                timeouts=timeouts,
                diagnose=engine.diagnose,
                essential_processes=engine.essential_processes,
                cores=self._cores.server if self._cores else None,
                on_log_line=self._context.on_log_line,
                keeps_raw_log=self._context.keeps_raw_logs,
                sent=self._run.secrets,
            )
        )

    def _count_redactions(self, counts: Mapping[str, int]) -> None:
        if counts:
            total = Counter(self._journal.record.redactions) + Counter(counts)
            self._journal.update(redactions=dict(total.most_common()))

    async def _measure_server(self, server: AnyServer, site: LaunchSite, gpu: GpuReader | None) -> None:
        base_url = self._engine.base_url(self._settings, site.port)
        try:
            with server, process_on(self._cores.client if self._cores else None):
                self._journal.time(launch_ns=server.launch_ns)
                async with StreamClient(base_url, self._profile.timeouts) as client:
                    ready_ns = await server.wait_ready(client.control)
                    target = ServerUnderTest(
                        engine=self._engine,
                        settings=self._settings,
                        client=client,
                        server=server,
                        stall_s=self._profile.timeouts.stall_s,
                    )
                    if self._engine.needs_first_generation:
                        ready_ns = await self._first_generation(target, server)
                    self._journal.time(ready_ns=ready_ns)
                    async with control_errors(server):
                        cores = self._cores.as_config() if self._cores else {}
                        await self._run.record_configuration(client.control, site, cores)
                    await self._warm_up(target)
                    await self._send_load(target, server, gpu)
                    async with control_errors(server):
                        self._journal.warn(*await self._engine.after_load_warnings(client.control))
                    server.check_alive()
        finally:
            self._journal.warn(*server.warnings)
            self._journal.time(stop_ns=server.stop_ns)
            self._count_redactions(server.redactions)

    async def _first_generation(self, target: ServerUnderTest, server: AnyServer) -> int:
        """Request one short answer as the load will; returns when it was complete.

        Some servers answer their health path before they can generate, and one keeps for its whole life what the
        first request says of sampling.
        """
        (request,) = warmup_requests(self._context.requests, 1)
        request = msgspec.structs.replace(request, request_id="first-generation", n=1)
        summary = await self._run.send_bursts(target, [(request,)])
        if summary.num_failed:
            raise _no_first_generation(str(summary.first_error), server.log_tail(), self._engine)
        return time.monotonic_ns()

    async def _warm_up(self, target: ServerUnderTest) -> None:
        bursts = warmup_bursts(self._context.requests, self._profile, self._settings)
        if bursts:
            self._run.begin_warmup()
            self._run.judge_warmup(await self._run.send_bursts(target, bursts))

    async def _send_load(self, target: ServerUnderTest, server: AnyServer, gpu: GpuReader | None) -> None:
        path = self._engine.metrics_path(self._settings)
        sampled = SampledServer(
            processes=server.processes if self._engine.is_launched else None,
            gpu=gpu,
            metrics_url=None if path is None else str(target.client.control.base_url.join(path)),
            counts_late=self._journal.record.clock != "virtual",
        )
        with sampling(self._directory.path, self._profile.telemetry, sampled) as sampler_warnings:
            await self._run.send_load(target, self._context.requests, self._load_size)
        self._journal.warn(*sampler_warnings)

    def _write_steps(self) -> None:
        """Normalise the engine's own step log, keeping all of it that can be read."""
        if not self._engine.has_steps(self._settings):
            message = f"engine {self._engine.kind!r} records no steps: time per step is unknown"
            self._journal.warn(ResultWarning(code="steps-unknown", message=message))
            return
        raw, count = raw_step_log(self._directory.path), 0
        first_send_ns = self._run.load_summary.first_send_ns
        try:
            with self._directory.append("steps") as writer:
                for step in self._engine.read_steps(self._directory.path):
                    writer.write(_with_warmup_mark(step, first_send_ns))
                    count += 1
        except RecordError as error:
            self._journal.suspect("steps-damaged", f"the step log ends after {count} steps: {error}")
        if not count and self._run.has_sent_load:
            self._journal.suspect("steps-missing", f"{raw.name} holds no steps: time per step is unknown")

    def _end(self) -> RunRecord:
        self._run.judge_failures()
        if self._run.has_no_answer:
            return self._run.conclude()
        self._journal.count(self._run.load_summary)
        loaded = load_run(self._directory)
        self._run.judge_records(loaded, self._context.requests)
        self._run.judge_client(loaded)
        self._journal.warn(*underfilled_batch_warnings(loaded), *clock_warnings(loaded))
        return self._run.conclude()


def _no_first_generation(error: str, log_tail: str, engine: Engine) -> ServerStartError:
    """The error for a server that is up and does not generate; its log may show why."""
    diagnosis = engine.diagnose(log_tail)
    remedy = "its log says more" if engine.is_launched else "correct engine.options.dialect, or ask its owner"
    return ServerStartError(
        f"the server answers its health path but does not generate ({error}); "
        + (remedy if diagnosis is None else diagnosis.remedy),
        cause="no-first-generation" if diagnosis is None else diagnosis.cause,
        log_tail=log_tail,
        is_profile_error=diagnosis is not None and diagnosis.is_profile_error,
    )


def _with_warmup_mark(step: StepRecord, first_send_ns: int | None) -> StepRecord:
    """Mark a step on the host's clock that ended before the first send: it belongs to the start or the warm-up."""
    if step.clock != "host" or (first_send_ns is not None and step.start_ns + step.dur_ns > first_send_ns):
        return step
    return msgspec.structs.replace(step, is_warmup=True)
