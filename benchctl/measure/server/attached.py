"""A server that someone else started: watched, never started and never ended.

What only its owner can give is absent by name: its process, its log, its launch. A run on it therefore says that
it was not measured on a fresh server.
"""

import asyncio
import time
from types import TracebackType
from typing import Final, Self

import httpx

from benchctl.errors import ServerDiedError, ServerStartError
from benchctl.load.transport.failures import underlying
from benchctl.records.record import ResultWarning

_POLL_S: Final = 0.5
_WATCH_S: Final = 0.5
_HEALTH_TIMEOUT_S: Final = 5.0
_MISSED_LOOKS: Final = 3
"""Looks in a row without an answer until the server counts as gone: a busy one may miss one. With nobody at the
address at all this takes a second and a half."""

_NOBODY_S: Final = 5.0
"""Without anybody at the address, until it counts as wrong: its owner has started the server before us."""

NOT_FRESH: Final = ResultWarning(
    code="server-not-fresh",
    message="the server was started by someone else: it is not fresh, and its command line, log, processes and "
    "GPU are not recorded; what earlier requests left in its caches is still there",
)


class AttachedServer:
    """In place of a process of ours: the same questions, answered by looking from outside."""

    pid: Final = None
    launch_ns: Final = None
    stop_ns: Final = None
    warnings: Final = (NOT_FRESH,)

    def __init__(self, url: str, health_path: str, ready_s: float) -> None:
        self._url = url
        self._health_path = health_path
        self._ready_s = ready_s
        self._client: httpx.AsyncClient | None = None
        self._is_gone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It is its owner's to end."""

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server answers; returns when it did.

        Raises ServerStartError when the time is up, and sooner where nobody is at its address.
        """
        self._client = client
        start = time.monotonic()
        is_found = False
        while (answer := await self._answer()) != "200":
            is_found = is_found or answer.isdecimal()
            limit_s = self._ready_s if is_found else min(self._ready_s, _NOBODY_S)
            if time.monotonic() >= start + limit_s:
                what = f"answers {answer}, not 200" if answer.isdecimal() else f"does not answer ({answer})"
                message = f"{self._url}{self._health_path} {what}, after {limit_s:g} s"
                remedy = "start the server, or correct server.url (engine.options.url, or that of the variant)"
                raise ServerStartError(f"{message}; {remedy}", cause="not-ready")
            await asyncio.sleep(_POLL_S)
        return time.monotonic_ns()

    async def died(self) -> None:
        """Returns when the server has not answered several times in a row."""
        missed = 0
        while missed < _MISSED_LOOKS:
            await asyncio.sleep(_WATCH_S)
            missed = 0 if await self._answer() == "200" else missed + 1
        self._is_gone = True

    def check_alive(self) -> None:
        """Raises ServerDiedError when the server has gone."""
        if self._is_gone:
            raise ServerDiedError(f"{self._url} stopped answering in mid-run; ask its owner", cause="server-died")

    def log_tail(self) -> str:
        """Nothing: the log is its owner's."""
        return ""

    async def _answer(self) -> str:
        """The status of its health path, or the name of what went wrong instead."""
        if self._client is None:
            raise RuntimeError("the server is watched before it was awaited")
        try:
            response = await self._client.get(self._health_path, timeout=_HEALTH_TIMEOUT_S)
        except (httpx.HTTPError, OSError) as error:
            return type(underlying(error)).__name__
        return str(response.status_code)
