"""The record of one run in progress: every change is on disk at once."""

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

from benchctl.errors import KEPT, BenchctlError, as_run_error, is_of_the_system
from benchctl.load.tally import LoadSummary
from benchctl.measure.interrupt import interruptible
from benchctl.measure.redaction import redacted_tree
from benchctl.measure.resume.attempts import begin_attempt
from benchctl.records.directory import RunDirectory
from benchctl.records.integrity import digests_of_run
from benchctl.records.record import INTERRUPTED, RunFailure, RunRecord
from benchctl.records.schema import ResultWarning, RunState
from benchctl.records.warning_codes import SUSPECT_CODES, by_severity
from benchctl.untrusted.secrets import Redactor, environment_redactor

INTERNAL_ERROR: Final = "internal-error"
"""Cause of a failure by a mistake of benchctl."""


def utc_now() -> str:
    """The time of day, UTC, ISO 8601, to milliseconds."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Journal:
    """Keeps ``run.json``; each change replaces the file, and comes into it without secrets."""

    def __init__(self, directory: RunDirectory, record: RunRecord, redactor: Redactor | None = None) -> None:
        self._directory = directory
        self._redactor = redactor or environment_redactor()
        self.record = record
        self.is_suspect = False
        """Whether a warning keeps the run from counting as done."""

    def begin(self) -> None:
        """Begin an attempt at the run."""
        self.update(attempt=begin_attempt(self._directory))

    @contextmanager
    def begun(self, fail: Callable[[str, str], object], *, can_resume: bool = True) -> Iterator[None]:
        """Begin an attempt. Inside, signals interrupt it, and what ends it before its verdict is recorded by
        ``fail``, with cause and message, and goes on.

        Raises RunError when the system refuses files, memory or processes, KeyboardInterrupt after SIGINT or
        SIGTERM, and any other error as it is: a mistake of ours has the cause ``internal-error``. A RunError, after
        which the next run may succeed, is the caller's to catch inside.
        """

        def fail_unless_closed(cause: str, message: str) -> None:
            if self.record.state != "running":
                return
            with suppress(OSError, MemoryError):  # a full disk may refuse this, too
                try:
                    fail(cause, message)
                except Exception:  # noqa: BLE001 - what fails here must not hide why the run has
                    self.update(state="failed", failure=RunFailure(cause=cause, message=message))

        with interruptible():
            try:
                self.begin()
                yield
            except KeyboardInterrupt:
                fail_unless_closed(INTERRUPTED, "the run was interrupted by a signal")
                raise
            except BenchctlError as error:
                fail_unless_closed(getattr(error, "cause", type(error).__name__), str(error))
                raise
            except BaseException as error:
                if not is_of_the_system(error):
                    fail_unless_closed(INTERNAL_ERROR, f"{type(error).__name__}: {error}")
                    raise
                next_step = f", then continue with --resume; {KEPT}" if can_resume else f"; {KEPT}"
                ended = as_run_error(error, self._directory.path, next_step=next_step)
                fail_unless_closed(ended.cause, str(ended))
                raise ended from error

    def update(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **redacted_tree(changes, self._redactor))
        self._directory.write(self.record)

    def time(self, **times: int | None) -> None:
        """Note when phases began."""
        self.update(times=msgspec.structs.replace(self.record.times, **times))

    def warn(self, *warnings: ResultWarning) -> None:
        """Attach warnings; those that name no place are about this run. One whose code says so makes it suspect."""
        if warnings:
            self.is_suspect = self.is_suspect or any(warning.code in SUSPECT_CODES for warning in warnings)
            here = self.record.run_id
            placed = [w if w.where else msgspec.structs.replace(w, where=here) for w in warnings]
            self.update(warnings=(*self.record.warnings, *placed))

    def suspect(self, code: str, message: str) -> None:
        """Attach a warning that keeps the run from counting as done."""
        self.warn(ResultWarning(code=code, message=message))

    def count(self, load: LoadSummary) -> None:
        times = msgspec.structs.replace(
            self.record.times, first_send_ns=load.first_send_ns, last_token_ns=load.last_token_ns
        )
        num_completed = load.num_sent - load.num_failed
        self.update(times=times, num_sent=load.num_sent, num_completed=num_completed, num_failed=load.num_failed)

    def close(self, state: RunState, failure: RunFailure | None = None) -> RunRecord:
        """Write the verdict, with the warnings that led to it first, and what the files of the run hold now;
        returns the final record.
        """
        files = digests_of_run(self._directory)
        self.update(state=state, failure=failure, warnings=by_severity(self.record.warnings), files=files)
        return self.record
