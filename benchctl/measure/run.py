"""One run: a fresh server, a warm-up, the load with its telemetry, and everything of it on disk.

    begin ▸ server up ▸ effective configuration ▸ warm-up ▸ load ∥ samplers ▸ server down ▸ steps ▸ verdict

``run.json`` is replaced at each transition. A run that fails keeps what it has and does not stop the
experiment; an interrupt and a usage error do, after the run says so.
"""

import hashlib
import itertools
import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from benchctl.analysis.validity.bunching import bunching_doubts
from benchctl.analysis.validity.client_guard import client_doubts, client_warnings
from benchctl.analysis.validity.gates import clock_warnings
from benchctl.analysis.validity.reconcile import failed_checks
from benchctl.analysis.validity.starvation import starvation_doubts
from benchctl.engines.engine import Engine, LaunchSite, raw_step_log
from benchctl.engines.kinds import engine_for
from benchctl.errors import RecordError, RunError, ServerRefusalError, ServerStartError
from benchctl.load.demand import size_of
from benchctl.load.driver import Load
from benchctl.load.interpreter import steady_interpreter
from benchctl.load.tally import NOTHING_SENT, LoadSummary
from benchctl.load.transport.client import StreamClient
from benchctl.load.workers.workers import AnyLoad, load_for, num_processes, num_workers, prioritised
from benchctl.measure.attempt import begin_attempt
from benchctl.measure.configuration import flat_configuration
from benchctl.measure.interrupt import run_interruptible
from benchctl.measure.journal import Journal, utc_now
from benchctl.measure.phase import Target, control_errors, drive
from benchctl.measure.redaction import recorded_env, redacted_argv, server_env
from benchctl.measure.server.attached import AttachedServer
from benchctl.measure.server.cores import process_on, split_cores
from benchctl.measure.server.port import choose_port
from benchctl.measure.server.server import Launch, Server, ServerProcess
from benchctl.measure.telemetry.gpu import (
    FORGOTTEN_LIMIT_S,
    SAMPLER_MISSING,
    foreign_processes,
    memory_used_bytes,
    open_gpu,
    wait_memory_returned,
)
from benchctl.measure.telemetry.gpu_reading import GpuReader
from benchctl.measure.telemetry.telemetry import Watched, sampled
from benchctl.measure.warmup import warmup_bursts, warmup_requests
from benchctl.profile.model import PriorityOption, Profile
from benchctl.profile.planning.plan import variant_settings
from benchctl.profile.workload import Arrival
from benchctl.records.directory import RunDirectory, cell_name, keep_steps, load_run
from benchctl.records.run import (
    PlannedRun,
    PreparedRequest,
    RequestRecord,
    ResultWarning,
    RunFailure,
    RunRecord,
    RunState,
    StepRecord,
)
from benchctl.records.schema import SCHEMA_VERSION


def _ignore_progress(_news: object) -> None:
    """Progress for nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all runs of an experiment share."""

    profile: Profile
    requests: tuple[PreparedRequest, ...]
    on_progress: Callable[[int], None] = _ignore_progress
    """Called with the number of requests that have ended."""
    on_log_line: Callable[[str], None] = _ignore_progress
    """Called with what a server says while it starts."""
    engine: Engine | None = None
    """In place of the one that the profile names."""


def measure_run(context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
    """Do one run and return its final record, which is also on disk.

    A failed run is a record with state ``failed``. Raises UsageError when no run of this profile can succeed,
    and KeyboardInterrupt on SIGINT or SIGTERM; in both cases the record says so and no process is left.
    """
    return _Run(context, planned, directory).measure()


def decline_run(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, failure: RunFailure
) -> RunRecord:
    """Record that a run is not tried; returns its record."""
    return _Run(context, planned, directory).decline(failure)


def noise_seed(profile: Profile, planned: PlannedRun) -> int:
    """Seed of a run's own variation: the first 32 bits of a hash of what identifies the run."""
    identity = f"{profile.seed}:{planned.block}:{planned.variant}:{cell_name(planned.cell)}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4])


class _Run:
    """One run while it goes on."""

    def __init__(self, context: RunContext, planned: PlannedRun, directory: RunDirectory) -> None:
        self._context = context
        self._profile = context.profile
        self._planned = planned
        self._directory = directory
        self._engine = context.engine or engine_for(context.profile.engine.kind)
        self._settings = variant_settings(context.profile, planned.variant, planned.cell)
        self._load_size = size_of(context.requests)
        self._cores = split_cores(self._settings.server.client_cores_kept, self._num_client_processes())
        self._load: AnyLoad | None = None
        record = RunRecord(
            schema_version=SCHEMA_VERSION,
            **msgspec.structs.asdict(planned),
            state="running",
            engine=context.profile.engine.kind,
            host=platform.node(),
            started_at=utc_now(),
            clock=self._engine.clock,
            time_scale=self._engine.time_scale(self._settings),
        )
        self._journal = Journal(directory, record)

    def _num_client_processes(self) -> int:
        """Of the load, if it had all cores that benchctl may use."""
        option, arrival = self._profile.load.workers, self._profile.workload.arrival
        return num_processes(num_workers(option, arrival, self._load_size, len(os.sched_getaffinity(0))))

    def measure(self) -> RunRecord:
        self._journal.update(attempt=begin_attempt(self._directory))
        try:
            run_interruptible(self._go())
        except RunError as error:
            record = self._fail(error.cause, str(error), error.log_tail)
            if isinstance(error, ServerStartError) and error.is_profile_fault:
                raise ServerRefusalError(f"{self._planned.run_id}: {error}", log_tail=error.log_tail) from error
            return record
        except KeyboardInterrupt:
            self._fail("interrupted", "the run was interrupted by a signal")
            raise
        except OSError as error:
            with suppress(OSError):  # the disk may be full for this, too
                self._fail("disk", str(error))
            raise RunError(
                f"{self._directory.path}: {error}; free space or correct the permissions, then go on with --resume",
                cause="disk",
            ) from error
        except BaseException as error:
            self._fail(type(error).__name__, str(error))
            raise
        return self._end()

    def decline(self, failure: RunFailure) -> RunRecord:
        self._journal.update(attempt=begin_attempt(self._directory))
        return self._close("failed", failure)

    async def _go(self) -> None:
        engine, settings = self._engine, self._settings
        engine.check_available(settings)
        port = choose_port(settings.server.fixed_port) if engine.is_launched else 0
        site = LaunchSite(
            port=port, directory=self._directory.path, noise_seed=noise_seed(self._profile, self._planned)
        )
        env = server_env(os.environ, engine.env(settings, site))
        with ExitStack() as stack:
            gpu = self._open_gpu(stack, env.get("CUDA_VISIBLE_DEVICES"))
            if gpu is not None:
                self._journal.warn(*foreign_processes(gpu, "before the server was started"))
            held_bytes = memory_used_bytes(gpu) if gpu is not None else {}
            try:
                await self._serve(self._server(site, env), site, gpu)
            finally:
                self._write_steps()
            if gpu is not None:
                self._journal.warn(*wait_memory_returned(gpu, held_bytes))
                self._journal.warn(*foreign_processes(gpu, "after the server was stopped", FORGOTTEN_LIMIT_S))

    def _open_gpu(self, stack: ExitStack, visible: str | None) -> GpuReader | None:
        """The devices of a server of ours; a simulated one uses none, and those of an attached one are unknown."""
        if self._engine.clock == "virtual" or not self._engine.is_launched:
            return None
        gpu = stack.enter_context(open_gpu(visible))
        if gpu is None and self._profile.telemetry.gpu_hz:
            self._journal.warn(SAMPLER_MISSING)
        return gpu

    def _server(self, site: LaunchSite, env: dict[str, str]) -> Server:
        settings, engine, timeouts = self._settings, self._engine, self._profile.timeouts
        health_path = engine.health_path(settings)
        if not engine.is_launched:
            return AttachedServer(engine.base_url(settings, site.port), health_path, timeouts.ready_s)
        argv = engine.argv(settings, site)
        self._journal.update(argv=redacted_argv(argv), env=recorded_env(env, engine.env(settings, site)))
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
            )
        )

    async def _serve(self, server: Server, site: LaunchSite, gpu: GpuReader | None) -> None:
        base_url = self._engine.base_url(self._settings, site.port)
        try:
            with server, process_on(self._cores.client if self._cores else None):
                self._journal.time(launch_ns=server.launch_ns)
                async with StreamClient(base_url, self._profile.timeouts) as client:
                    ready_ns = await server.wait_ready(client.control)
                    target = Target(
                        engine=self._engine,
                        settings=self._settings,
                        server=server,
                        client=client,
                        stall_s=self._profile.timeouts.stall_s,
                    )
                    if self._engine.needs_first_generation:
                        ready_ns = await self._first_generation(target)
                    self._journal.time(ready_ns=ready_ns)
                    await self._ask_configuration(target, site)
                    await self._warm_up(target)
                    await self._measured_load(target, gpu)
                    async with control_errors(server):
                        self._journal.warn(*await self._engine.after_load_warnings(client.control))
                    server.check_alive()
        finally:
            self._journal.warn(*server.warnings)
            self._journal.time(stop_ns=server.stop_ns)

    async def _first_generation(self, target: Target) -> int:
        """One short answer, as the load will ask for it; returns when it was there.

        Some servers answer their health path before they can generate, and one keeps for its whole life what the
        first request says of sampling.
        """
        (asked,) = warmup_requests(self._context.requests, 1)
        asked = msgspec.structs.replace(asked, request_id="first-generation", n=1)
        with self._directory.append("requests") as writer:
            load = Load(target.client, Arrival(kind="burst"), writer.write)
            await drive(target, load, (asked,), max_concurrency=None, is_warmup=True)
        ended = load.summary()
        if ended.num_failed:
            raise _no_first_generation(str(ended.first_error), target.server.log_tail(), self._engine)
        return time.monotonic_ns()

    async def _ask_configuration(self, target: Target, site: LaunchSite) -> None:
        """Record what the server says of itself, beside what it will be asked for."""
        async with control_errors(target.server):
            told = await self._engine.effective_config(target.client.control, self._settings, site)
        config = flat_configuration(self._settings, told) | (self._cores.as_config() if self._cores else {})
        version = told.get("version")
        self._journal.update(effective_config=config, engine_version=None if version is None else str(version))

    async def _warm_up(self, target: Target) -> None:
        bursts = warmup_bursts(self._context.requests, self._profile, self._settings)
        if not bursts:
            return
        self._journal.time(warmup_start_ns=time.monotonic_ns())
        with self._directory.append("requests") as writer:
            load = Load(target.client, Arrival(kind="burst"), writer.write)
            for requests in bursts:
                await drive(target, load, requests, max_concurrency=None, is_warmup=True)
        ended = load.summary()
        if ended.num_failed:
            what = f"{ended.num_failed} of {ended.num_sent} warm-up requests failed ({ended.first_error})"
            self._journal.doubt("warmup-failed", f"{what}: the load may have met a cold server")

    async def _measured_load(self, target: Target, gpu: GpuReader | None) -> None:
        arrival, num_ended = self._profile.workload.arrival, itertools.count(1)
        with self._directory.append("requests") as writer, self._directory.append("client") as samples:

            def keep(record: RequestRecord) -> None:
                writer.write(record)
                self._context.on_progress(next(num_ended))

            priority = self._client_priority()
            load = self._load = load_for(
                target.client,
                self._profile,
                self._load_size,
                keep,
                priority=priority,
                time_scale=self._journal.record.time_scale,
                on_sample=samples.write,
            )
            limit = arrival.max_concurrency
            sampling = sampled(self._directory.path, self._profile.telemetry, self._watched(target, gpu))
            with sampling as doubts, steady_interpreter(), prioritised(load, priority, self._tell_priority):
                await drive(target, load, self._context.requests, max_concurrency=limit, is_warmup=False)
        self._journal.warn(*doubts)

    def _client_priority(self) -> PriorityOption:
        """A simulator steps in its own time, which no wait of ours changes."""
        return "none" if self._journal.record.clock == "virtual" else self._profile.load.priority

    def _tell_priority(self, got: str) -> None:
        self._journal.update(client_priority=got)

    def _watched(self, target: Target, gpu: GpuReader | None) -> Watched:
        path = self._engine.metrics_path(self._settings)
        url = None if path is None else str(target.client.control.base_url.join(path))
        is_real = self._journal.record.clock != "virtual"
        return Watched(server_pid=target.server.pid, gpu=gpu, metrics_url=url, counts_late=is_real)

    def _write_steps(self) -> None:
        """Normalise the engine's own step log, keeping all of it that can be read."""
        if not self._engine.has_steps(self._settings):
            message = f"engine {self._engine.kind!r} records no steps: time per step is unknown"
            self._journal.warn(ResultWarning(code="steps-unknown", message=message))
            return
        raw, count = raw_step_log(self._directory.path), 0
        first_send_ns = self._load_summary().first_send_ns
        try:
            with self._directory.append("steps") as writer:
                for step in self._engine.read_steps(self._directory.path):
                    writer.write(_placed(step, first_send_ns))
                    count += 1
        except RecordError as error:
            self._journal.doubt("steps-damaged", f"the step log ends after {count} steps: {error}")
        if not count and self._load is not None:
            self._journal.doubt("steps-missing", f"{raw.name} holds no steps: time per step is unknown")

    def _end(self) -> RunRecord:
        """The verdict on a run that went to its end."""
        load = self._load_summary()
        if load.num_failed:
            what = f"{load.num_failed} of {load.num_sent} requests failed ({load.first_error}): see requests.jsonl"
            self._journal.doubt("failed-requests", what)
            if load.num_failed == load.num_sent:
                return self._fail("no-request-completed", what)
        self._judge()
        return self._close("suspect" if self._journal.is_doubtful else "done")

    def _judge(self) -> None:
        """Hold the accounts of the run against each other, as they are on disk now."""
        self._journal.count(self._load_summary())
        loaded = load_run(self._directory)
        keep_steps(loaded)
        arrival, checks = self._profile.workload.arrival, (self._profile, self._context.requests)
        for doubt in (*failed_checks(loaded, *checks), *client_doubts(loaded, arrival)):
            self._journal.doubt(doubt.code, doubt.message)
        self._journal.warn(*client_warnings(loaded, arrival))
        self._journal.warn(*bunching_doubts(loaded), *starvation_doubts(loaded), *clock_warnings(loaded))

    def _fail(self, cause: str, message: str, log_tail: str = "") -> RunRecord:
        return self._close("failed", RunFailure(cause=cause, message=message, log_tail=log_tail))

    def _close(self, state: RunState, failure: RunFailure | None = None) -> RunRecord:
        self._journal.count(self._load_summary())
        return self._journal.close(state, failure)

    def _load_summary(self) -> LoadSummary:
        return self._load.summary() if self._load is not None else NOTHING_SENT


def _no_first_generation(error: str, log_tail: str, engine: Engine) -> ServerStartError:
    """What to tell of a server that is up and does not generate; its log may give away why."""
    known = engine.diagnose(log_tail)
    remedy = "its log says more" if engine.is_launched else "correct engine.options.dialect, or ask its owner"
    return ServerStartError(
        f"the server answers its health path but does not generate ({error}); "
        + (remedy if known is None else known.remedy),
        cause="no-first-generation" if known is None else known.cause,
        log_tail=log_tail,
        is_profile_fault=known is not None and known.is_profile_fault,
    )


def _placed(step: StepRecord, first_send_ns: int | None) -> StepRecord:
    """A step on the host's clock that ended before the first send belongs to the start or the warm-up."""
    if step.clock != "host" or (first_send_ns is not None and step.start_ns + step.dur_ns > first_send_ns):
        return step
    return msgspec.structs.replace(step, is_warmup=True)
