"""One run of an experiment: a fresh server, a warm-up, the load with its telemetry, and everything of it on disk.

    begin ▸ server up ▸ effective configuration ▸ warm-up ▸ load ∥ samplers ▸ server down ▸ steps ▸ verdict

``run.json`` is replaced at each transition. A run that fails keeps its data and does not stop the experiment; an
interrupt and a usage error do, after they are recorded.
"""

import asyncio
import gc
import hashlib
import os
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

import msgspec

from benchctl.analysis.validity.machines import chooses_devices
from benchctl.engines.engine import Engine, LaunchSite, raw_step_log
from benchctl.errors import RecordError, ServerStartError, UsageError
from benchctl.load.client import StreamClient
from benchctl.load.demand import num_processes, num_workers
from benchctl.measure.machine import LoadToSend, loads_at, most_open, this_node
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.redaction import recorded_env, redact_file, redacted_argv, server_env
from benchctl.measure.sending import ServerUnderTest, control_errors
from benchctl.measure.server.process import CoreSplit, choose_port, process_on, split_cores
from benchctl.measure.server.server import AnyServer, AttachedServer, Launch, ServerProcess
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.measure.telemetry.reading import (
    FORGOTTEN_LIMIT_S,
    VARIABLE,
    GpuReader,
    foreign_processes,
    memory_used_bytes,
    wait_memory_returned,
)
from benchctl.measure.telemetry.samplers import sampling
from benchctl.measure.warmup import warmup_bursts, warmup_requests
from benchctl.measure.waves import send_waves
from benchctl.profile.model import Profile
from benchctl.records.directory import RequestSets, RunDirectory, cell_name
from benchctl.records.record import (
    LoadsChoice,
    Look,
    PlannedRun,
    PreparedRequest,
    RunFailure,
    RunRecord,
    StoppingRecord,
)
from benchctl.records.schema import StepRecord
from benchctl.workload.opening import opening_of

_STEP_LOG_WAIT_S: Final = 0.2
"""After one of several loads: engines write a step a moment after its tokens, and it is judged before the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Callbacks of an experiment."""

    on_run_start: Callable[[PlannedRun, int], None] = ignore
    """Called with the run and the number of its requests, over all of its loads."""
    on_request_end: Callable[[int], None] = ignore
    """Called with the number of requests of the current run that have ended."""
    on_live: Callable[[Sequence[str]], None] | None = None
    """Called about once a second with numbers of the current load so far, in words; None makes none."""
    on_run_end: Callable[[PlannedRun, RunRecord], None] = ignore
    on_log_line: Callable[[str], None] = ignore
    """Called with the last line of the log of a server that is starting."""
    on_server_start: Callable[[], object] = ignore
    """Called when a server was started and has not been asked yet whether it is ready."""
    on_look: Callable[[Look, StoppingRecord], None] = ignore
    """Called with each look at the runs until then, and the stopping rule that it belongs to."""
    on_loads: Callable[[LoadsChoice], None] = ignore
    """Called with the number of loads per server, where it is chosen."""
    on_repeat: Callable[[Sequence[PlannedRun]], None] = ignore
    """Called with the runs of a block that is measured once more: see ``_with_repeat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The values that all runs of an experiment share."""

    profile: Profile
    requests: RequestSets
    listener: Listener = Listener()
    num_loads: int = 1
    """Times that the requests are sent to each server, where it has no ladder of load points."""
    engine: Engine | None = None
    """Instead of the one that the profile names."""
    keeps_raw_logs: bool = False
    """True to keep the servers' logs with their secrets, too."""


def loads_of(context: RunContext, planned: PlannedRun) -> tuple[LoadToSend, ...]:
    """The loads of the server of a run in their order: one for each point of its ladder, else all the same."""
    cells = [planned.cell | point for point in planned.ladder or ({},)]
    loads = loads_at(context.profile, context.requests, cells)
    return loads if planned.ladder else loads * context.num_loads


def widest(loads: Sequence[LoadToSend]) -> tuple[Profile, tuple[PreparedRequest, ...]]:
    """The load that a server is warmed up for: the profile with most requests open, the requests of all sets."""
    sets = {id(load.requests): load.requests for load in loads}
    return most_open(loads).profile, tuple(chain.from_iterable(sets.values()))


def measure_run(context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
    """Measure one run; returns its final record, which is also on disk.

    A failed run is a record with state ``failed``. Raises UsageError when no run of this profile can succeed,
    and KeyboardInterrupt on SIGINT or SIGTERM; in both cases the record says so and no process is left.
    """
    gc.freeze()  # what exists now is not searched at the end
    run = _run_of(context, planned, directory)
    try:
        with run.begun():
            error = run.perform(_serve_and_measure(run, context, noise_seed(context.profile, planned)))
            if error is None:
                return run.judge(context.requests)
        if isinstance(error, ServerStartError) and error.is_profile_error:
            raise UsageError(f"{run.record.run_id}: {error}", log_tail=error.log_tail) from error
        return run.record
    finally:
        gc.collect()  # a run leaves cycles with an event loop in them, half a megabyte that nothing else would free
        gc.unfreeze()


def decline_run(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, failure: RunFailure
) -> RunRecord:
    """Record a run as failed that is not tried."""
    run = _run_of(context, planned, directory)
    with run.begun():
        return run.fail(failure.cause, failure.message)


def _run_of(context: RunContext, planned: PlannedRun, directory: RunDirectory) -> MeasuredRun:
    return MeasuredRun(
        context.profile,
        planned,
        directory,
        engine=context.engine,
        node=this_node(),
        num_loads=context.num_loads,
    )


def noise_seed(profile: Profile, planned: PlannedRun) -> int:
    """Seed of a run's own variation: the first 32 bits of a hash of what identifies the run."""
    identity = f"{profile.seed}:{planned.block}:{planned.variant}:{cell_name(planned.cell)}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4])


async def _serve_and_measure(run: MeasuredRun, context: RunContext, seed: int) -> None:
    """The parts of a run around its load: its server, its devices, its steps."""
    engine, settings = run.engine, run.settings
    engine.check_available(settings)
    site = LaunchSite(
        port=choose_port(settings.server.fixed_port) if engine.is_launched else 0,
        directory=run.directory.path,
        noise_seed=seed,
    )
    env = server_env(os.environ, engine.env(settings, site), settings.request.variables)
    with _devices_of(run, env.get(VARIABLE)) as gpu:
        run.note(node=this_node(() if gpu is None else gpu.described(), engine.build(settings)))
        empty = gpu if engine.is_launched else None  # one that we attach to is on its devices all the time
        if empty is not None:
            run.warn(*foreign_processes(empty, "before the server was started"))
        held_bytes = memory_used_bytes(empty) if empty is not None else {}
        try:
            await _measure_server(run, context, site, env, gpu)
        finally:
            run.count_redactions(redact_file(site.description, run.redactor))
            _write_steps(run)
        if empty is not None:
            run.warn(*wait_memory_returned(empty, held_bytes))
            run.warn(*foreign_processes(empty, "after the server was stopped", FORGOTTEN_LIMIT_S))


def _devices_of(run: MeasuredRun, visible: str | None) -> AbstractContextManager[GpuReader | None]:
    """The devices of a server that we start; a simulator uses none, and those of an attached one are unknown unless
    its options name them.
    """
    if run.record.is_virtual or not (run.engine.is_launched or chooses_devices(run.settings)):
        return nullcontext()
    needs_none = run.settings.server.uses_gpu is False
    return open_gpu(visible, warn=run.warn if run.profile.telemetry.gpu_hz and not needs_none else ignore)


def _server(
    run: MeasuredRun, context: RunContext, site: LaunchSite, env: dict[str, str], cores: CoreSplit | None
) -> AnyServer:
    engine, settings, timeouts = run.engine, run.settings, run.profile.timeouts
    health_path = engine.health_path(settings)
    if not engine.is_launched:
        return AttachedServer(engine.base_url(settings, site.port), health_path, timeouts.ready_s)
    argv = engine.argv(settings, site)
    run.note(
        argv=redacted_argv(argv, run.redactor), env=recorded_env(env, engine.env(settings, site), run.redactor)
    )
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
            cores=None if cores is None else cores.server,
            on_log_line=context.listener.on_log_line,
            keeps_raw_log=context.keeps_raw_logs,
            sent=run.secrets,
        )
    )


async def _measure_server(
    run: MeasuredRun, context: RunContext, site: LaunchSite, env: dict[str, str], gpu: GpuReader | None
) -> None:
    """The life of a server, from its start to its end."""
    engine, loads = run.engine, loads_of(context, run.record)
    profile, requests = widest(loads)
    run.profile = profile
    # The number of processes is that of a load with all cores that benchctl may use.
    num_cores = len(os.sched_getaffinity(0))
    workers = max(
        num_workers(load.profile.load.workers, load.profile.workload.arrival, load.size, num_cores)
        for load in loads
    )
    cores = split_cores(getattr(run.settings.server, "client_cores", 0), num_processes(workers))
    server = _server(run, context, site, env, cores)
    try:
        with server, process_on(None if cores is None else cores.client):
            run.time(launch_ns=server.launch_ns)
            run.update()  # a start may take long
            context.listener.on_server_start()
            async with StreamClient(engine.base_url(run.settings, site.port), profile.timeouts) as client:
                ready_ns = await server.wait_ready(client.control)
                target = ServerUnderTest(
                    run,
                    client,
                    server,
                    stall_s=profile.timeouts.stall_s,
                    on_progress=context.listener.on_request_end,
                    on_live=context.listener.on_live,
                )
                if engine.needs_first_generation:
                    ready_ns = await _first_generation(run, requests, target, server)
                run.time(ready_ns=ready_ns)
                async with control_errors(server):
                    await target.record_configuration(site, {} if cores is None else cores.as_config())
                bursts = warmup_bursts(requests, profile, run.settings)
                run.time(warmup_start_ns=time.monotonic_ns() if bursts else None)
                run.update()  # warm-up and load may take long
                if bursts:
                    run.judge_warmup(await target.send_bursts(bursts))
                await send_waves(run, requests, target.send_bursts)
                for number, load in enumerate(loads, start=1):
                    with run.each_load(number, load.profile):
                        await _send_load(run, load, target, server, client, gpu)
    finally:
        run.warn(*server.warnings)
        run.time(stop_ns=server.stop_ns)
        run.count_redactions(server.redactions)
        run.update()  # steps may take long to read, and memory to return


async def _first_generation(
    run: MeasuredRun, requests: Sequence[PreparedRequest], target: ServerUnderTest, server: AnyServer
) -> int:
    """Request one short answer as the load will; returns when it was complete.

    Some servers answer their health path before they can generate, and one keeps for its whole life what the
    first request says of sampling. Raises ServerStartError for a server that is up and does not generate; its log
    may show why.
    """
    (request,) = warmup_requests(requests, 1)
    request = msgspec.structs.replace(request, request_id="first-generation", n=1)
    summary = await target.send_bursts([(request,)])
    if not summary.num_failed:
        return time.monotonic_ns()
    log_tail = server.log_tail()
    diagnosis = run.engine.diagnose(log_tail)
    remedy = "its log says more" if run.engine.is_launched else "correct engine.options.dialect, or ask its owner"
    raise ServerStartError(
        f"the server answers its health path but does not generate ({summary.first_error}); "
        + (remedy if diagnosis is None else diagnosis.remedy),
        cause="no-first-generation" if diagnosis is None else diagnosis.cause,
        log_tail=log_tail,
        is_profile_error=diagnosis is not None and diagnosis.is_profile_error,
    )


async def _send_load(
    run: MeasuredRun,
    load: LoadToSend,
    target: ServerUnderTest,
    server: AnyServer,
    client: StreamClient,
    gpu: GpuReader | None,
) -> None:
    """Send one load while its server is sampled, and judge it if it is one of several."""
    profile, requests, engine = run.profile, load.requests, run.engine
    path = engine.metrics_path(run.settings)
    await target.prime(requests)
    with sampling(
        run.directory.log,
        profile.telemetry,
        processes=server.processes if engine.is_launched else None,
        gpu=gpu,
        metrics_url=None if path is None else str(client.control.base_url.join(path)),
        counts_late=not run.record.is_virtual,
    ) as sampler_warnings:
        await target.send_load(requests, load.size, opening_of(requests, profile))
    run.warn(*sampler_warnings)
    async with control_errors(server):
        run.warn(*await engine.after_load_warnings(client.control))
    server.check_alive()
    await _judge_one_of_several(run, requests)


async def _judge_one_of_several(run: MeasuredRun, requests: Sequence[PreparedRequest]) -> None:
    """Write the steps of a load that has ended and judge it, where others follow it or came before."""
    if not run.record.loads:
        return
    if not run.record.is_virtual:
        await asyncio.sleep(_STEP_LOG_WAIT_S)
    _write_steps(run, is_last=False)
    run.judge_load(requests)


def _write_steps(run: MeasuredRun, *, is_last: bool = True) -> None:
    """Normalise the engine's own step log, keeping all of it that can be read and was not before.

    A step on the host's clock belongs to the last load that had begun, or been primed, when it ended, any other to
    the newest.
    """
    engine, path, count = run.engine, run.directory.path, 0
    if not engine.has_steps(run.settings):
        return
    sent = [load for load in run.sent or [run.load] if load.begin_ns is not None]
    begins_ns = [load.primed_ns or load.begin_ns or 0 for load in sent]
    newest = run.directory.load
    try:
        with ExitStack() as files:
            writers = {newest: files.enter_context(run.directory.append("steps"))}
            for step in islice(engine.read_steps(path), run.num_steps, None):
                num_begun = bisect(begins_ns, step.start_ns + step.dur_ns - 1)
                load = max(1, num_begun) if step.clock == "host" else newest
                if load not in writers:
                    writers[load] = files.enter_context(run.directory.of_load(load).append("steps"))
                writers[load].write(_with_warmup_mark(step, sent[load - 1].first_send_ns if sent else None))
                count += 1
    except RecordError as error:
        if is_last:  # else the end of the log may be a line that the server has not written to its end
            run.suspect("steps-damaged", f"the step log ends after {run.num_steps + count} steps: {error}")
    run.num_steps += count
    is_missing = not run.num_steps if is_last else not count
    if is_missing and run.load.first_send_ns is not None:
        run.suspect("steps-missing", f"{raw_step_log(path).name} holds no steps: time per step is unknown")


def _with_warmup_mark(step: StepRecord, first_send_ns: int | None) -> StepRecord:
    """Mark a step on the host's clock that ended before the first send: it belongs to the start or the warm-up."""
    if step.clock != "host" or (first_send_ns is not None and step.start_ns + step.dur_ns > first_send_ns):
        return step
    return msgspec.structs.replace(step, is_warmup=True)
