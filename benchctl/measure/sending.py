"""A server that is up, and the requests that are sent to it while it is watched: for a run, or without one.

    directory ▸ effective configuration ▸ warm-up ▸ load ▸ verdict

A load without an experiment around it leaves a result directory like any other, with a single run. It starts
nothing, samples no device and keeps nothing in memory while it sends; then it is read back and judged like any run.
"""

import asyncio
import json
import math
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from benchctl.analysis.metrics.latency import is_completed, measured, total
from benchctl.analysis.validity.answers import check_client_tokens
from benchctl.engines.attach import AttachEngine, AttachOptions
from benchctl.engines.engine import LaunchSite
from benchctl.errors import OWN_LIMITS, LoadError, RequestRefusedError
from benchctl.load.client import StreamClient
from benchctl.load.control import underlying
from benchctl.load.demand import LoadSize, size_of
from benchctl.load.exchange import LoadSummary
from benchctl.load.process import steady_interpreter
from benchctl.load.schedule import Load
from benchctl.load.workers import AnyLoad, load_for, prioritized
from benchctl.measure.directory import Origin, create_results, set_state
from benchctl.measure.live import LiveNumbers
from benchctl.measure.machine import new_manifest, this_node
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.server.health import raise_when_stalled
from benchctl.measure.server.server import AnyServer
from benchctl.measure.warmup import prime_bursts, warmup_requests
from benchctl.measure.waves import naming_first_uses, send_waves
from benchctl.profile.arrival import Arrival, launch_offsets_ns
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.sections import PriorityOption
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import record_run
from benchctl.records.loaded import LoadedRun, load_run
from benchctl.records.record import Call, PreparedRequest, RequestRecord, RunRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.records.writers import sole_writer
from benchctl.untrusted.http import fetch_json, recordable
from benchctl.workload.opening import Burst, num_discarded, opening_of
from benchctl.workload.prepare import PreparedSet
from benchctl.workload.turns import with_answers_in

if TYPE_CHECKING:
    from benchctl.analysis.metrics.run import LoadFigures

_BAD_ANSWERS: Final[tuple[type[Exception], ...]] = (
    httpx.HTTPError,
    msgspec.MsgspecError,
    UnicodeDecodeError,
    json.JSONDecodeError,
    RecursionError,
)
"""Not all errors of decoders: around more than a decoder, ValueError would hide mistakes of ours."""
_CRASH_WAIT_S: Final = 2.0
"""How long a server that broke off an answer may take to end: its end explains more than the broken answer."""
_BROKEN_OFF: Final = frozenset({"early-close", "reset", "server-error", "finish-error", "finish-abort"})
_SOME: Final = 4096
"""Requests of a load that is not kept in memory by which its warm-up is made."""
_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class ServerUnderTest:
    """A server that is up, as the requests of one run are sent to it.

    ``server`` is watched while requests are open; None for a server that is only sent requests. ``stall_s`` is the
    time without anything arriving for an open request until a watched server counts as hung. ``on_live`` is called
    about once a second with numbers of the load so far, in order of importance; None makes none.
    """

    def __init__(
        self,
        run: MeasuredRun,
        client: StreamClient,
        server: AnyServer | None = None,
        *,
        stall_s: float = math.inf,
        on_progress: Callable[[int], None] = ignore,
        on_live: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._run, self._client, self._server = run, client, server
        self._stall_s, self._on_progress, self._num_ended = stall_s, on_progress, count(1)
        self._on_live = on_live
        self.settings = run.settings
        """Those by which requests are made."""

    async def record_configuration(
        self, site: LaunchSite, extra: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Record what the server reports of itself beside what it will be sent; returns what it reports."""
        run, control = self._run, self._client.control
        stated = await run.engine.effective_config(control, run.settings, site)
        reported = {name: recordable(value) for name, value in stated.items()}
        run.note_configuration(reported, extra)
        if unknown := await undescribed_fields(control, run.settings.request.extra_body):
            fields = ", ".join(f"request.extra_body.{name}" for name in unknown)
            message = (
                f"the server's description of its requests does not have {fields}: it may ignore them silently"
            )
            run.warn(ResultWarning(code="request-field-unknown", message=message))
        return reported

    async def send_bursts(
        self, bursts: Iterable[Sequence[PreparedRequest]], on_record: Callable[[RequestRecord], None] = ignore
    ) -> LoadSummary:
        """Send requests of the warm-up, each burst when the one before has ended.

        Raises RequestRefusedError when the server refuses all of them for what the profile puts into them.
        """
        with self._run.directory.append("requests") as writer:

            def keep(record: RequestRecord) -> None:
                writer.write(record)
                on_record(record)

            load = Load(self._client, Arrival(kind="burst"), keep)
            for requests in bursts:
                await self._send(load, requests)
        self._check_accepted(load.summary)
        return load.summary

    async def prime(self, requests: Sequence[PreparedRequest]) -> None:
        """Begin a load's own part of the cache, where its prompts may be found, with its planned prefixes."""
        run = self._run
        self.settings = run.settings_of_load()
        if bursts := prime_bursts(requests, run.profile.workload.prefix):
            priming = await self.send_bursts(bursts)
            run.load.primed_ns = priming.first_send_ns
            run.judge_warmup(priming)

    async def send_load(
        self, requests: Iterable[PreparedRequest], size: LoadSize, opening: tuple[Burst, int] = ((), 0)
    ) -> None:
        """Send the load, by the schedule of the profile; every record and sample is on disk as it comes.

        ``opening`` is that of ``opening_of``: requests that are sent first, and how many of all are warm-up.
        Raises RequestRefusedError when the server refuses all of it for what the profile puts into requests.
        """
        run, (sent_before, num_warmups) = self._run, opening
        limits_ms = {} if run.profile.slo is None else run.profile.slo.limits_ms
        live = None if self._on_live is None else LiveNumbers(run.load, limits_ms, run.record.clock_factor)
        with run.directory.append("requests") as writer, run.directory.append("client") as samples:

            def keep(record: RequestRecord) -> None:
                writer.write(record)
                if live is not None:
                    live.take(record)
                if not (record.is_warmup and sent_before):
                    self._on_progress(next(self._num_ended))

            def observe(sample: ClientSample) -> None:
                samples.write(sample)
                if live is not None and self._on_live is not None and (parts := live.parts(sample)):
                    self._on_live(parts)

            # A simulator steps in its own time, which no delay of ours changes.
            priority: PriorityOption = "none" if run.record.is_virtual else run.profile.load.priority
            load = load_for(
                self._client,
                run.profile,
                size,
                keep,
                priority=priority,
                time_scale=run.record.time_scale,
                on_sample=observe,
            )
            load.summary = run.load
            run.load.opening = LoadSummary() if num_warmups else None
            with (
                naming_first_uses(run),
                steady_interpreter(),
                prioritized(load, priority, lambda granted: run.note(client_priority=granted)),
            ):
                everything = chain(sent_before, requests)
                await self._send(load, everything, run.profile.workload.arrival, num_warmups)
        self._check_accepted(load.summary)

    def _check_accepted(self, load: LoadSummary) -> None:
        keys = self._run.keys_in_requests()
        if keys and 0 < load.num_refused == load.num_sent:
            raise RequestRefusedError(
                f"variant {self.settings.variant!r}: the server refuses every request ({load.first_refusal}); "
                f"correct what the profile puts into them: {', '.join(keys)}"
            )

    async def _send(
        self,
        load: AnyLoad,
        requests: Iterable[PreparedRequest],
        arrival: Arrival | None = None,
        num_warmups: int = 0,
    ) -> None:
        """Send ``requests`` through ``load``, whose schedule is ``arrival``; None for a burst of the warm-up.

        The first ``num_warmups`` of a load are warm-up.
        Raises ServerDiedError when a watched server ends meanwhile, and LoadError of cause ``hung`` when it hangs.
        """
        if self._server is None:
            await load.drive(self._calls(requests, None if arrival is None else num_warmups))
            return
        announced = tuple(requests)
        async with control_errors(self._server):
            await self._run.engine.announce(
                self._client.control,
                announced if arrival is None else _as_launched(announced, arrival),
                max_concurrency=None if arrival is None else arrival.max_concurrency,
                is_warmup=arrival is None,
                num_warmups=num_warmups,
            )
        calls = self._calls(announced, None if arrival is None else num_warmups)
        await _drive_watched(load, calls, self._server, self._stall_s)

    def _calls(self, requests: Iterable[PreparedRequest], num_warmups: int | None) -> Iterator[Call]:
        """``requests`` in the engine's dialect, each made when it is needed; None: all of them are warm-up."""
        for number, request in enumerate(requests):
            marked = with_answers_in(request) if request.turn else request
            call = self._run.engine.request_call(marked, self.settings)
            is_warmup = num_warmups is None or number < num_warmups
            yield msgspec.structs.replace(call, is_warmup=True) if is_warmup else call


def _as_launched(requests: Sequence[PreparedRequest], arrival: Arrival) -> Sequence[PreparedRequest]:
    """The requests as they come to the server: later than planned where launches are limited."""
    if arrival.launch_rate_limit is None:
        return requests
    offsets_ns = launch_offsets_ns((request.arrival_ns for request in requests), arrival.launch_rate_limit)
    return [
        msgspec.structs.replace(request, arrival_ns=offset_ns)
        for request, offset_ns in zip(requests, offsets_ns, strict=True)
    ]


async def _drive_watched(load: AnyLoad, calls: Iterable[Call], server: AnyServer, stall_s: float) -> None:
    driving = asyncio.create_task(load.drive(calls))
    death = asyncio.create_task(server.died())
    stall = asyncio.create_task(raise_when_stalled(load.activity, server, stall_s))
    try:
        await asyncio.wait({driving, death, stall}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            await asyncio.wait({death}, timeout=_crash_wait_s(load.summary.failures.keys()))
    finally:
        for task in (driving, death, stall):
            task.cancel()  # no effect on one that has ended
        await asyncio.wait({driving, death, stall})
    errors = [None if watcher.cancelled() else watcher.exception() for watcher in (stall, death)]
    server.check_alive()
    for error in errors:
        if error is not None:
            raise _own_limit(load.summary) or error
    await driving


def _own_limit(load: LoadSummary) -> LoadError | None:
    """The limit of this machine by which requests failed, if any did: a server waits for what never reaches it."""
    limits = sorted(OWN_LIMITS.intersection(load.failures))
    if not limits:
        return None
    num_unsent = sum(load.failures[limit] for limit in limits)
    return LoadError(
        f"{num_unsent} of {load.num_sent} requests never reached the server ({load.first_error})", cause=limits[0]
    )


def _crash_wait_s(error_kinds: AbstractSet[str]) -> float:
    """Seconds to wait for the end of a server whose requests failed with these errors."""
    if error_kinds & {"connect-refused", "connect-timeout", "connect-failed"}:
        # A server that refuses connections was asked to end, and ends when it has drained
        return 8.0
    return _CRASH_WAIT_S if error_kinds & _BROKEN_OFF else 0.0


@asynccontextmanager
async def control_errors(server: AnyServer) -> AsyncIterator[None]:
    """Translate errors between us and the server outside the measured requests into LoadError."""
    try:
        yield
    except _BAD_ANSWERS as error:
        if isinstance(error, httpx.TransportError):
            with suppress(TimeoutError):
                await asyncio.wait_for(server.died(), _CRASH_WAIT_S)
        server.check_alive()
        cause = underlying(error)
        silence = "the time is up" if isinstance(cause, TimeoutError) else "without a reason"
        raise LoadError(
            "the server is up but does not answer as its engine should "
            f"({type(cause).__name__}: {str(cause) or str(error) or silence}); its log says more",
            cause="bad-answer",
            log_tail=server.log_tail(),
        ) from error


async def undescribed_fields(client: httpx.AsyncClient, names: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` that no request of the server has; none where it does not describe its requests.

    vLLM and other servers ignore unknown fields without a word: a misspelt one changes nothing and nobody notices.
    """
    if not names:
        return ()
    try:
        document = await fetch_json(client, "/openapi.json")
    except httpx.HTTPError:
        return ()
    described = {field for path in _PATHS for field in _fields(document, path)}
    return tuple(name for name in names if name not in described) if described else ()


def _fields(document: Any, path: str) -> Collection[str]:
    """The fields of a request to ``path`` in an OpenAPI document, whose schemas may refer to one another."""
    try:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in body:
            body = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        properties = body["properties"]
    except (KeyError, TypeError, AttributeError):
        return ()
    return properties if isinstance(properties, dict) else ()


def create_load_directory(profile: Profile, prepared: PreparedSet, origin: Origin) -> ResultDirectory:
    """Write everything that is known before the load. Raises UsageError where no directory can be created."""
    return create_results(
        profile,
        prepared,
        origin,
        msgspec.structs.replace(new_manifest(profile, prepared, origin.argv), state="running", label=origin.label),
    )


def load_server(
    results: ResultDirectory,
    profile: Profile,
    on_progress: Callable[[int], None],
    on_live: Callable[[Sequence[str]], None] | None = None,
) -> "tuple[RunRecord, LoadFigures]":
    """Send the load that is prepared in ``results`` and judge it: its record, and what its requests come to.

    ``on_progress`` is called with the number of requests that
    have ended, and ``on_live`` as by ``ServerUnderTest``. A load of which nothing completed is a record with state
    ``failed``. Raises KeyboardInterrupt on SIGINT or SIGTERM; the records then say so.
    """
    (planned,) = results.plan().runs
    run = MeasuredRun(profile, planned, results.run(planned.run_id), engine=AttachEngine(), node=this_node())
    with sole_writer(results.path):
        try:
            with run.begun(can_resume=False):
                error = run.perform(_send(run, results, on_progress, on_live))
                loaded = load_run(run.directory)
                if error is None:
                    _judge(run, results, loaded)
        finally:
            with suppress(OSError, MemoryError):  # a full disk has been reported as what it did to the run
                set_state(results, run.record.state)
                record_run(results, run.record.run_id)
    from benchctl.analysis.metrics.run import load_figures  # noqa: PLC0415 - numpy, after the load

    return run.record, load_figures(replace(loaded, record=run.record), profile.workload.arrival, profile.slo)


async def _send(
    run: MeasuredRun,
    results: ResultDirectory,
    on_progress: Callable[[int], None],
    on_live: Callable[[Sequence[str]], None] | None,
) -> None:
    """Ask the server for its configuration, warm it up and send the load.

    Raises LoadError when none of the warm-up's requests completes: the load would fail the same way.
    """
    profile, count = run.profile, run.profile.workload.num_warmups
    async with StreamClient(run.engine.base_url(run.settings, 0), profile.timeouts) as client:
        target = ServerUnderTest(run, client, on_progress=on_progress, on_live=on_live)
        reported = await target.record_configuration(LaunchSite(port=0, directory=run.directory.path))
        target.settings = _with_served_model(run.settings, reported.get("served_model"))
        run.update()  # warm-up and load may take long
        first = tuple(islice(results.prepared_requests(), count))
        if first:
            is_forced = profile.stop == "forced"
            again = [
                msgspec.structs.replace(request, ignore_eos=is_forced) for request in warmup_requests(first, count)
            ]
            run.time(warmup_start_ns=time.monotonic_ns())
            warmup = await target.send_bursts([again])
            if warmup.num_failed == warmup.num_sent:
                raise LoadError(
                    f"the server generates nothing ({warmup.first_error}), so no load was sent; correct the "
                    "address, --model or --dialect, or ask the server's owner",
                    cause="no-first-generation",
                )
            run.judge_warmup(warmup)
        some, size = tuple(islice(results.prepared_requests(), _SOME)), size_of(results.prepared_requests())
        await send_waves(run, some, target.send_bursts)
        opening, _ = opening_of(some, profile)
        num_warmups = len(opening) or num_discarded(size.num_requests, profile)
        await target.send_load(results.prepared_requests(), size, (opening, num_warmups))


def _judge(run: MeasuredRun, results: ResultDirectory, loaded: LoadedRun) -> None:
    """The verdict on a load that went to its end; its requests are read from the file, not kept in memory."""
    completed = [request for request in measured(loaded.requests) if is_completed(request)]
    if cached := total([request.cached_tokens for request in completed]):
        prompt = total([request.prompt_tokens for request in completed])
        message = (
            f"{cached}{'' if prompt is None else f' of {prompt}'} prompt tokens came from the server's prefix "
            "cache: ttft is that of a warm cache; another --seed asks other prompts"
        )
        run.warn(ResultWarning(code="prefix-cache", message=message))
    run.judge_client(loaded)
    if (check := check_client_tokens(completed)).ok is False:
        run.suspect("check-failed", f"usage and what arrived count different tokens: {check.detail}")
    run.judge_answers(results.prepared_requests(), loaded)
    run.judge_failures()
    run.conclude()


def _with_served_model(settings: VariantSettings, served_model: object) -> VariantSettings:
    """Name the model that the server offers first, where the command line names none."""
    options = settings.server
    if isinstance(options, AttachOptions) and options.served_model is None and isinstance(served_model, str):
        return settings.model_copy(update={"server": options.model_copy(update={"served_model": served_model})})
    return settings
