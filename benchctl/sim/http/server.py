"""The HTTP shell: routes, errors and the life of the server. It decides nothing about time."""

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
from prometheus_client import CollectorRegistry, generate_latest

from benchctl import __version__
from benchctl.errors import UsageError
from benchctl.records.files import JsonlWriter
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase, SimLoad
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.http.api import (
    ChatBody,
    CompletionBody,
    Reply,
    ScheduleBody,
    TokenizeBody,
    count_prompt,
    request_from,
)
from benchctl.sim.http.driver import Driver
from benchctl.units import NS_PER_S

log = logging.getLogger("benchctl.sim")

_ERROR_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

B = TypeVar("B")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One server: its core, its driver, its routes."""

    def __init__(self, config: SimConfig, step_log: JsonlWriter | None) -> None:
        self._config: Final = config
        self._driver: Final = Driver(Core(SimulatedEngine(config)), step_log)
        self._metrics: Final = CollectorRegistry()
        self._metrics.register(self._driver)
        self._ready_at_s = 0.0
        self._num_requests = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._prometheus),
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

    async def _prometheus(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics).decode()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__, **self._config.server_info()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Count a prompt, as vLLM's path of this name does; it names no token ids, which words here do not have."""
        count = count_prompt(await _decoded(request, TokenizeBody))
        return web.json_response({"count": count, "max_model_len": self._config.max_model_len})

    async def _schedule(self, request: web.Request) -> web.Response:
        body = await _decoded(request, ScheduleBody)
        names = [entry.request_id for entry in body.requests]
        if len(set(names)) < len(names):
            raise UsageError("requests: a request_id occurs twice; announce each request once")
        load = SimLoad(
            announced=names,
            arrival_ns=[entry.arrival_ns for entry in body.requests],
            max_concurrency=body.max_concurrency,
            is_warmup=body.is_warmup,
        )
        self._driver.announce(Phase(load))
        return web.json_response({"announced": len(names)})

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
        reply = Reply(body, request, self._config, self._driver.core.engine.now_ns // NS_PER_S)
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
