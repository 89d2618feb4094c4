"""The server of one run: started, awaited, watched and ended, whatever happens in between.

Ready means three things at once: the process lives, its health path answers 200, and the socket that answers
belongs to the process we started. Without the last one, an orphan of an earlier run that still holds the port
would be measured in place of the new server.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

import httpx
import psutil

from benchctl.engines.engine import Diagnosis
from benchctl.errors import ServerDiedError, ServerStartError
from benchctl.load.transport.failures import underlying
from benchctl.measure.server import process as processes
from benchctl.measure.server.essential import EssentialProcesses
from benchctl.measure.server.log import ServerLog
from benchctl.measure.server.port import HOST, belongs_to, wait_free
from benchctl.measure.server.shared_memory import Segments
from benchctl.measure.server.shortage import Shortage
from benchctl.profile.model import Timeouts
from benchctl.records.record import ResultWarning

Diagnose = Callable[[str], Diagnosis | None]
"""The end of a log to what it shows, where the engine knows the trouble."""

_FIRST_POLL_S: Final = 0.02
_LAST_POLL_S: Final = 0.25
_POLL_GROWTH: Final = 1.5
_HEALTH_TIMEOUT_S: Final = 2.0
_WATCH_S: Final = 0.02
_ESSENTIAL_WATCH_S: Final = 0.2
_LOOK_S: Final = 0.25
"""How often all processes are looked at during the start."""
_LOOK_AGAIN_S: Final = 10.0
"""The same while requests are served: a look costs some milliseconds, in a thread of its own."""
_LAST_WORDS_S: Final = 1.0
"""How long a server whose engine has gone may take to say why."""
_RUIN_LOOK_S: Final = 0.1
_RUIN_GRACE_S: Final = 1.0
"""How long what is left of a server that has ended may take to end: it has nothing more to put in order."""
_PORT_WAIT_S: Final = 5.0


def _unheard(_line: str) -> None:
    """Progress for nobody."""


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
    cores: frozenset[int] | None = None
    """Processor cores that the server may use; None: all that we may use."""
    on_log_line: Callable[[str], None] = _unheard
    """Called with the last line of the log now and then, until the server is ready."""

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
    is_profile_fault: bool


class ServerProcess:
    """A context manager: inside it the server's process exists, after it nothing of it does.

    ``warnings`` says afterwards what could not be cleaned up.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: processes.Started | None = None
        self._essential = EssentialProcesses(launch.essential_processes)
        self._looking = threading.Lock()
        self.launch_ns: int | None = None
        self.stop_ns: int | None = None
        self.warnings: tuple[ResultWarning, ...] = ()

    def __enter__(self) -> Self:
        launch = self._launch
        self._segments, self._shortage = Segments(), Shortage(launch.log.parent)
        self.launch_ns = time.monotonic_ns()
        try:
            self._process = processes.start(launch.argv, launch.env, launch.log, launch.cores)
        except OSError as error:
            raise ServerStartError(
                f"{launch.argv[0]!r} cannot be started: {error}; install the engine, or correct its path",
                cause="cannot-start",
            ) from error
        self._tree = processes.ProcessTree(self._process)
        self._log = ServerLog(launch.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._started().pid

    def stop(self) -> None:
        """End the whole process tree and wait for its port; does nothing the second time."""
        if self._process is None or self.stop_ns is not None:
            return
        self.stop_ns = time.monotonic_ns()
        self._look()
        grace_s = self._launch.timeouts.stop_s
        survivors = self._tree.stop(min(grace_s, _RUIN_GRACE_S) if self._has_ended() else grace_s)
        self.warnings = tuple(_survival(survivor) for survivor in survivors)
        if left := self._segments.remove():
            message = f"shared memory of the server is still there: {', '.join(left)}"
            self.warnings += (ResultWarning(code="shared-memory-left", message=message),)
        if not wait_free(self._launch.port, 0.0 if survivors else _PORT_WAIT_S):
            message = f"port {self._launch.port} is still held after the server was stopped"
            self.warnings += (ResultWarning(code="port-held", message=message),)
        self._log.close()

    async def wait_ready(self, client: httpx.AsyncClient) -> int:
        """Wait until the server is ready; returns when it was.

        Raises ServerStartError at once when the server has ended or has said that it never will be, or when the
        time is up.
        """
        limit_s = self._launch.timeouts.ready_s
        deadline, pause_s, looked_at = time.monotonic() + limit_s, _FIRST_POLL_S, 0.0
        while True:
            answer = await self._ask(client)
            if time.monotonic() - looked_at >= _LOOK_S or answer == "ready":
                self._look()
                looked_at = time.monotonic()
            if self._has_ended():
                await self._hear_last_words()
                raise _start_error(self._explain(f"{self._ending()} before it was ready"))
            if answer == "ready":
                return self._own(time.monotonic_ns())
            self._heed_log()
            if time.monotonic() >= deadline:
                raise _start_error(self._lateness(f"GET {self._launch.health_path} {answer}"))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _LAST_POLL_S)

    async def died(self) -> None:
        """Returns when the server's first process has ended, or one without which it cannot go on."""
        now = time.monotonic()
        next_watch, next_look = now, now + _LOOK_S
        while self._returncode() is None:
            now = time.monotonic()
            if now >= next_watch:
                if self._essential.lost() is not None:
                    return await self._hear_last_words()
                next_watch = now + _ESSENTIAL_WATCH_S
            if now >= next_look:
                await asyncio.to_thread(self._look)
                next_look = now + _LOOK_AGAIN_S
            await asyncio.sleep(_WATCH_S)
        return None

    def check_alive(self) -> None:
        """Raises ServerDiedError when the server has ended, or a process without which it cannot go on."""
        if self._has_ended():
            trouble = self._explain(f"{self._ending()} in mid-run")
            raise ServerDiedError(trouble.message, cause=trouble.cause, log_tail=trouble.log_tail)

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return self._log.tail() if self._process is not None else ""

    def _started(self) -> processes.Started:
        if self._process is None:
            raise RuntimeError("the server is used outside its context")
        return self._process

    def _look(self) -> None:
        """Take notice of the server's processes and of their shared memory while there are any.

        One look at a time: a run that is called off may leave one under way in its thread.
        """
        with self._looking:
            members = self._tree.living()
            self._essential.look(members)
            for segment in self._segments.look(member.pid for member in members):
                self._tree.tell_guardian(f"segment {segment.path}")

    async def _ask(self, client: httpx.AsyncClient) -> str:
        """``ready``, or what the health path did instead."""
        try:
            response = await client.get(self._launch.health_path, timeout=_HEALTH_TIMEOUT_S)
        except (httpx.HTTPError, OSError) as error:
            return f"failed with {type(underlying(error)).__name__}"
        return "ready" if response.status_code == httpx.codes.OK else f"answered {response.status_code}"

    def _own(self, ready_ns: int) -> int:
        """``ready_ns``, if it was our server that answered."""
        if not belongs_to(self._launch.port, self._tree.living()):
            raise ServerStartError(
                f"port {self._launch.port} is answered by a process that is not the server just started; "
                "end it (it may be left over from an earlier run), or choose another port",
                cause="port-taken",
                log_tail=self.log_tail(),
            )
        return ready_ns

    def _heed_log(self) -> None:
        """Pass on what the log says; raises ServerStartError when that is the end of all hope."""
        if line := self._log.last_line():
            self._launch.on_log_line(line)
        if not self._log.has_changed():
            return
        known = self._launch.diagnose(self._log.end())
        if known is not None and known.is_final:
            raise _start_error(self._explain("the server lives on but will never be ready"))

    def _lateness(self, answer: str) -> _Trouble:
        line = self._log.last_line()
        said = f"its log ends {line!r}" if line else "its log is empty"
        what = f"the server was not ready within {self._launch.timeouts.ready_s:g} s: {answer}, {said}"
        return self._explain(what, cause="not-ready", remedy="raise timeouts.ready_s if it was still loading")

    async def _hear_last_words(self) -> None:
        """When an essential process has gone, wait a moment for the first one to say why, and to end by itself.

        Looks on meanwhile: a family in ruin makes new members and memory that nobody will put away.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._returncode() is None and time.monotonic() < deadline:
            self._look()
            await asyncio.sleep(_RUIN_LOOK_S)

    def _returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def _has_ended(self) -> bool:
        return self._returncode() is not None or self._essential.lost() is not None

    def _ending(self) -> str:
        """Who ended and how, as the beginning of a sentence."""
        code, lost = self._returncode(), self._essential.lost()
        end = f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                end = f"was ended by {signal.Signals(-code).name}"
        if lost is None:
            return f"the server {end}"
        return lost if code is None else f"{lost} and the server {end}"

    def _explain(self, what: str, *, cause: str = "server-died", remedy: str | None = None) -> _Trouble:
        """Join what we saw with what the engine reads in its log, or else with what the system lacks."""
        known = self._launch.diagnose(self._log.end()) or self._shortage.diagnosis()
        if known is not None:
            cause, remedy = known.cause, known.remedy
            what = f"{what} ({cause})"
        message = f"{what}; {remedy or 'its log says why'}: {self._launch.log}"
        return _Trouble(message, cause, self._log.tail(), known is not None and known.is_profile_fault)


def _start_error(trouble: _Trouble) -> ServerStartError:
    return ServerStartError(
        trouble.message,
        cause=trouble.cause,
        log_tail=trouble.log_tail,
        is_profile_fault=trouble.is_profile_fault,
    )


def _survival(survivor: psutil.Process) -> ResultWarning:
    return ResultWarning(
        code="server-survivor",
        message=f"process {survivor.pid} of the server survives SIGKILL; the next runs share the machine with it",
    )
