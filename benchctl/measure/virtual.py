"""Runs in virtual time, without server, client or network, and several of them on several cores."""

import asyncio
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from benchctl import __version__
from benchctl.analysis.metrics.latency import latency_metrics, quotient
from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import INTERRUPTED_CODE, RunError, UsageError
from benchctl.load.exchange import LoadSummary
from benchctl.measure.directory import undone_runs
from benchctl.measure.experiment import MeasureRun
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.run import RunContext, loads_of, noise_seed, widest
from benchctl.measure.warmup import prime_bursts, warmup_bursts
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import Integers
from benchctl.records.directory import RequestSets, ResultDirectory, RunDirectory
from benchctl.records.files import JsonlWriter
from benchctl.records.record import PlannedRun, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import StepRecord
from benchctl.sim.core import SimLoad
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import CountedRequests
from benchctl.sim.simulation import Simulation, simulate
from benchctl.sim.virtual import VirtualServer, config_of, core_request
from benchctl.units import s_from_ns
from benchctl.workload.opening import Burst, opening_of
from benchctl.workload.prepare import RecordedLoad

Kept: TypeAlias = Literal["requests", "all"]
"""The records that a run keeps: those of its requests, or those of its steps as well."""


def simulate_run(
    context: RunContext, planned: PlannedRun, directory: RunDirectory, *, keep: Kept = "all"
) -> RunRecord:
    """Simulate one run of an experiment on the engine ``sim``; returns its final record, which is also on disk.

    Raises UsageError where the simulator cannot serve these settings, and KeyboardInterrupt on SIGINT or SIGTERM;
    in both cases the record says so.
    """
    profile, keeps_steps, seed = context.profile, keep == "all", noise_seed(context.profile, planned)
    run = MeasuredRun(profile, planned, directory, num_loads=context.num_loads)
    with run.begun(can_resume=False):
        run.update(time_scale=1.0)  # requests and steps are on one clock
        if run.perform(_simulate_server(run, context, seed, keeps_steps=keeps_steps)) is not None:
            return run.record
        return run.judge(context.requests, has_client=False)


async def _simulate_server(run: MeasuredRun, context: RunContext, seed: int, *, keeps_steps: bool) -> None:
    """The life of the server of one run."""
    steps: list[JsonlWriter] = []

    def keep_step(step: StepRecord) -> None:
        steps[-1].write(step)

    server = VirtualServer(run.settings, noise_seed=seed, on_step=keep_step if keeps_steps else ignore)
    run.note_configuration({"version": __version__, **server.config.server_info()})

    @contextmanager
    def writing() -> Iterator[JsonlWriter]:
        with ExitStack() as files:
            if keeps_steps:
                steps.append(files.enter_context(run.directory.append("steps")))
            yield files.enter_context(run.directory.append("requests"))

    async def warm_up(bursts: Iterable[Burst], writer: JsonlWriter) -> None:
        warmup = LoadSummary()
        for burst in bursts:
            await _record(server.send(burst), writer, warmup)
        run.judge_warmup(warmup)

    loads = loads_of(context, run.record)
    warmed_for, requests = widest(loads)
    with writing() as writer:
        if bursts := warmup_bursts(requests, warmed_for, run.settings):
            run.time(warmup_start_ns=server.now_ns)
            await warm_up(bursts, writer)
    num_ended = 0
    for number, (profile, _, requests) in enumerate(loads, start=1):
        with run.each_load(number, profile):
            with writing() as writer:
                server.settings = run.settings_of_load()
                await warm_up(prime_bursts(requests, profile.workload.prefix), writer)
                opening, num_warmups = opening_of(requests, profile)
                run.load.opening = LoadSummary() if num_warmups else None
                sent = server.send((*opening, *requests), profile.workload.arrival, num_warmups)
                await _record(sent, writer, run.load, context.listener.on_request_end, num_ended - len(opening))
            num_ended += len(requests)
            if run.record.loads:
                run.judge_load(requests, has_client=False)
    run.time(stop_ns=server.now_ns)


async def _record(
    records: Iterable[RequestRecord],
    writer: JsonlWriter,
    counts: LoadSummary,
    on_progress: Callable[[int], None] = ignore,
    num_before: int = 0,
) -> None:
    for number, record in enumerate(records, start=num_before + 1):
        writer.write(record)
        counts.count(record)
        on_progress(max(number, 0))
        await asyncio.sleep(0)  # where an interrupt ends the run


@contextmanager
def simulated_runs(
    results: ResultDirectory, profile: Profile, requests: RequestSets, *, jobs: int | None, keep: Kept
) -> Iterator[MeasureRun]:
    """Yields what simulates one run after the other, with up to ``jobs`` of them at the same time.

    Without ``jobs``, as many as there are cores if that pays. Runs in progress when this ends early are recorded as
    interrupted.
    """
    pending, context = undone_runs(results), RunContext(profile=profile, requests=requests)
    num_tokens = sum(load.size.num_tokens for run in pending for load in loads_of(context, run))
    # Output tokens that take about as long to simulate as to start a process: 5 and 1.3 s on one core
    jobs = min(jobs or (os.cpu_count() if num_tokens >= 1_000_000 else 1) or 1, len(pending))
    if jobs <= 1:
        yield partial(simulate_run, keep=keep)
        return
    is_fixed = profile.stopping is None and profile.loads_per_server != "auto"
    futures: dict[str, Future[RunRecord]] = {}
    """Of runs begun ahead of their turn: all, or those of a block where the blocks before decide on later ones."""

    def measure(current: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        if planned.run_id not in futures:
            for run in pending:
                if is_fixed or run.block == planned.block:
                    path = directory.path.with_name(run.run_id)
                    futures[run.run_id] = executor.submit(
                        _simulate, run, RunDirectory(path, directory.within), current.num_loads
                    )
        return futures.pop(planned.run_id).result()

    with simulating_processes(jobs, partial(_begin, context, keep)) as executor:
        yield measure


@contextmanager
def simulating_processes(
    jobs: int, initializer: Callable[[], object] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of fresh processes, which leave interrupts to this one and end with it."""
    executor = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts, initargs=(initializer,)
    )
    try:
        yield executor
    except BrokenProcessPool as error:
        raise RunError(
            "a process that simulates was ended from outside; the system does this when memory runs out (see "
            "dmesg): lower --jobs",
            cause="worker-died",
        ) from error
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _ignore_interrupts(then: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends its children
    if then is not None:
        then()


_shared: list[tuple[RunContext, Kept]] = []
"""Of a process that simulates: the values that all its runs share."""


def _begin(context: RunContext, keep: Kept) -> None:
    _shared.append((context, keep))


def _simulate(planned: PlannedRun, directory: RunDirectory, num_loads: int) -> RunRecord:
    context, keep = _shared[0]
    try:
        return simulate_run(replace(context, num_loads=num_loads), planned, directory, keep=keep)
    except KeyboardInterrupt:  # recorded; the runs behind it are not to begin
        os._exit(INTERRUPTED_CODE)


def simulate_recorded(profile: Profile, planned: PlannedRun, load: RecordedLoad) -> dict[str, float | None]:
    """The metrics of one run. Raises UsageError where it needs texts, or where a request fits no server."""
    if profile.load.begin == "running" or profile.load.discard:
        raise UsageError(
            "load: a trace of which only summaries are kept is simulated from a drained server and whole; remove "
            "begin and discard, or keep the requests"
        )
    settings = variant_settings(profile, planned.variant, planned.cell)
    config = config_of(settings, noise_seed=noise_seed(profile, planned))
    if config.enable_prefix_caching:
        raise UsageError(
            "server.enable_prefix_caching: a trace of which only summaries are kept has no texts that a cache "
            "could find; switch it off, or keep the requests"
        )
    example = PreparedRequest(
        request_id="example", index=0, arrival_ns=0, prompt="a", prompt_tokens=1, max_tokens=1, seed=0, source=""
    )
    requests = CountedRequests(
        load.prompt_tokens, load.output_tokens, prefix="", template=core_request(example, settings, config)
    )
    longest = int((np.asarray(load.prompt_tokens) + np.asarray(load.output_tokens)).argmax())
    SimulatedEngine(config).check_servable(requests[longest])
    limit = profile.workload.arrival.max_concurrency
    return _metrics_of(
        simulate(
            config,
            [SimLoad(requests=requests, arrival_ns=load.arrival_ns, max_concurrency=limit)],
            keeps_steps=False,
        ),
        load,
        limit,
    )


def _metrics_of(simulation: Simulation, load: RecordedLoad, limit: int | None) -> dict[str, float | None]:
    ended = simulation.requests
    sent_ns = _sent_ns(np.asarray(load.arrival_ns), np.sort(ended.last_token_ns), limit)[ended.index]
    several = ended.output_tokens > 1
    tpot_ns = (ended.last_token_ns - ended.first_token_ns)[several] / (ended.output_tokens[several] - 1)
    latencies: dict[str, Sequence[float]] = {
        "ttft": array("q", (ended.first_token_ns - sent_ns).tobytes()),
        "tpot": array("d", tpot_ns.tobytes()),
        "itl": (),
        "e2el": array("q", (ended.last_token_ns - sent_ns).tobytes()),
    }
    wall_s = s_from_ns(int(ended.last_token_ns.max() - sent_ns.min()))
    output_tokens = int(ended.output_tokens.sum())
    metrics: dict[str, float | None] = {
        **latency_metrics(latencies, len(ended)),
        "wall_s": wall_s,
        "client_wall_s": wall_s,
        "num_requests": len(load),
        "num_completed": len(ended),
        "num_failed": len(load) - len(ended),
        "prompt_tokens": int(ended.prompt_tokens.sum()),
        "output_tokens": output_tokens,
        "output_throughput": quotient(output_tokens, wall_s),
        "request_throughput": quotient(len(ended), wall_s),
        "num_steps": simulation.log.num_cleared + len(simulation.log),
        "preemptions": simulation.num_preemptions,
    }
    return {name: metrics.get(name) for name in METRICS}


def _sent_ns(planned_ns: Integers, ends_ns: Integers, limit: int | None) -> Integers:
    """Time of each send: as planned, or with a limit when an earlier request has ended and freed its slot."""
    if limit is None or limit >= len(planned_ns):
        return planned_ns
    return np.maximum(planned_ns, np.concatenate((planned_ns[:limit], ends_ns[: len(planned_ns) - limit])))
