"""A worker process as the load sees it: started, supervised, and ended for certain."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from benchctl.errors import LoadError, as_run_error, failure_in_text
from benchctl.load.tally import Activity
from benchctl.load.workers.wire import FROM_WORKER, Assignment, FromWorker, Message, Wire

_EXIT_S: Final = 2.0
_POLL_S: Final = 0.005
_TAIL_BYTES: Final = 4096


class StartedWorker:
    """One worker. Await ``connect`` before anything else, and ``end`` in any case.

    Raises LoadError where the system cannot start one more process.
    """

    def __init__(self, assignment: Assignment, count: int) -> None:
        self.activity = Activity()
        self.num_calls = 0
        self.num_records = 0
        self.is_ready = False
        self.has_ended = False
        """True when it has reported the end of its share."""
        self._name = f"worker {assignment.worker + 1} of {count} of the load generator"
        self._assignment = assignment
        self._num_silent_checks = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._sock, theirs = socket.socketpair()
        try:
            # A group of its own keeps Ctrl-C from it, which the load handles. The session stays ours: a process of
            # another session counts as a stray of the server.
            self._process = subprocess.Popen(
                (sys.executable, "-m", "benchctl.load.workers.worker"),
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                process_group=0,
            )
        except OSError as error:
            self._sock.close()
            self._log.close()
            failure = as_run_error(error, "its interpreter", next_step=", or lower load.workers")
            raise LoadError(f"{self._name} cannot be started: {failure}", cause=failure.cause) from error
        finally:
            theirs.close()
        self._wire: Wire[FromWorker] | None = None

    async def connect(self) -> None:
        """Open the connection and send the assignment."""
        self._wire = Wire(*await asyncio.open_unix_connection(sock=self._sock), FROM_WORKER)
        self._wire.send(self._assignment)

    def send(self, message: Message) -> None:
        """Send without waiting; no effect on one that has gone."""
        if self._wire is not None:
            self._wire.send(message)

    async def drain(self) -> None:
        """Wait until the worker has taken most of what was sent, or has gone."""
        if self._wire is not None:
            await self._wire.drain()

    async def receive(self) -> FromWorker:
        """Its next message. Raises LoadError when it has ended."""
        message = await self._wire.receive() if self._wire is not None else None
        if message is None:
            raise await self._death_error()
        self._num_silent_checks = 0
        return message

    def check_heard(self, interval_s: float, max_silent_checks: int) -> None:
        """Count checks without a message, one every ``interval_s``. Raises LoadError when they are too many."""
        self._num_silent_checks += not self.has_ended
        if self._num_silent_checks > max_silent_checks:
            silent_s = max_silent_checks * interval_s
            raise LoadError(
                f"{self._name} (process {self._process.pid}) has sent nothing for {silent_s:.0f} s after "
                f"{self._progress()}: it was stopped, or the machine lacks processor time or memory",
                cause="worker-hung",
                log_tail=self._tail(),
            )

    def mark_ended(self) -> None:
        self.has_ended = True
        self.activity = replace(self.activity, num_open=0)

    async def end(self) -> None:
        """End it: soon by itself if its share is complete, else at once."""
        if self.has_ended:
            await self._wait_exit()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._wait_exit()
        if self._wire is not None:
            await self._wire.close()
        self._sock.close()
        self._log.close()

    async def _death_error(self) -> LoadError:
        await self._wait_exit()
        code, tail = self._process.poll(), self._tail()
        failure = failure_in_text(tail)
        if code is None:
            how = "its connection"
        else:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            remedy = "the system does this when memory runs out (see dmesg): lower load.workers or the load"
        elif failure is not None:
            remedy = f"{failure.problem}; {failure.remedy}"
        else:
            remedy = tail.splitlines()[-1] if tail else "its log is empty"
        message = f"{self._name} (process {self._process.pid}) ended {how} after {self._progress()}: {remedy}"
        return LoadError(message, cause="worker-died" if failure is None else failure.cause, log_tail=tail)

    async def _wait_exit(self) -> None:
        deadline = time.monotonic() + _EXIT_S
        while self._process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(_POLL_S)

    def _progress(self) -> str:
        return f"{self.num_records} of its {self.num_calls} requests"

    def _tail(self) -> str:
        """The end of its output; read without moving the file position, which it shares with us."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail.decode(errors="replace").strip()
