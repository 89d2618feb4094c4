"""The server of one run: started, awaited, watched and ended, whatever happens in between.

Ready means three things at once: the process lives, its health path answers 200, and the socket that answers
belongs to the process we started. Without the last one, an orphan of an earlier run that still holds the port
would be measured instead of the new server.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self

import httpx

from benchctl.errors import ServerDiedError, ServerStartError, as_run_error
from benchctl.load.failures import underlying
from benchctl.measure.server import process as processes
from benchctl.measure.server.essential import EssentialProcesses
from benchctl.measure.server.failure import (
    DISK,
    Diagnose,
    ServerFailure,
    Shortage,
    describe_end,
    limit_in_log,
    start_refusal,
)
from benchctl.measure.server.log import ServerLog
from benchctl.measure.server.redacted_log import RedactedLog
from benchctl.measure.server.resources import HOST, belongs_to, wait_free
from benchctl.measure.server.shared_memory import Segments
from benchctl.profile.sections import Timeouts
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.http import fetch
from benchctl.untrusted.secrets import environment_redactor

_FIRST_POLL_S: Final = 0.02
_LAST_POLL_S: Final = 0.25
_POLL_GROWTH: Final = 1.5
_HEALTH_TIMEOUT_S: Final = 2.0
_WATCH_S: Final = 0.02
_ESSENTIAL_WATCH_S: Final = 0.2
_START_SCAN_S: Final = 0.25
"""Interval between scans of all processes of the server during the start."""
_SCAN_S: Final = 10.0
"""The same while requests are served: a scan takes some milliseconds, in a thread of its own."""
_LAST_WORDS_S: Final = 2.0
"""Time for the log to take what the server's processes have written, after they have ended."""
_CRASH_LOG_WAIT_S: Final = 1.0
"""Time for a server that has lost an essential process to log the cause."""
_CRASH_SCAN_S: Final = 0.1
_CRASH_STOP_S: Final = 1.0
"""Time for the other processes of a server that has ended to end: they have nothing left to complete."""


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
    timeouts: Timeouts
    diagnose: Diagnose
    essential_processes: tuple[str, ...] = ()
    """Parts of the titles of the processes, other than the first, without which the server cannot work."""
    cores: frozenset[int] | None = None
    """Processor cores that the server may use; None for all that we may use."""
    on_log_line: Callable[[str], None] = lambda _line: None
    """Called with the last line of the log now and then, until the server is ready."""
    raw_log: Path | None = None
    """Where the log is kept as it is, with its secrets; None for nowhere."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Secrets in requests by the name of their variable, which the log must not repeat."""
    port_wait_s: float = 5.0
    """Time for the port to become free after the server was stopped."""

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Server(Protocol):
    """A server as a run sees it: one that we started, or one at a given address."""

    @property
    def pid(self) -> int | None:
        """The id of its first process, if known."""

    @property
    def launch_ns(self) -> int | None:
        """Time of its start, if we started it."""

    @property
    def stop_ns(self) -> int | None:
        """Time at which we asked it to end."""

    @property
    def warnings(self) -> tuple[ResultWarning, ...]:
        """Warnings about it, complete when its context has ended."""

    @property
    def redactions(self) -> Mapping[str, int]:
        """Secrets that were replaced in its log, by what they are; complete when its context has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_error: object) -> None: ...

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until it is ready; returns that time. Raises ServerStartError when it will not be."""

    async def died(self) -> None:
        """Returns when it has ended."""

    def check_alive(self) -> None:
        """Raises ServerDiedError when it has ended."""

    def log_tail(self) -> str:
        """The last lines of its log."""


class ServerProcess:
    """A context manager: inside it the server's process exists, after it nothing of it is left.

    ``warnings`` tells afterwards what could not be cleaned up.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: processes.Started | None = None
        self._output: RedactedLog | None = None
        self._essential = EssentialProcesses(launch.essential_processes)
        self._scanning = threading.Lock()
        self.launch_ns: int | None = None
        self.stop_ns: int | None = None
        self.warnings: tuple[ResultWarning, ...] = ()

    def __enter__(self) -> Self:
        launch = self._launch
        self._segments, self._shortage = Segments(), Shortage(launch.log.parent)
        try:
            output = self._output = RedactedLog(
                launch.log, environment_redactor(launch.sent), raw=launch.raw_log, cores=launch.cores
            )
        except OSError as error:
            refusal = as_run_error(error, launch.log)
            raise ServerStartError(
                f"the log of the server cannot be begun: {refusal}", cause=refusal.cause
            ) from error
        self.launch_ns = time.monotonic_ns()
        try:
            self._process = processes.start(launch.argv, launch.env, output.output, launch.cores)
        except OSError as error:
            output.close(0.0)
            raise start_refusal(launch.argv[0], error) from error
        finally:
            output.started()
        self._tree = processes.ProcessTree(self._process)
        self._log = ServerLog(launch.log)
        return self

    def __exit__(self, *error: object) -> None:
        """Raises ServerDiedError where nothing else has failed and the end of the log could not be written."""
        self.stop()
        if error[0] is None and self._output is not None and self._output.is_stuck:
            raise ServerDiedError(
                f"{self._output.describe_failure()}; look for what stopped it, then continue with --resume: "
                f"{self._launch.log}",
                cause="log-lost",
                log_tail=self._log.tail(),
            )

    @property
    def redactions(self) -> Mapping[str, int]:
        return dict(self._output.counts) if self._output is not None else {}

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
        self._scan()
        grace_s = self._launch.timeouts.stop_s
        survivors = self._tree.stop(min(grace_s, _CRASH_STOP_S) if self._has_ended() else grace_s)
        self.warnings = tuple(
            ResultWarning(
                code="server-survivor",
                message=f"process {survivor.pid} of the server survives SIGKILL; "
                "the next runs share the machine with it",
            )
            for survivor in survivors
        )
        if left := self._segments.remove():
            message = f"shared memory of the server is still there: {', '.join(left)}"
            self.warnings += (ResultWarning(code="shared-memory-left", message=message),)
        if not wait_free(self._launch.port, 0.0 if survivors else self._launch.port_wait_s):
            message = f"port {self._launch.port} is still held after the server was stopped"
            self.warnings += (ResultWarning(code="port-held", message=message),)
        if self._launch.raw_log is not None:
            self.warnings += (RAW_LOG_KEPT,)
        if self._output is not None:
            self._output.close(0.0 if survivors else _LAST_WORDS_S)
            if self._output.has_failed():
                message = f"{self._output.describe_failure()}: its end may be missing"
                self.warnings += (ResultWarning(code="server-log-incomplete", message=message),)
        self._log.close()

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server is ready; returns that time.

        Raises ServerStartError as soon as the server has ended or its log shows that it will never be ready, and
        when the time is up.
        """
        limit_s = self._launch.timeouts.ready_s
        deadline, pause_s, scanned_at = time.monotonic() + limit_s, _FIRST_POLL_S, 0.0
        while True:
            answer, asked_ns = await self._ask(client), time.monotonic_ns()
            if time.monotonic() - scanned_at >= _START_SCAN_S or answer == "ready":
                self._scan()
                scanned_at = time.monotonic()
            if answer == "ready":
                self._whole_log()
            if self._has_ended():
                await self._wait_for_crash_log()
                raise self._explain(f"{self._ending()} before it was ready").start_error()
            if answer == "ready":
                if not belongs_to(self._launch.port, self._tree.living()):
                    raise ServerStartError(
                        f"port {self._launch.port} is answered by a process that is not the server just started; "
                        "end it (it may be left over from an earlier run), or choose another port",
                        cause="port-taken",
                        log_tail=self.log_tail(),
                    )
                return asked_ns
            self._follow_log()
            if time.monotonic() >= deadline:
                raise self._lateness(f"GET {self._launch.health_path} {answer}").start_error()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _LAST_POLL_S)

    async def died(self) -> None:
        now = time.monotonic()
        next_watch, next_scan = now, now + _START_SCAN_S
        while self._returncode() is None and not self._has_lost_log():
            now = time.monotonic()
            if now >= next_watch:
                if self._essential.lost() is not None:
                    return await self._wait_for_crash_log()
                next_watch = now + _ESSENTIAL_WATCH_S
            if now >= next_scan:
                await asyncio.to_thread(self._scan)
                next_scan = now + _SCAN_S
            await asyncio.sleep(_WATCH_S)
        return None

    def check_alive(self) -> None:
        if self._has_ended():
            failure = self._explain(f"{self._ending()} in mid-run")
            raise ServerDiedError(failure.message, cause=failure.cause, log_tail=failure.log_tail)

    def log_tail(self) -> str:
        return self._whole_log().tail() if self._process is not None else ""

    def _whole_log(self) -> ServerLog:
        """The log with all that the server has written so far."""
        if self._output is not None:
            self._output.sync()
        return self._log

    def _scan(self) -> None:
        """Take note of the server's processes and shared memory. A cancelled run may still scan in its thread."""
        with self._scanning:
            members = self._tree.living()
            self._essential.scan(members)
            for segment in self._segments.scan(member.pid for member in members):
                self._tree.tell_guardian(f"segment {segment.path}")

    async def _ask(self, client: httpx.AsyncClient) -> str:
        """``ready``, or the answer of the health path instead."""
        try:
            response = await fetch(client, "GET", self._launch.health_path, limit_s=_HEALTH_TIMEOUT_S)
        except (httpx.HTTPError, OSError) as error:
            return f"failed with {type(underlying(error)).__name__}"
        return "ready" if response.status_code == httpx.codes.OK else f"answered {response.status_code}"

    def _follow_log(self) -> None:
        """Pass on the last line of the log. Raises ServerStartError when it shows a final failure."""
        if line := self._log.last_line():
            self._launch.on_log_line(line)
        if not self._log.has_changed():
            return
        diagnosis = self._launch.diagnose(self._log.end())
        if diagnosis is not None and diagnosis.is_final:
            raise self._explain("the server is alive but will never be ready").start_error()

    def _lateness(self, answer: str) -> ServerFailure:
        line = self._log.last_line()
        log_end = f"its log ends {line!r}" if line else "its log is empty"
        event = f"the server was not ready within {self._launch.timeouts.ready_s:g} s: {answer}, {log_end}"
        return self._explain(event, cause="not-ready", remedy="raise timeouts.ready_s if it was still loading")

    async def _wait_for_crash_log(self) -> None:
        """Wait a moment for a server that lost an essential process to log the cause and to end by itself.

        Scans continue: a crashing server starts processes and creates shared memory that it will not clean up.
        """
        deadline = time.monotonic() + _CRASH_LOG_WAIT_S
        while self._returncode() is None and time.monotonic() < deadline:
            self._scan()
            await asyncio.sleep(_CRASH_SCAN_S)

    def _returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def _has_ended(self) -> bool:
        return self._returncode() is not None or self._essential.lost() is not None or self._has_lost_log()

    def _has_lost_log(self) -> bool:
        return self._output is not None and self._output.has_failed()

    def _ending(self) -> str:
        if self._output is not None and self._returncode() is None and self._output.has_failed():
            return self._output.describe_failure()
        return describe_end(self._returncode(), self._essential.lost())

    def _explain(self, event: str, *, cause: str = "server-died", remedy: str | None = None) -> ServerFailure:
        """Combine ``event`` with what the engine recognises in the log, or else with a shortage of the system."""
        log = self._whole_log()
        diagnosis = self._launch.diagnose(log.end()) or limit_in_log(log.tail()) or self._shortage.diagnosis()
        if diagnosis is None and self._output is not None and self._output.is_out_of_space:
            diagnosis = DISK
        elif diagnosis is None and self._returncode() is None and self._has_lost_log():
            cause, remedy = "log-lost", "look for what ended it; an incomplete log may hide why a server fails"
        if diagnosis is not None:
            cause, remedy = diagnosis.cause, diagnosis.remedy
            event = f"{event} ({cause})"
        message = f"{event}; {remedy or 'its log says why'}: {self._launch.log}"
        return ServerFailure(message, cause, log.tail(), diagnosis is not None and diagnosis.is_profile_error)
