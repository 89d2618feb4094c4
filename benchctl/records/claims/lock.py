"""The claim of a process on the result directory into which it measures, and what is left when it ended unawares.

The claim is a lock that the kernel holds for the process: it ends with the process, however that ends. A record
that says ``running`` in a directory that nobody claims is of a process that could not write its end: it was killed,
or the disk was full.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import RecordError, UsageError
from benchctl.records.claims.lease import is_shared, newest_leases
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.integrity.digests import record_run
from benchctl.records.manifest import Manifest
from benchctl.records.record import ExperimentState, RunState
from benchctl.records.run import ENDED, INTERRUPTED, RunFailure, RunRecord

_TRIES: Final = 20
_RETRY_S: Final = 0.01
"""A reader that looks whether a directory is claimed holds the lock for some microseconds."""
_ABANDONED: Final = RunFailure(
    cause=INTERRUPTED, message="the process that measured this run ended before it could record the run's end"
)


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for this process. Raises UsageError when another one holds it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not _is_granted(handle):
            raise UsageError(
                f"{directory}: another benchctl is measuring into this directory; "
                "wait until it has ended, or stop it"
            )
        yield
    finally:
        os.close(handle)


def _is_granted(handle: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_RETRY_S)
        except OSError:
            return True  # a file system without locks leaves it to the user
        else:
            return True
    return False


def is_claimed(directory: Path) -> bool:
    """True while a process measures into ``directory``, and where that cannot be known."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def current_manifest(results: ResultDirectory) -> Manifest:
    """The manifest; its state is ``interrupted`` where it says ``running`` and no process measures.

    In a shared directory nobody keeps the state while blocks are measured: it is that of the runs and the claims.
    """
    manifest = results.manifest()
    if is_shared(results.path):
        return msgspec.structs.replace(manifest, state=_state_of_runs(results))
    if manifest.state == "running" and not is_claimed(results.path):
        manifest = results.manifest()  # the process may have ended in good order since
        if manifest.state == "running":
            return msgspec.structs.replace(manifest, state="interrupted")
    return manifest


def _state_of_runs(results: ResultDirectory) -> ExperimentState:
    """State of a shared directory. A claim counts as that of a living process until another one takes it over."""
    states = {state_of(run) for run in map(results.run, (planned.run_id for planned in results.due_plan().runs))}
    if states == {"done"}:
        return "done"
    if any(lease.state == "held" for lease in newest_leases(results.path).values()):
        return "running"
    if states == {"planned"}:
        return "planned"
    if not states <= ENDED:
        return "interrupted"
    return "failed" if "failed" in states else "suspect"


def state_of(run: RunDirectory) -> RunState:
    """The state on record; that of an unreadable one is ``running``: it is measured again."""
    try:
        return run.read().state if run.is_begun() else "planned"
    except RecordError:
        return "running"


def settle_runs(results: ResultDirectory) -> None:
    """Record what became of runs whose process ended before it could, in a directory that this one holds.

    Raises OSError where nothing can be written.
    """
    for run in results.begun_runs(results.plan()):
        with suppress(RecordError):  # it is measured again
            record = run.read()
            if record.state == "running":
                run.write(settled(record))
                record_run(results, record.run_id)


def settled(record: RunRecord) -> RunRecord:
    """``record`` of a directory that no process claims: one that says ``running`` was interrupted."""
    return (
        msgspec.structs.replace(record, state="failed", failure=_ABANDONED) if record.state == "running" else record
    )
