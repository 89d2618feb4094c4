"""The HTTP shell: routes, errors and the life of the server. It decides nothing about time."""

import asyncio
import errno
import logging
import signal
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

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
from benchctl.sim.http.connection import MOST_BYTES, Answer, Connection, HttpRequest, HttpResponse
from benchctl.sim.http.driver import Driver
from benchctl.units import NS_PER_S

log = logging.getLogger("benchctl.sim")

_ERROR_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

B = TypeVar("B")


class Server:
    """One server: its core, its driver, its routes."""

    def __init__(self, config: SimConfig, step_log: JsonlWriter | None) -> None:
        self._config: Final = config
        self._driver: Final = Driver(Core(SimulatedEngine(config)), step_log)
        self._routes: Final[Mapping[str, tuple[str, Answer]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/metrics": ("GET", self._metrics),
            "/server_info": ("GET", self._server_info),
            "/tokenize": ("POST", self._tokenize),
            "/sim/schedule": ("POST", self._schedule),
            "/v1/completions": ("POST", partial(self._generate, kind=CompletionBody)),
            "/v1/chat/completions": ("POST", partial(self._generate, kind=ChatBody)),
        }
        self._ready_at_s = 0.0
        self._num_requests = 0

    async def serve(self, host: str, port: int) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.set)
        try:
            listening = await loop.create_server(partial(Connection, self._answer), host, port, backlog=128)
        except OSError as error:
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
        listening.close()
        return 0

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request, refused until the server is ready; errors are in OpenAI's format."""
        if time.monotonic() < self._ready_at_s and request.path != "/metrics":
            return _error(503, "the server is starting; ask again")
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            return _error(404, f"{request.method} {request.path}: Not Found")
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            return _error(405, f"{request.method} {request.path}: Method Not Allowed")
        if len(request.body) > MOST_BYTES:
            return _error(413, f"{request.path}: the body is longer than {MOST_BYTES} bytes")
        try:
            return await handler(request)
        except UsageError as error:
            return _error(400, str(error))

    async def _health(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse()

    async def _models(self, _: HttpRequest) -> HttpResponse:
        model = {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "benchctl",
            "max_model_len": self._config.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _metrics(self, _: HttpRequest) -> HttpResponse:
        page = "".join(f"{line}\n" for line in self._driver.metrics_page())
        return HttpResponse(body=page.encode(), content_type="text/plain; charset=utf-8")

    async def _server_info(self, _: HttpRequest) -> HttpResponse:
        return _json({"version": __version__, **self._config.server_info()})

    async def _tokenize(self, request: HttpRequest) -> HttpResponse:
        """Count a prompt, as vLLM's path of this name does; it names no token ids, which words here do not have."""
        count = count_prompt(_decoded(request, TokenizeBody))
        return _json({"count": count, "max_model_len": self._config.max_model_len})

    async def _schedule(self, request: HttpRequest) -> HttpResponse:
        body = _decoded(request, ScheduleBody)
        names = [entry.request_id for entry in body.requests]
        if len(set(names)) < len(names):
            raise UsageError("requests: a request_id occurs twice; announce each request once")
        load = SimLoad(
            announced=names,
            arrival_ns=[entry.arrival_ns for entry in body.requests],
            max_concurrency=body.max_concurrency,
            is_warmup=body.is_warmup,
            num_warmups=body.num_warmups,
            thinks_ns={
                i: entry.think_ns for i, entry in enumerate(body.requests) if i and entry.think_ns is not None
            },
        )
        self._driver.announce(Phase(load))
        return _json({"announced": len(names)})

    async def _generate(self, http: HttpRequest, kind: type[CompletionBody] | type[ChatBody]) -> HttpResponse:
        request_id = self._request_id(http)
        try:
            body = _decoded(http, kind)
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
        if reply.is_streaming:
            headers = {"Cache-Control": "no-cache", "X-Request-Id": request_id}
            return HttpResponse(
                content_type="text/event-stream; charset=utf-8", headers=headers, pieces=self._events(reply)
            )
        try:
            return _json(await reply.document(), headers={"X-Request-Id": request_id})
        finally:
            self._driver.abort(request_id)

    async def _events(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        try:
            is_last = False
            while not is_last:
                data = await reply.take()
                # Asked before the write, during which more may gather.
                is_last = reply.is_done
                if data:
                    yield data
        finally:
            self._driver.abort(reply.request.request_id)

    def _request_id(self, http: HttpRequest) -> str:
        """The client's own identity of a request if it sends one that is free, else a new one."""
        self._num_requests += 1
        name = http.headers.get("x-request-id")
        return name if name and not self._driver.is_open(name) else f"{name or 'request'}-{self._num_requests}"


def _decoded(request: HttpRequest, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{request.path}: {error}") from error


def _json(document: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(status=status, headers=headers or {}, body=msgspec.json.encode(document))


def _error(status: int, message: str) -> HttpResponse:
    kind = _ERROR_TYPES.get(status, "HTTPError")
    return _json({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def open_step_log(path: Path) -> JsonlWriter:
    """A fresh log: one server life, one log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return JsonlWriter(path)
