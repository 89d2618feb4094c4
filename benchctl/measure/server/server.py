"""The server of one run: started, awaited, watched and ended, whatever happens in between.

Ready means three things at once: the process lives, its health path answers 200, and the socket that answers
belongs to the process we started. Without the last one, an orphan of an earlier run that still holds the port
would be measured instead of the new server.

A server that someone else started is watched, but neither started nor ended by us. Its process, its log and its
start are unknown. A run on it therefore has the warning that the server was not fresh.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self, TypeAlias

import httpx
import psutil

from benchctl.errors import ServerDiedError, ServerStartError, as_run_error
from benchctl.load.control import underlying
from benchctl.measure.server.health import (
    Diagnose,
    ServerLog,
    Shortage,
    describe_end,
    limit_in_log,
    start_refusal,
)
from benchctl.measure.server.process import HOST, Supervised, descendants, is_alive, is_listening, wait_free
from benchctl.measure.server.supervise import Launched, finish_log
from benchctl.profile.sections import Timeouts
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.http import fetch
from benchctl.untrusted.secrets import environment_redactor

_WATCH_S: Final = 0.02

RAW_LOG_KEPT: Final = ResultWarning(
    code="raw-log-kept",
    message="server.raw.log holds the server's log with its secrets; delete it before the directory is shared",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The start of one server, and the signs by which it is recognised."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    health_path: str
    log: Path
    """Written without secrets when the server has ended; until then ``raw_log`` beside it has them."""
    timeouts: Timeouts
    diagnose: Diagnose
    essential_processes: tuple[str, ...] = ()
    """Parts of the titles of processes, other than the first, without which the server cannot work."""
    cores: frozenset[int] | None = None
    """Processor cores that the server may use; None for all that we may use."""
    on_log_line: Callable[[str], None] = lambda _line: None
    """Called with the last line of the log now and then, until the server is ready."""
    keeps_raw_log: bool = False
    sent: Mapping[str, str] = field(default_factory=dict)
    """Secrets in requests by the name of their variable, which the log must not repeat."""
    port_wait_s: float = 5.0
    """Time for the port to become free after the server was stopped."""

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def raw_log(self) -> Path:
        return self.log.with_suffix(f".raw{self.log.suffix}")


class ServerProcess:
    """A context manager: inside it the server's process exists, after it nothing of it is left.

    Afterwards ``warnings`` tells what could not be cleaned up, and ``redactions`` how many secrets were in its log,
    by what they are.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.stop_ns: int | None = None
        self.warnings: tuple[ResultWarning, ...] = ()
        self.redactions: Mapping[str, int] = {}
        self._titled: dict[psutil.Process, str] = {}
        """Processes that the last look saw under the title of an essential one."""
        self._essential: dict[psutil.Process, str] = {}
        """Those that two looks saw so: a child that was just forked has its parent's title for a moment."""

    def __enter__(self) -> Self:
        launch = self._launch
        self._shortage = Shortage(launch.log.parent)
        launched = Launched(
            argv=launch.argv,
            env=launch.env,
            raw_log=str(launch.raw_log),
            log=str(launch.log),
            keeps_raw_log=launch.keeps_raw_log,
            sent=launch.sent,
        )
        try:
            self._process = Supervised(launched, launch.cores)
        except OSError as error:
            if error.filename != str(launch.raw_log):
                raise start_refusal(launch.argv[0], error) from error
            refusal = as_run_error(error, launch.log)
            raise ServerStartError(
                f"the log of the server cannot be begun: {refusal}", cause=refusal.cause
            ) from error
        self.pid, self.launch_ns = self._process.pid, self._process.start_ns
        self._log = ServerLog(launch.raw_log, environment_redactor(launch.sent))
        return self

    def processes(self) -> list[psutil.Process]:
        """All its living processes."""
        return descendants(self._process.supervisor_pid)

    def __exit__(self, *_error: object) -> None:
        """End all processes, wait for the port, and write the log."""
        self.stop_ns = time.monotonic_ns()
        launch, grace_s = self._launch, self._launch.timeouts.stop_s
        # Time for the other processes of a server that has ended to end: they have nothing left to complete
        survivors = self._process.stop(min(grace_s, 1.0) if self._has_failed() else grace_s)
        for pid in survivors:
            self._warn(
                "server-survivor",
                f"process {pid} of the server survives SIGKILL; the next runs share the machine with it",
            )
        if not wait_free(launch.port, 0.0 if survivors else launch.port_wait_s):
            self._warn("port-held", f"port {launch.port} is still held after the server was stopped")
        if launch.keeps_raw_log:
            self.warnings += (RAW_LOG_KEPT,)
        self._log.close()
        try:
            self.redactions = finish_log(
                launch.raw_log, launch.log, launch.sent, keeps_raw_log=launch.keeps_raw_log
            )
        except OSError as error:
            self._warn("server-log-incomplete", f"the log of the server cannot be written: {error}")

    def _warn(self, code: str, message: str) -> None:
        self.warnings += (ResultWarning(code=code, message=message),)

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server is ready; returns that time.

        Raises ServerStartError as soon as the server has ended or its log shows that it will never be ready, and
        when the time is up.
        """
        limit_s = self._launch.timeouts.ready_s
        start_s = time.monotonic()
        deadline = start_s + limit_s
        while True:
            answer, asked_ns = await self._ask(client), time.monotonic_ns()
            self._look_at_essential()
            if self._has_failed():
                await self._wait_for_crash_log()
                raise self._start_error(f"{self._ending()} before it was ready")
            if answer == "ready":
                if not any(is_listening(process, self._launch.port) for process in self.processes()):
                    raise ServerStartError(
                        f"port {self._launch.port} is answered by a process that is not the server just started; "
                        "end it (it may be left over from an earlier run), or choose another port",
                        cause="port-taken",
                        log_tail=self.log_tail(),
                    )
                if self._titled:
                    await asyncio.sleep(_WATCH_S)
                    self._look_at_essential()
                self._process.is_ready()
                return asked_ns
            self._follow_log()
            if time.monotonic() >= deadline:
                line = self._log.last_line()
                log_end = f"its log ends {line!r}" if line else "its log is empty"
                raise self._start_error(
                    f"the server was not ready within {limit_s:g} s: GET {self._launch.health_path} {answer}, "
                    f"{log_end}",
                    cause="not-ready",
                    remedy="raise timeouts.ready_s if it was still loading",
                )
            # Short beside the time until now, so that no start seems much longer than it was
            pause_s = min(0.02 * (time.monotonic() - start_s) + 0.005, 0.25)
            await asyncio.sleep(pause_s)

    async def died(self) -> None:
        """Return when it has ended or lost an essential process, after a moment in which it may log the cause."""
        for number in count():
            if self._has_ended():
                return
            # A look at an essential process reads several files: only each tenth look at the first process is
            # also at them
            if number % 10 == 0 and self._lost():
                break
            await asyncio.sleep(_WATCH_S)
        await self._wait_for_crash_log()

    async def _wait_for_crash_log(self) -> None:
        """Wait a moment for a server that lost an essential process to log the cause and to end by itself."""
        # Time for a server that has lost an essential process to log the cause and to end by itself
        deadline = time.monotonic() + 1.0
        while not self._has_ended() and time.monotonic() < deadline:  # noqa: ASYNC110 - told by another process
            await asyncio.sleep(_WATCH_S)

    def check_alive(self) -> None:
        """Raise ServerDiedError when it has ended or lost an essential process."""
        if self._has_failed():
            message, cause, _ = self._explained(f"{self._ending()} in mid-run")
            raise ServerDiedError(message, cause=cause, log_tail=self.log_tail())

    def log_tail(self) -> str:
        """The last lines of its log."""
        return self._log.tail()

    async def _ask(self, client: httpx.AsyncClient) -> str:
        """``ready``, or the answer of the health path instead."""
        try:
            # Nothing listens for most of a start, which this tells in a hundredth of the time
            socket.create_connection((HOST, self._launch.port), timeout=1.0).close()
            response = await fetch(client, "GET", self._launch.health_path, limit_s=2.0)
        except (httpx.HTTPError, OSError) as error:
            return f"failed with {type(underlying(error)).__name__}"
        return "ready" if response.status_code == httpx.codes.OK else f"answered {response.status_code}"

    def _follow_log(self) -> None:
        """Pass on the last line of the log. Raises ServerStartError when it shows a final failure."""
        if line := self._log.last_line():
            self._launch.on_log_line(line)
        diagnosis = self._launch.diagnose(self._log.end())
        if diagnosis is not None and diagnosis.is_final:
            raise self._start_error("the server is alive but will never be ready")

    def _look_at_essential(self) -> None:
        """Keep the essential processes in mind; a server that has none is spared the look."""
        if not self._launch.essential_processes:
            return
        titled = {process: title for process in self.processes() if (title := self._essential_title(process))}
        self._essential |= {process: title for process, title in titled.items() if process in self._titled}
        self._titled = titled

    def _essential_title(self, process: psutil.Process) -> str:
        """The part of its title that makes a process essential; empty for any other."""
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            return next((part for part in self._launch.essential_processes if part in title), "")
        return ""

    def _lost(self) -> list[str]:
        """The essential processes that have gone, by id and title."""
        return [f"{process.pid} ({title})" for process, title in self._essential.items() if not is_alive(process)]

    def _has_failed(self) -> bool:
        return self._has_ended() or bool(self._lost())

    def _has_ended(self) -> bool:
        return self._process.returncode is not None or self._process.supervisor_end is not None

    def _ending(self) -> str:
        """The beginning of a sentence on its end."""
        process, lost = self._process, self._lost()
        if process.returncode is None and not lost:
            return describe_end("the process that supervises the server", process.supervisor_end)
        noun, verb = ("process", "has") if len(lost) == 1 else ("processes", "have")
        events = [f"{noun} {', '.join(lost)} of the server {verb} gone"] if lost else []
        if process.returncode is not None:
            events.append(describe_end("the server", process.returncode))
        return " and ".join(events)

    def _start_error(self, event: str, cause: str = "server-died", remedy: str | None = None) -> ServerStartError:
        message, cause, is_profile_error = self._explained(event, cause, remedy)
        return ServerStartError(message, cause=cause, log_tail=self.log_tail(), is_profile_error=is_profile_error)

    def _explained(
        self, event: str, cause: str = "server-died", remedy: str | None = None
    ) -> tuple[str, str, bool]:
        """``event`` with what the engine recognises in the log, or else with a shortage of the system; the cause;
        and whether it is an error of the profile.
        """
        log = self._log
        diagnosis = self._launch.diagnose(log.end()) or limit_in_log(log.tail()) or self._shortage.diagnosis()
        if diagnosis is not None:
            cause, remedy = diagnosis.cause, diagnosis.remedy
            event = f"{event} ({cause})"
        last_words = remedy or ("its log says why" if log.tail() else "its log is empty")
        message = f"{event}; {last_words}: {self._launch.log}"
        return message, cause, diagnosis is not None and diagnosis.is_profile_error


_ATTACHED_POLL_S: Final = 0.5

_REFUSED: Final = frozenset({"ConnectionRefusedError", "ConnectError"})

_REMEDY: Final = (
    "ask its owner; if it is a vLLM on a CPU, which dies of seeded requests computed in parts, set "
    "engine.options.send_seed to false"
)


class AttachedServer:
    """A server of someone else, with the methods of ``ServerProcess``: its processes and log are not known."""

    pid: Final = None
    launch_ns: Final = None
    stop_ns: Final = None
    warnings: Final[tuple[ResultWarning, ...]] = ()
    redactions: Final[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, url: str, health_path: str, ready_s: float) -> None:
        self._url = url
        self._health_path = health_path
        self._ready_s = ready_s
        self._is_gone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave it running."""

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server answers; returns that time.

        Raises ServerStartError when the time is up, and sooner if nothing listens at its address, or no longer.
        """
        self._client = client  # it is watched only when it is ready
        start = last_s = time.monotonic()
        has_answered = False
        while (answer := await self._answer()) != "200":
            has_answered = has_answered or answer.isdecimal()
            is_there = has_answered and answer not in _REFUSED
            last_s = time.monotonic() if is_there else last_s
            # Time without a listener at the address until the address counts as wrong
            limit_s = self._ready_s if is_there else min(self._ready_s, last_s - start + 5.0)
            if time.monotonic() >= start + limit_s:
                status = f"answers {answer}, not 200" if answer.isdecimal() else f"does not answer ({answer})"
                raise ServerStartError(
                    f"{self._url}{self._health_path} {status}, after {limit_s:g} s; start the server, or correct "
                    "server.url (engine.options.url, or that of the variant)",
                    cause="not-ready",
                )
            await asyncio.sleep(_ATTACHED_POLL_S)
        return time.monotonic_ns()

    async def died(self) -> None:
        """Return when the server has not answered several times in a row."""
        missed = 0
        # Checks in a row without an answer until the server counts as gone: a busy one may miss one. If nothing
        # listens at the address, this takes a second and a half
        while missed < 3:
            await asyncio.sleep(_ATTACHED_POLL_S)
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
        try:
            response = await fetch(self._client, "GET", self._health_path, limit_s=5.0)
        except (httpx.HTTPError, OSError) as error:
            return type(underlying(error)).__name__
        return str(response.status_code)


AnyServer: TypeAlias = ServerProcess | AttachedServer
