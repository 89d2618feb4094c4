"""The log of a server as it is written: through a process of ours that replaces secrets (``log_filter.py``)."""

import errno
import fcntl
import os
import select
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from benchctl.measure.server import log_filter
from benchctl.measure.server import process as processes
from benchctl.measure.server.failure import describe_end
from benchctl.measure.server.resources import thread_on
from benchctl.units import MS_PER_S
from benchctl.untrusted.files import open_to_append
from benchctl.untrusted.secrets import KnownValue, Redactor

_PIPE_BYTES: Final = 1 << 20
"""Room for what a server writes in a burst, so that it need not wait."""
_END_S: Final = 2.0
_SYNC_S: Final = 1.0
_ANSWER_BYTES: Final = 1 << 16


class RedactedLog:
    """Writes to the file at ``path`` what comes through ``output``, without secrets.

    The server gets ``output``; after ``started`` it alone has it, and the log ends when it has ended. ``raw`` is a
    file for the log as it is, which only its owner may read. Raises OSError where the process cannot be started, or
    a file cannot be opened. We keep the reading end of the pipe open: a server whose filter was killed would die by
    SIGPIPE otherwise, and would seem to have failed by itself.
    """

    def __init__(
        self, path: Path, redactor: Redactor, *, raw: Path | None = None, cores: frozenset[int] | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Secrets that were replaced, by label; complete after ``close``."""
        self.problem: int | None = None
        """The system's number of the error that keeps the log from being written, 0 for an unknown one."""
        self.is_stuck = False
        """True when the process that writes the log had to be killed: it was stopped, or too slow."""
        self._answers = b""
        self._num_syncs = 0
        with ExitStack() as stack:
            log = stack.enter_context(open_to_append(path, within=path.parent))
            raw_files = () if raw is None else (stack.enter_context(_private(raw)).fileno(),)
            self._pipe, self.output = os.pipe()
            try:
                _widen(self._pipe)
                files = (self._pipe, *raw_files)
                with thread_on(cores):
                    self._filter = processes.start_helper(
                        Path(log_filter.__file__), files, stdout=log, stderr=subprocess.PIPE, pass_fds=files
                    )
            except OSError:
                os.close(self._pipe)
                os.close(self.output)
                raise
        self._has_output = True
        self._tell("".join(map(_line_of, redactor.values)) + "\n")

    def started(self) -> None:
        """Leave the writing end of the pipe to the server."""
        if self._has_output:
            os.close(self.output)
            self._has_output = False

    def has_failed(self) -> bool:
        """True when the log is no longer written although the server may write to it."""
        if self.problem is None and self._filter.poll() not in {None, 0}:
            self.problem = 0
            self._take_answers(_SYNC_S)
        return self.problem is not None

    def describe_failure(self) -> str:
        """The beginning of a sentence on the failure of the log."""
        if self.is_stuck:
            return "the process that writes the log of the server is stopped or too slow: it did not end in time"
        if self.problem:
            return f"the log of the server cannot be written ({os.strerror(self.problem)})"
        return describe_end(self._filter.returncode, None).replace(
            "the server", "the process that writes its log", 1
        )

    @property
    def is_out_of_space(self) -> bool:
        return self.problem in {errno.ENOSPC, errno.EDQUOT}

    def sync(self) -> None:
        """Wait until the log holds what the server has written so far, a second at most."""
        self._num_syncs += 1
        if self._filter.poll() is None and self._tell(f"sync {self._num_syncs}\n"):
            self._take_answers(_SYNC_S, until=b"synced %d\n" % self._num_syncs)

    def close(self, limit_s: float = _END_S) -> None:
        """Wait up to ``limit_s`` for the server's last words, then end the log; does nothing the second time."""
        if self._filter.stdin is None or self._filter.stdin.closed:
            return
        self.started()
        self._take_answers(limit_s)
        if self._filter.poll() is None and self._tell("end\n"):  # a process that is no longer ours has the pipe
            self._take_answers(_END_S)
        with suppress(subprocess.TimeoutExpired):
            self._filter.wait(_SYNC_S)
        if self._filter.poll() is None:
            self.is_stuck, self.problem = True, 0
        self.has_failed()
        processes.end_helper(self._filter)
        os.close(self._pipe)
        for line in self._answers.decode("utf-8", "surrogateescape").splitlines():
            count, _, label = line.partition(" ")
            if count.isdecimal():
                self.counts[label] += int(count)

    def _tell(self, text: str) -> bool:
        try:
            if self._filter.stdin is not None:
                self._filter.stdin.write(text.encode())
        except OSError:  # it has ended
            return False
        return True

    def _take_answers(self, limit_s: float, until: bytes | None = None) -> None:
        """Read what the filter says: to its end, or ``until`` a line comes."""
        if self._filter.stderr is None:
            return
        deadline, descriptor, poll = time.monotonic() + limit_s, self._filter.stderr.fileno(), select.poll()
        poll.register(descriptor, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * MS_PER_S):
            piece = os.read(descriptor, _ANSWER_BYTES)
            self._answers += piece
            if not piece or (until is not None and until in self._answers):
                break
        for line in self._answers.splitlines():
            if line.startswith(b"lost "):
                self.problem = int(line[5:])


def _line_of(secret: KnownValue) -> str:
    return f"{secret.label.encode('utf-8', 'surrogateescape').hex()} {secret.value.hex()} {secret.is_word:d}\n"


def _private(path: Path) -> BinaryIO:
    """A file to append to, which only its owner may read."""
    file = open_to_append(path, within=path.parent)
    os.fchmod(file.fileno(), 0o600)
    return file


def _widen(pipe: int) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # the system allows less
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
