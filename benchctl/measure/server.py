"""The server of one run: started, awaited, watched and ended, whatever happens in between.

Ready means three things at once: the process lives, its health path answers 200, and the socket that answers
belongs to the process we started. Without the last one, an orphan of an earlier run that still holds the port
would be measured in place of the new server.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

import aiohttp
import httpx
import psutil

from benchctl.engines.engine import Diagnosis
from benchctl.errors import ServerDiedError, ServerStartError
from benchctl.measure import process as processes
from benchctl.measure.port import HOST, belongs_to, wait_free
from benchctl.profile.model import Timeouts
from benchctl.records.run import ResultWarning

Diagnose = Callable[[str], Diagnosis | None]
"""The end of a log to what it shows, where the engine knows the trouble."""

_FIRST_POLL_S: Final = 0.02
_LAST_POLL_S: Final = 0.5
_POLL_GROWTH: Final = 1.5
_HEALTH_TIMEOUT_S: Final = 5.0
_WATCH_S: Final = 0.02
_PORT_WAIT_S: Final = 5.0
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one server is started and recognised."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    health_path: str
    log: Path
    timeouts: Timeouts
    diagnose: Diagnose
    essential_processes: tuple[str, ...] = ()
    """Parts of the titles of processes without which the server cannot go on, beside its first one."""

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Server(Protocol):
    """A server as a run sees it: one that we started, or one that we were led to."""

    @property
    def pid(self) -> int | None:
        """Its first process, where we know it."""

    @property
    def launch_ns(self) -> int | None:
        """When we started it."""

    @property
    def stop_ns(self) -> int | None:
        """When we asked it to end."""

    @property
    def warnings(self) -> tuple[ResultWarning, ...]:
        """What is doubtful about it, complete when its context has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until it is ready; returns when it was. Raises ServerStartError when it will not be."""

    async def died(self) -> None:
        """Returns when it has ended."""

    def check_alive(self) -> None:
        """Raises ServerDiedError when it has ended."""

    def log_tail(self) -> str:
        """The last lines of its log."""


class _Trouble(NamedTuple):
    message: str
    cause: str
    log_tail: str


class ServerProcess:
    """A context manager: inside it the server's process exists, after it nothing of it does.

    ``warnings`` says afterwards what could not be cleaned up.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: processes.Started | None = None
        self.launch_ns: int | None = None
        self.stop_ns: int | None = None
        self.warnings: tuple[ResultWarning, ...] = ()

    def __enter__(self) -> Self:
        self.launch_ns = time.monotonic_ns()
        launch = self._launch
        try:
            self._process = processes.start(launch.argv, launch.env, launch.log)
        except OSError as error:
            raise ServerStartError(
                f"{launch.argv[0]!r} cannot be started: {error}; install the engine, or correct its path",
                cause="cannot-start",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is used outside its context")
        return self._process.pid

    def stop(self) -> None:
        """End the whole process tree and wait for its port; does nothing the second time."""
        if self._process is None or self.stop_ns is not None:
            return
        self.stop_ns = time.monotonic_ns()
        survivors = processes.stop(self._process, self._launch.timeouts.stop_s)
        self.warnings = tuple(_survival(survivor) for survivor in survivors)
        if not wait_free(self._launch.port, 0.0 if survivors else _PORT_WAIT_S):
            message = f"port {self._launch.port} is still held after the server was stopped"
            self.warnings = (*self.warnings, ResultWarning(code="port-held", message=message))

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server is ready; returns when it was.

        Raises ServerStartError at once when the process has ended, or when the time is up.
        """
        limit_s = self._launch.timeouts.ready_s
        deadline, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
        while True:
            answer = await self._ask(client)
            if self._returncode() is not None:
                raise _start_error(self._explain(f"the server {self._ending()} before it was ready"))
            if answer == "ready":
                return self._own(time.monotonic_ns())
            if time.monotonic() >= deadline:
                what = f"the server was not ready within {limit_s:g} s: GET {self._launch.health_path} {answer}"
                remedy = "raise timeouts.ready_s if it was still loading"
                raise _start_error(self._explain(what, cause="not-ready", remedy=remedy))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _LAST_POLL_S)

    async def died(self) -> None:
        """Returns when the server's process has ended."""
        while self._returncode() is None:  # noqa: ASYNC110 - a process that ends sets no event
            await asyncio.sleep(_WATCH_S)

    def check_alive(self) -> None:
        """Raises ServerDiedError when the process has ended."""
        if self._returncode() is not None:
            trouble = self._explain(f"the server {self._ending()} in mid-run")
            raise ServerDiedError(trouble.message, cause=trouble.cause, log_tail=trouble.log_tail)

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        try:
            with self._launch.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    async def _ask(self, client: httpx.AsyncClient) -> str:
        """``ready``, or what the health path did instead."""
        try:
            response = await client.get(self._launch.health_path, timeout=_HEALTH_TIMEOUT_S)
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            return f"failed with {type(error.__cause__ or error).__name__}"
        return "ready" if response.status_code == httpx.codes.OK else f"answered {response.status_code}"

    def _own(self, ready_ns: int) -> int:
        """``ready_ns``, if it was our server that answered."""
        if not belongs_to(self._launch.port, processes.tree(self.pid)):
            raise ServerStartError(
                f"port {self._launch.port} is answered by a process that is not the server just started; "
                "end it (it may be left over from an earlier run), or choose another port",
                cause="port-taken",
                log_tail=self.log_tail(),
            )
        return ready_ns

    def _returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def _ending(self) -> str:
        code = self._returncode()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _explain(self, what: str, *, cause: str = "server-died", remedy: str | None = None) -> _Trouble:
        """Join what we saw with what the engine reads in its log."""
        tail = self.log_tail()
        known = self._launch.diagnose(tail)
        if known is not None:
            cause, remedy = known.cause, known.remedy
            what = f"{what} ({cause})"
        return _Trouble(f"{what}; {remedy or 'its log says why'}: {self._launch.log}", cause, tail)


def _start_error(trouble: _Trouble) -> ServerStartError:
    return ServerStartError(trouble.message, cause=trouble.cause, log_tail=trouble.log_tail)


def _survival(survivor: psutil.Process) -> ResultWarning:
    return ResultWarning(
        code="server-survivor",
        message=f"process {survivor.pid} of the server survives SIGKILL; the next runs share the machine with it",
    )
