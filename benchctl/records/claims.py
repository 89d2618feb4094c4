"""Claims on a result directory: a lock of the kernel on an ordinary one, a lease for each block of a shared one.

A lease is a file by which one process holds one block, and lets others see that it lives;
``docs/design/shared-directories.md`` says how. Runs whose process ended unawares are settled here.
"""

import datetime as dt
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from benchctl.errors import LostClaimError, RecordError, UsageError
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.files import encode, read_if_there, record_of
from benchctl.records.integrity import record_run
from benchctl.records.record import ENDED, INTERRUPTED, Manifest, RunFailure, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, Count, ExperimentState, Record, RunState
from benchctl.untrusted.files import entry_names, inside, is_there
from benchctl.untrusted.text import visible_value

CLAIMS: Final = "claims"
LEASE_S: Final = 120.0
"""Default time without a heartbeat after which an owner counts as dead."""
LEASE_BYTES: Final = 2048
_NAME: Final = re.compile(r"b(\d{3}|[1-9]\d{3,8})-([1-9]\d{0,8})\.json")
_REMEDY: Final = "another program wrote it; remove the file if no benchctl measures into this directory"


class Owner(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A process that claims blocks."""

    node: str
    """Name of its node in its cluster, or of its host."""
    hostname: str
    """Name that its machine itself has."""
    boot_id: str | None = None
    """Identity of the machine's current boot."""
    pid: Count
    """Number of the process."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""


class Lease(Owner, frozen=True, kw_only=True, omit_defaults=True):
    """The right of one process to measure one block."""

    schema_version: int
    """Version of the result format."""
    block: Count
    """The block, from 0."""
    generation: Count
    """Number of this claim of the block, from 1."""
    token: str
    """Random hexadecimal digits of this claim."""
    state: Literal["held", "released"] = "held"
    """Whether its owner still measures."""
    is_locked: bool = False
    """Whether the owner holds a lock of the kernel on this file, too."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = LEASE_S
    """Seconds without a heartbeat after which the owner counts as dead."""
    beat: Count = 0
    """Heartbeats so far."""
    begun_at: str
    """UTC, ISO 8601, by the owner's clock; for people only."""
    beaten_at: str
    """The same of the last heartbeat."""

    @property
    def owner(self) -> str:
        """The owner in words: ``process 812 on n2 (slurm 17_3)``."""
        return f"process {self.pid} on {self.node}" + (f" ({self.job})" if self.job else "")


def is_shared(directory: Path) -> bool:
    """True for a directory whose blocks are claimed one by one."""
    return is_there(directory / CLAIMS, within=directory)


def boot_s() -> float:
    """Seconds of this host's clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str | None:
    """Identity of this machine's current boot, if the kernel tells it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip() or None
    return None


def lease_path(directory: Path, block: int, generation: int) -> Path:
    """The file of one claim."""
    return directory / CLAIMS / f"b{block:03d}-{generation}.json"


def lease_bytes(lease: Lease) -> bytes:
    """Content of a lease's file: one line, padded to a constant length, so that it never grows or shrinks."""
    return encode(lease).ljust(LEASE_BYTES - 1) + b"\n"


def generations(directory: Path) -> dict[int, int]:
    """The newest generation of each claimed block, as far as the directory shows them."""
    newest: dict[int, int] = {}
    with suppress(FileNotFoundError):
        for match in map(_NAME.fullmatch, entry_names(directory / CLAIMS, within=directory)):
            if match is not None:
                newest[int(match[1])] = max(int(match[2]), newest.get(int(match[1]), 0))
    return newest


def decoded_lease(content: bytes, path: Path, block: int, generation: int) -> Lease:
    """The lease in a file. Raises RecordError when it is damaged or is that of another claim."""
    lease = record_of(content, path, Lease, remedy=_REMEDY)
    if (lease.block, lease.generation) != (block, generation):
        raise RecordError(
            f"{path}: is of block {visible_value(lease.block)}, generation {visible_value(lease.generation)}; "
            f"{_REMEDY}"
        )
    return lease


def newest_leases(directory: Path) -> Mapping[int, Lease]:
    """The newest lease of each block that was ever claimed, by block; empty for an ordinary directory.

    Raises RecordError when one is damaged.
    """
    leases = {}
    for block, generation in sorted(generations(directory).items()):
        path = lease_path(directory, block, generation)
        if content := read_if_there(path, within=directory):  # nothing stands in one that is being created
            leases[block] = decoded_lease(content, path, block, generation)
    return leases


BEATS_PER_LEASE: Final = 6
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SAFE_FRAC: Final = 0.5
"""Part of the lease for which the owner trusts its last heartbeat; others wait for all of it."""


def utc_s() -> str:
    """The time of day, UTC, ISO 8601, to seconds."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class HeldBlock:
    """One claim of one block. ``beat`` keeps it alive; ``check`` says whether it still stands.

    Once lost it stays lost: nothing that its owner does afterwards may count.
    """

    def __init__(
        self, directory: Path, lease: Lease, handle: int, clock: Callable[[], float], renewed_s: float
    ) -> None:
        """``handle`` is that of the lease's file, which was written after ``renewed_s``."""
        self._directory = directory
        self._handle = handle
        self._clock = clock
        self._lock = threading.Lock()
        self._renewed_s = renewed_s
        self._lost: str | None = None
        self.lease = lease

    @property
    def block(self) -> int:
        return self.lease.block

    @property
    def generation(self) -> int:
        return self.lease.generation

    def check(self) -> None:
        """Raise LostClaimError when another process may own the block by now."""
        if self._lost is None:
            self._lost = self._loss()
        if self._lost is not None:
            raise LostClaimError(
                f"{self._directory}: block {self.block} was given up: {self._lost}; nothing more of it is written "
                "here; run its task again for what is not done"
            )

    def _loss(self) -> str | None:
        silent_s = self._clock() - self._renewed_s
        if silent_s > self.lease.lease_s * _SAFE_FRAC:
            return f"this process could not renew its claim for {silent_s:.0f} s"
        newer = lease_path(self._directory, self.block, self.generation + 1)
        with suppress(OSError):  # a disk that does not answer is told by the time above
            if is_there(newer, within=self._directory):
                return "another process has taken it over"
        return None

    def beat(self) -> bool:
        """Renew the claim; False once it is lost. A disk that refuses is tried again with the next beat."""
        with self._lock:
            began_s = self._clock()
            try:
                self.check()
                self._write(beat=self.lease.beat + 1)
            except LostClaimError:
                return False
            except OSError:
                return True
            self._renewed_s = began_s
            return True

    def release(self) -> None:
        """Give the block back, unless it is lost; the file is not used afterwards."""
        with self._lock, suppress(LostClaimError, OSError):
            self.check()
            self._write(state="released")
        self._lost = self._lost or "it was given back"

    def close(self) -> None:
        """Close the file of the lease, which frees its lock."""
        os.close(self._handle)

    def _write(self, **changes: object) -> None:
        lease = msgspec.structs.replace(self.lease, beaten_at=utc_s(), **changes)
        os.pwrite(self._handle, lease_bytes(lease), 0)
        os.fsync(self._handle)
        self.lease = lease


def create_lease(
    directory: Path,
    block: int,
    generation: int,
    owner: Owner,
    lease_s: float,
    clock: Callable[[], float] = boot_s,
) -> HeldBlock | None:
    """Claim one generation of a block; None when another process was faster.

    One process alone creates a file of a name, on any file system. Raises OSError where nothing can be written.
    """
    now = utc_s()
    lease = Lease(
        schema_version=SCHEMA_VERSION,
        block=block,
        generation=generation,
        token=secrets.token_hex(8),
        **msgspec.structs.asdict(owner),
        lease_s=lease_s,
        begun_at=now,
        beaten_at=now,
    )
    began_s, path = clock(), lease_path(directory, block, generation)  # before anyone can see it
    handle = _created(path, directory)
    if handle is None:
        return None
    try:
        lease = msgspec.structs.replace(lease, is_locked=_is_locked(handle))
        os.pwrite(handle, lease_bytes(lease), 0)
        os.fsync(handle)
    except OSError:
        os.close(handle)
        path.unlink(missing_ok=True)
        raise
    return HeldBlock(directory, lease, handle, clock, began_s)


def _created(path: Path, directory: Path) -> int | None:
    try:
        return os.open(inside(path, directory), _NEW, 0o666)
    except FileExistsError:
        return None


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
