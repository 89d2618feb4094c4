"""One run of an experiment: a fresh server, a warm-up, the load with its telemetry, and everything of it on disk.

    begin ▸ server up ▸ effective configuration ▸ warm-up ▸ load ∥ samplers ▸ server down ▸ steps ▸ verdict

``run.json`` is replaced at each transition. A run that fails keeps its data and does not stop the experiment; an
interrupt and a usage error do, after they are recorded.
"""

import gc
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import msgspec

from benchctl.analysis.validity.machines import chooses_devices
from benchctl.engines.engine import Engine, LaunchSite, raw_step_log
from benchctl.errors import RecordError, ServerStartError, UsageError
from benchctl.load.client import StreamClient
from benchctl.load.demand import num_processes, num_workers, size_of
from benchctl.measure.machine import this_node
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.redaction import recorded_env, redact_file, redacted_argv, server_env
from benchctl.measure.sending import ServerUnderTest, control_errors
from benchctl.measure.server.process import choose_port, process_on, split_cores
from benchctl.measure.server.server import AnyServer, AttachedServer, Launch, ServerProcess
from benchctl.measure.telemetry.gpus import (
    FORGOTTEN_LIMIT_S,
    foreign_processes,
    memory_used_bytes,
    open_gpu,
    wait_memory_returned,
)
from benchctl.measure.telemetry.reading import VARIABLE, GpuReader
from benchctl.measure.telemetry.samplers import sampling
from benchctl.measure.warmup import warmup_bursts, warmup_requests
from benchctl.profile.model import Profile
from benchctl.records.directory import RunDirectory, cell_name
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
    """Record a run as failed that is not tried."""
    run = MeasuredRun(context.profile, planned, directory, engine=context.engine, node=this_node())
    with run.begun():
        return run.fail(failure.cause, failure.message)


def noise_seed(profile: Profile, planned: PlannedRun) -> int:
    """Seed of a run's own variation: the first 32 bits of a hash of what identifies the run."""
    identity = f"{profile.seed}:{planned.block}:{planned.variant}:{cell_name(planned.cell)}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4])


class _ExperimentRun:
    """The parts of one run around its load: its server, its devices, its steps."""

    def __init__(self, context: RunContext, planned: PlannedRun, directory: RunDirectory) -> None:
        self._context = context
        self._profile = context.profile
        self._run = MeasuredRun(context.profile, planned, directory, engine=context.engine, node=this_node())
        self._engine, self._settings = self._run.engine, self._run.settings
        self._noise_seed = noise_seed(context.profile, planned)
        self._load_size = size_of(context.requests)
        option, arrival = self._profile.load.workers, self._profile.workload.arrival
        # The number of processes is that of a load with all cores that benchctl may use.
        count = num_workers(option, arrival, self._load_size, len(os.sched_getaffinity(0)))
        self._cores = split_cores(self._settings.server.client_cores_kept, num_processes(count))

    def measure(self) -> RunRecord:
        run = self._run
        with run.begun():
            error = run.perform(self._serve_and_measure())
            if error is None:
                return run.judge(self._context.requests)
        if isinstance(error, ServerStartError) and error.is_profile_error:
            raise UsageError(f"{run.record.run_id}: {error}", log_tail=error.log_tail) from error
        return run.record

    async def _serve_and_measure(self) -> None:
        engine, settings, run = self._engine, self._settings, self._run
        engine.check_available(settings)
        port = choose_port(settings.server.fixed_port) if engine.is_launched else 0
        site = LaunchSite(port=port, directory=run.directory.path, noise_seed=self._noise_seed)
        env = server_env(os.environ, engine.env(settings, site), settings.request.variables)
        with ExitStack() as stack:
            gpu = self._open_gpu(stack, env.get(VARIABLE))
            gpus = () if gpu is None else gpu.described()
            run.update(node=this_node(gpus, engine.build(settings)))
            empty = gpu if engine.is_launched else None  # one that we attach to is on its devices all the time
            if empty is not None:
                run.warn(*foreign_processes(empty, "before the server was started"))
            held_bytes = memory_used_bytes(empty) if empty is not None else {}
            try:
                await self._measure_server(self._server(site, env), site, gpu)
            finally:
                run.count_redactions(redact_file(site.description, run.redactor))
                self._write_steps()
            if empty is not None:
                run.warn(*wait_memory_returned(empty, held_bytes))
                run.warn(*foreign_processes(empty, "after the server was stopped", FORGOTTEN_LIMIT_S))

    def _open_gpu(self, stack: ExitStack, visible: str | None) -> GpuReader | None:
        """Open the devices of a server that we start; a simulator uses none, and those of an attached one are
        unknown unless its options name them.
        """
        if self._engine.clock == "virtual" or not (self._engine.is_launched or chooses_devices(self._settings)):
            return None
        warn = self._run.warn if self._profile.telemetry.gpu_hz else ignore
        return stack.enter_context(open_gpu(visible, warn=warn))

    def _server(self, site: LaunchSite, env: dict[str, str]) -> AnyServer:
        run, settings, engine, timeouts = self._run, self._settings, self._engine, self._profile.timeouts
        health_path = engine.health_path(settings)
        if not engine.is_launched:
            return AttachedServer(engine.base_url(settings, site.port), health_path, timeouts.ready_s)
        argv = engine.argv(settings, site)
        recorded = recorded_env(env, engine.env(settings, site), run.redactor)
        run.update(argv=redacted_argv(argv, run.redactor), env=recorded)
        return ServerProcess(
            Launch(
                argv=argv,
                env=env,
                port=site.port,
                health_path=health_path,
                log=run.directory.server_log,
                timeouts=timeouts,
                diagnose=engine.diagnose,
                essential_processes=engine.essential_processes,
                cores=self._cores.server if self._cores else None,
                on_log_line=self._context.on_log_line,
                keeps_raw_log=self._context.keeps_raw_logs,
                sent=run.secrets,
            )
        )

    async def _measure_server(self, server: AnyServer, site: LaunchSite, gpu: GpuReader | None) -> None:
        run, timeouts = self._run, self._profile.timeouts
        try:
            with server, process_on(self._cores.client if self._cores else None):
                run.time(launch_ns=server.launch_ns)
                async with StreamClient(self._engine.base_url(self._settings, site.port), timeouts) as client:
                    ready_ns = await server.wait_ready(client.control)
                    target = ServerUnderTest(
                        run, client, server, stall_s=timeouts.stall_s, on_progress=self._context.on_progress
                    )
                    if self._engine.needs_first_generation:
                        ready_ns = await self._first_generation(target, server)
                    run.time(ready_ns=ready_ns)
                    async with control_errors(server):
                        await target.record_configuration(site, self._cores.as_config() if self._cores else {})
                    await self._warm_up(target)
                    with self._sampling(server, client, gpu) as sampler_warnings:
                        await target.send_load(self._context.requests, self._load_size)
                    run.warn(*sampler_warnings)
                    async with control_errors(server):
                        run.warn(*await self._engine.after_load_warnings(client.control))
                    server.check_alive()
        finally:
            run.warn(*server.warnings)
            run.time(stop_ns=server.stop_ns)
            run.count_redactions(server.redactions)

    def _sampling(
        self, server: AnyServer, client: StreamClient, gpu: GpuReader | None
    ) -> AbstractContextManager[list[ResultWarning]]:
        path = self._engine.metrics_path(self._settings)
        return sampling(
            self._run.directory.path,
            self._profile.telemetry,
            processes=server.processes if self._engine.is_launched else None,
            gpu=gpu,
            metrics_url=None if path is None else str(client.control.base_url.join(path)),
            counts_late=self._run.record.clock != "virtual",
        )

    async def _warm_up(self, target: ServerUnderTest) -> None:
        if bursts := warmup_bursts(self._context.requests, self._profile, self._settings):
            self._run.time(warmup_start_ns=time.monotonic_ns())
            self._run.judge_warmup(await target.send_bursts(bursts))

    async def _first_generation(self, target: ServerUnderTest, server: AnyServer) -> int:
        """Request one short answer as the load will; returns when it was complete.

        Some servers answer their health path before they can generate, and one keeps for its whole life what the
        first request says of sampling.
        """
        (request,) = warmup_requests(self._context.requests, 1)
        request = msgspec.structs.replace(request, request_id="first-generation", n=1)
        summary = await target.send_bursts([(request,)])
        if summary.num_failed:
            raise _no_first_generation(str(summary.first_error), server.log_tail(), self._engine)
        return time.monotonic_ns()

    def _write_steps(self) -> None:
        """Normalise the engine's own step log, keeping all of it that can be read."""
        run = self._run
        if not self._engine.has_steps(self._settings):
            message = f"engine {self._engine.kind!r} records no steps: time per step is unknown"
            run.warn(ResultWarning(code="steps-unknown", message=message))
            return
        raw, count = raw_step_log(run.directory.path), 0
        first_send_ns = run.summarize().first_send_ns
        try:
            with run.directory.append("steps") as writer:
                for step in self._engine.read_steps(run.directory.path):
                    writer.write(_with_warmup_mark(step, first_send_ns))
                    count += 1
        except RecordError as error:
            run.suspect("steps-damaged", f"the step log ends after {count} steps: {error}")
        if not count and first_send_ns is not None:
            run.suspect("steps-missing", f"{raw.name} holds no steps: time per step is unknown")


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
