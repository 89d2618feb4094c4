"""Writers of a result directory: one process, by a lock of the kernel; of a block also by a record of its owner.

The lock ends with its process, and the record stays: on another host nobody can see whether the process lives that
is on record without an end. Runs whose process ended unawares are settled here.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import OwnedError, RecordError, UsageError
from benchctl.records.directory import OWNER_FILE, ResultDirectory, RunDirectory
from benchctl.records.files import encode, read_if_there, record_of
from benchctl.records.integrity import digests_of_run, record_run
from benchctl.records.loads import concluded
from benchctl.records.record import INTERRUPTED, Manifest, RunFailure, RunRecord
from benchctl.records.schema import Count, Document, ExperimentState
from benchctl.untrusted.files import inside

_TRIES: Final = 20
_ABANDONED: Final = RunFailure(
    cause=INTERRUPTED, message="the process that measured this run ended before it could record the run's end"
)


class Owner(Document, frozen=True, kw_only=True, omit_defaults=True):
    """The process that measures a block, or did last."""

    node: str
    """Name of its node in its cluster, or of its host."""
    boot_id: str | None = None
    """Identity of the current boot of its machine."""
    pid: Count
    """Number of the process."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""
    begun_at: str
    """UTC, ISO 8601, by its own clock; for people only."""
    has_ended: bool = False
    """It gave the block back."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}" + (f" ({self.job})" if self.job else "")


def boot_id() -> str | None:
    """Identity of this machine's current boot, if the kernel tells it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip() or None
    return None


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for this process. Raises UsageError when another one holds it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not is_granted(handle):
            raise UsageError(
                f"{directory}: another benchctl is measuring into this directory; "
                "wait until it has ended, or stop it"
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def owned_block(results: ResultDirectory, block: int, owner: Owner, *, takes_over: bool = False) -> Iterator[None]:
    """Inside, ``owner``, which is this process, is on record as that of a block whose directory exists.

    A former owner that is on record without an end has ended where it ran on this machine, and where it was an
    earlier beginning of the same job; any other may live, unless the user knows better and ``takes_over``. Raises
    OwnedError that names it.
    """
    path = results.block(block).path / OWNER_FILE
    handle = os.open(inside(path, results.path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        is_free = is_granted(handle)
        former = owner_of(results, block)
        if not is_free:
            name = former or "another process"
            raise OwnedError(
                f"{results.path}: block {block} is being measured by {name}; wait until it has ended, or measure "
                "another block"
            )
        if former is not None and not (takes_over or _is_over(former, owner)):
            raise OwnedError(
                f"{results.path}: block {block} was begun by {former} at {former.begun_at}, which is not on record "
                "as ended; wait for it, or, if it no longer lives, add --take-over"
            )
        _sign(handle, owner)
        try:
            yield
        finally:
            _sign(handle, msgspec.structs.replace(owner, has_ended=True))
    finally:
        os.close(handle)


def _is_over(former: Owner, owner: Owner) -> bool:
    """True where the former owner has ended, given that its lock is free on this machine."""
    is_same_job = former.job is not None and former.job == owner.job
    return is_same_job or (former.boot_id is not None and former.boot_id == owner.boot_id)


def _sign(handle: int, owner: Owner) -> None:
    """Write the owner into its file, of constant length: a reader sees the old record or the new one."""
    os.pwrite(handle, encode(owner).ljust(2048 - 1) + b"\n", 0)
    os.fsync(handle)


def owner_of(results: ResultDirectory, block: int) -> Owner | None:
    """The owner on record of a block without an end; None where there is none.

    Raises RecordError when the record is damaged.
    """
    path = results.block(block).path / OWNER_FILE
    content = read_if_there(path, within=results.path)
    if not content:
        return None
    remedy = "another program wrote it; remove the file if no benchctl measures the block"
    owner = record_of(content, path, Owner, remedy=remedy)
    return None if owner.has_ended else owner


def living_owner(results: ResultDirectory, block: int) -> Owner | None:
    """The owner of a block, unless it is known to be dead: it ran on this machine, and its lock is free."""
    owner = owner_of(results, block)
    if owner is None or owner.boot_id != boot_id():
        return owner
    return owner if is_held(results.block(block).path / OWNER_FILE) else None


def is_granted(handle: int) -> bool:
    """Take the lock of an open file; False where another process keeps it for longer than a look takes."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A reader that looks whether a directory is held holds the lock for some microseconds
            time.sleep(0.01)
        except OSError:
            return True  # a file system without locks leaves it to the user
        else:
            return True
    return False


def is_held(path: Path) -> bool:
    """True while a process holds the lock of a directory or an owner's record, and where that cannot be known."""
    try:
        handle = os.open(path, os.O_RDONLY)
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

    That of an experiment whose blocks have directories of their own never changes: its state is that of the runs,
    and its warnings are those of all blocks.
    """
    manifest = results.manifest()
    if results.is_divided:
        warnings = list(manifest.warnings)
        for block in results.begun_blocks().values():
            warnings += block.manifest().warnings
        records = [_record_of(results.run(planned.run_id)) for planned in results.due_plan().runs]
        is_measured = any(living_owner(results, block) is not None for block in results.begun_blocks())
        state = state_of_runs(records, is_measured=is_measured)
        return msgspec.structs.replace(manifest, state=state, warnings=tuple(dict.fromkeys(warnings)))
    if manifest.state == "running" and not is_held(results.path):
        manifest = results.manifest()  # the process may have ended in good order since
        if manifest.state == "running":
            return msgspec.structs.replace(manifest, state="interrupted")
    return manifest


def state_of_runs(records: Sequence[RunRecord | None], *, is_measured: bool) -> ExperimentState:
    """State of planned runs together, None for those that were not begun; ``is_measured``: a process does them."""
    begun = [record for record in records if record is not None]
    if is_measured:
        return "running"
    if len(begun) < len(records) or not all(record.has_ended for record in begun):
        return "interrupted" if begun else "planned"
    states = {record.state for record in begun}
    return "failed" if "failed" in states else "suspect" if "suspect" in states else "done"


def _record_of(run: RunDirectory) -> RunRecord | None:
    """The record of a run; None where it was not begun, or has an unreadable record and is measured again."""
    with suppress(RecordError):
        return run.read() if run.is_begun() else None
    return None


def settle_runs(results: ResultDirectory) -> None:
    """Record what became of runs whose process ended before it could, in a directory that this one holds.

    Raises OSError where nothing can be written.
    """
    for run in results.begun_runs(results.plan()):
        with suppress(RecordError):  # it is measured again
            record = run.read()
            if record.state == "running":
                record = settled(record)
                files = digests_of_run(run) if record.failure is None else {}
                run.write(msgspec.structs.replace(record, files=files))
                record_run(results, record.run_id)


def settled(record: RunRecord) -> RunRecord:
    """``record`` of a directory that no process measures: one that says ``running`` was interrupted.

    Its whole loads count where its server got several; ``concluded`` names the one that was lost.
    """
    if record.state != "running":
        return record
    return concluded(record, _ABANDONED)
