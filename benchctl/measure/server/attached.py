"""A server that someone else started: watched, but neither started nor ended by us.

Its process, its log and its start are unknown. A run on it therefore has the warning that the server was not fresh.
"""

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Self

import httpx
import psutil

from benchctl.errors import ServerDiedError, ServerStartError
from benchctl.load.control import underlying
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.http import fetch

_POLL_S: Final = 0.5
_WATCH_S: Final = 0.5
_HEALTH_TIMEOUT_S: Final = 5.0
_MISSED_CHECKS: Final = 3
"""Checks in a row without an answer until the server counts as gone: a busy one may miss one. If nothing listens at
the address, this takes a second and a half."""

_REFUSED: Final = frozenset({"ConnectionRefusedError", "ConnectError"})
_NO_LISTENER_S: Final = 5.0
"""Time without a listener at the address until the address counts as wrong."""

_REMEDY: Final = (
    "ask its owner; if it is a vLLM on a CPU, which dies of seeded requests computed in parts, set "
    "engine.options.send_seed to false"
)
NOT_FRESH: Final = ResultWarning(
    code="server-not-fresh",
    message="the server was started by someone else: it is not fresh, and its command line, log, processes and "
    "GPU are not recorded; what earlier requests left in its caches is still there",
)


class AttachedServer:
    """A server of someone else, with the methods of ``ServerProcess``."""

    pid: Final = None
    launch_ns: Final = None
    stop_ns: Final = None
    warnings: Final = (NOT_FRESH,)
    redactions: Final[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, url: str, health_path: str, ready_s: float) -> None:
        self._url = url
        self._health_path = health_path
        self._ready_s = ready_s
        self._client: httpx.AsyncClient | None = None
        self._is_gone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave it running."""

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server answers; returns that time.

        Raises ServerStartError when the time is up, and sooner if nothing listens at its address, or no longer.
        """
        self._client = client
        start = last_s = time.monotonic()
        has_answered = False
        while (answer := await self._answer()) != "200":
            has_answered = has_answered or answer.isdecimal()
            is_there = has_answered and answer not in _REFUSED
            last_s = time.monotonic() if is_there else last_s
            limit_s = self._ready_s if is_there else min(self._ready_s, last_s - start + _NO_LISTENER_S)
            if time.monotonic() >= start + limit_s:
                status = f"answers {answer}, not 200" if answer.isdecimal() else f"does not answer ({answer})"
                message = f"{self._url}{self._health_path} {status}, after {limit_s:g} s"
                remedy = "start the server, or correct server.url (engine.options.url, or that of the variant)"
                raise ServerStartError(f"{message}; {remedy}", cause="not-ready")
            await asyncio.sleep(_POLL_S)
        return time.monotonic_ns()

    async def died(self) -> None:
        """Return when the server has not answered several times in a row."""
        missed = 0
        while missed < _MISSED_CHECKS:
            await asyncio.sleep(_WATCH_S)
            missed = 0 if await self._answer() == "200" else missed + 1
        self._is_gone = True

    def check_alive(self) -> None:
        if self._is_gone:
            raise ServerDiedError(f"{self._url} stopped answering in mid-run; {_REMEDY}", cause="server-died")

    def log_tail(self) -> str:
        return ""

    def processes(self) -> list[psutil.Process]:
        """None that we know of."""
        return []

    async def _answer(self) -> str:
        """The status of its health path, or the name of the error."""
        if self._client is None:
            raise RuntimeError("the server is watched before it is ready")
        try:
            response = await fetch(self._client, "GET", self._health_path, limit_s=_HEALTH_TIMEOUT_S)
        except (httpx.HTTPError, OSError) as error:
            return type(underlying(error)).__name__
        return str(response.status_code)
