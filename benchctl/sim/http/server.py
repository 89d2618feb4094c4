"""The HTTP shell: wall time for the core, routes, errors and the life of the server."""

import asyncio
import errno
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from benchctl import __version__
from benchctl.errors import UsageError
from benchctl.records.files import JsonlWriter
from benchctl.sim.arrivals import AnnouncedPhase, AnnouncedRequest
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core
from benchctl.sim.engine import StepOutput
from benchctl.sim.http.api import (
    ChatBody,
    CompletionBody,
    Reply,
    ScheduleBody,
    TokenizeBody,
    count_prompt,
    request_from,
)
from benchctl.sim.http.counters import Counters, SimCollector, exposition
from benchctl.sim.requests import Request
from benchctl.sim.start import engine_for_config
from benchctl.units import NS_PER_S

log = logging.getLogger("benchctl.sim")

_SLICE_S: Final = 0.002
"""Time that steps behind the wall clock may run before the network gets its turn."""
_TIMER_S: Final = 0.001
"""Resolution of the event loop's timer; steps shorter than twice that are released several at a time."""


class Driver:
    """Runs the core for ever, logs its steps and hands out their tokens.

    Wall and virtual time are tied together when the first request of a phase or of a busy period comes in; from
    then on a step that ends at virtual v is released at anchor + (v - anchor_v) / time_scale, however long earlier
    steps took.
    """

    def __init__(self, core: Core, step_log: JsonlWriter | None) -> None:
        self.core: Final = core
        self.counters: Final = Counters()
        self.lag_s = 0.0
        """Largest delay of a release in this phase or busy period."""
        self.phase_wall_s = 0.0
        """Planned wall time of this phase or busy period until now."""
        self._step_log: Final = step_log
        self._config: Final = core.engine.config
        self._replies: dict[str, Reply] = {}
        self._wake: Final = asyncio.Event()
        self._anchor: tuple[float, int] | None = None
        self._anchored_phase: AnnouncedPhase | None = None
        self._busy_since_s: float | None = None
        self._last_turn_s = 0.0

    def is_open(self, request_id: str) -> bool:
        return request_id in self._replies

    def submit(self, request: Request, reply: Reply) -> None:
        self._replies[request.request_id] = reply
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        self.core.submit(request)
        self._wake.set()

    def refuse(self, request_id: str) -> None:
        self.core.refuse(request_id)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """Forget a request whose client has disconnected, or has all of it."""
        if (reply := self._replies.pop(request_id, None)) is not None and not reply.is_done:
            self.core.abort(request_id)
            self.counters.num_aborted += 1
            self._wake.set()

    def announce(self, phase: AnnouncedPhase) -> None:
        self.core.announce(phase)
        self._wake.set()

    async def run(self) -> None:
        while True:
            output = self.core.next_step()
            if output is None:
                await self._wait_for_arrival()
                continue
            if self._step_log is not None:
                self._step_log.write(output.record)
            await self._wait_for_release(output)
            self._deliver(output)

    async def _wait_for_arrival(self) -> None:
        missing, patience_s = self.core.missing(), self._config.schedule_patience_s
        if missing is None and (self.core.phase is None or self.core.phase.is_over):
            self._anchor = self._busy_since_s = None
        try:
            async with asyncio.timeout(patience_s if missing is not None else None):
                await self._wake.wait()
        except TimeoutError:
            log.warning(
                "announced request %s did not come within %g s: the schedule is given up, arrivals are no longer "
                "exact",
                missing,
                patience_s,
            )
            self.core.abandon_phase()
            self._anchor = self._busy_since_s = None
        self._wake.clear()

    async def _wait_for_release(self, output: StepOutput) -> None:
        if self._anchor is None or self.core.phase is not self._anchored_phase:
            since_s = time.monotonic() if self._busy_since_s is None else self._busy_since_s
            self._anchor = (since_s, output.record.start_ns)
            self._anchored_phase = self.core.phase
            self.lag_s = 0.0
        wall_s, virtual_ns = self._anchor
        elapsed_s = (self.core.engine.now_ns - virtual_ns) / NS_PER_S
        self.phase_wall_s = elapsed_s / self._config.time_scale
        due_s = wall_s + self.phase_wall_s
        is_short = output.record.dur_ns / NS_PER_S / self._config.time_scale < 2 * _TIMER_S
        while (now_s := time.monotonic()) < due_s:
            await _sleep(due_s - now_s, is_coarse=is_short)
            self._last_turn_s = time.monotonic()
        self.lag_s = max(self.lag_s, now_s - due_s)
        if now_s - self._last_turn_s > _SLICE_S:
            await asyncio.sleep(0)
            self._last_turn_s = time.monotonic()

    def _deliver(self, output: StepOutput) -> None:
        self.counters.count(output)
        reports_cached = self._config.has_cache
        touched: dict[str, Reply] = {}
        for seq in output.emitted:
            reply = self._replies.get(seq.request.request_id)
            if reply is not None:
                reply.add(seq, reports_cached=reports_cached)
                touched[seq.request.request_id] = reply
        for seq in output.finished:
            reply = self._replies.get(seq.request.request_id)
            # A closing step ends a sequence and gives it no token.
            if reply is not None and not reply.has_ended(seq):
                reply.add(seq, reports_cached=reports_cached)
                touched[seq.request.request_id] = reply
        for reply in touched.values():
            reply.flush()


async def _sleep(duration_s: float, *, is_coarse: bool) -> None:
    """Sleep about ``duration_s``. The loop's timer counts whole milliseconds; the last two are left to a thread,
    which the kernel wakes more exactly.
    """
    if is_coarse:
        await asyncio.sleep(max(duration_s, _TIMER_S))
    elif duration_s > 2 * _TIMER_S:
        await asyncio.sleep(duration_s - 2 * _TIMER_S)
    else:
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, duration_s)


_ERROR_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
_MAX_BODY_BYTES: Final = 64 << 20

B = TypeVar("B")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One server: its core, its driver, its routes."""

    def __init__(self, config: SimConfig, step_log: JsonlWriter | None) -> None:
        self._config: Final = config
        self._driver: Final = Driver(Core(engine_for_config(config)), step_log)
        self._collector: Final = SimCollector(self._driver.core.engine, self._driver.counters)
        self._ready_at_s = 0.0
        self._num_requests = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/server_info", self._server_info),
                web.post("/tokenize", self._tokenize),
                web.post("/sim/schedule", self._schedule),
                web.post("/v1/completions", partial(self._generate, kind=CompletionBody)),
                web.post("/v1/chat/completions", partial(self._generate, kind=ChatBody)),
            ]
        )
        return app

    async def serve(self, host: str, port: int) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code."""
        stop = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
        runner = web.AppRunner(
            self.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.05
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            reason = "address already in use" if error.errno == errno.EADDRINUSE else str(error)
            log.error("cannot listen on %s port %d: %s", host, port, reason)  # noqa: TRY400 - one clear line
            return 1
        self._ready_at_s = time.monotonic() + self._config.start_delay_s
        log.info("serving %s on http://%s:%d", self._config.model, host, port)
        driving = asyncio.create_task(self._driver.run())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        driving.cancel()
        with suppress(asyncio.CancelledError):
            await driving
        await runner.cleanup()
        return 0

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests until the server is ready; turn errors of a request into OpenAI's error format."""
        if time.monotonic() < self._ready_at_s and request.path != "/metrics":
            return _error(503, "the server is starting; ask again")
        try:
            return await handler(request)
        except UsageError as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "benchctl",
            "max_model_len": self._config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self._collector.lag_s = self._driver.lag_s
        self._collector.phase_wall_s = self._driver.phase_wall_s
        self._collector.num_abandoned_phases = self._driver.core.num_abandoned_phases
        text = exposition(self._collector).decode()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__, **self._config.server_info()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Count a prompt, as vLLM's path of this name does; it names no token ids, which words here do not have."""
        count = count_prompt(await _decoded(request, TokenizeBody))
        return web.json_response({"count": count, "max_model_len": self._config.max_model_len})

    async def _schedule(self, request: web.Request) -> web.Response:
        body = await _decoded(request, ScheduleBody)
        arrivals = [AnnouncedRequest(entry.request_id, entry.arrival_ns) for entry in body.requests]
        if len({arrival.request_id for arrival in arrivals}) < len(arrivals):
            raise UsageError("requests: a request_id occurs twice; announce each request once")
        self._driver.announce(
            AnnouncedPhase(arrivals, max_concurrency=body.max_concurrency, is_warmup=body.is_warmup)
        )
        return web.json_response({"announced": len(arrivals)})

    async def _generate(self, http: web.Request, kind: type[CompletionBody] | type[ChatBody]) -> web.StreamResponse:
        request_id = self._request_id(http)
        try:
            body = await _decoded(http, kind)
            if body.model not in (None, self._config.model):
                self._driver.refuse(request_id)
                return _error(
                    404, f"the model {body.model!r} does not exist; this server has {self._config.model!r}"
                )
            request = request_from(body, request_id, self._config)
            self._driver.core.engine.check_servable(request)
        except UsageError:
            self._driver.refuse(request_id)
            raise
        reply = Reply(
            body,
            request,
            model=self._config.model,
            created=self._driver.core.engine.now_ns // NS_PER_S,
            tokens_per_chunk=self._config.tokens_per_chunk,
        )
        self._driver.submit(request, reply)
        try:
            return await _stream(http, reply) if reply.is_streaming else await _whole(reply)
        finally:
            self._driver.abort(request_id)

    def _request_id(self, http: web.Request) -> str:
        """The client's own identity of a request if it sends one that is free, else a new one."""
        self._num_requests += 1
        name = http.headers.get("X-Request-Id")
        return name if name and not self._driver.is_open(name) else f"{name or 'request'}-{self._num_requests}"


async def _stream(http: web.Request, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Request-Id": reply.request.request_id,
        }
    )
    await response.prepare(http)
    with suppress(ConnectionResetError):
        is_last = False
        while not is_last:
            data = await reply.take()
            # Asked before the write, during which more may gather.
            is_last = reply.is_done
            if data:
                await response.write(data)
    return response


async def _whole(reply: Reply) -> web.Response:
    document = await reply.document()
    return web.Response(
        body=msgspec.json.encode(document),
        content_type="application/json",
        headers={"X-Request-Id": reply.request.request_id},
    )


async def _decoded(http: web.Request, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{http.path}: {error}") from error


def _error(status: int, message: str) -> web.Response:
    kind = _ERROR_TYPES.get(status, "HTTPError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def open_step_log(path: Path) -> JsonlWriter:
    """A fresh log: one server life, one log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return JsonlWriter(path)
