"""The claim that this process has on one block: kept alive, checked before every write, given back."""

import datetime as dt
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import LostClaimError, UsageError
from benchctl.records.claims.lease import CLAIMS, Lease, Owner, boot_s, lease_bytes, lease_name, lease_path
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.untrusted.files import is_there, opened_folder

BEATS_PER_LEASE: Final = 6
_NO_LINKS: Final = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
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

    def __init__(self, directory: Path, lease: Lease, handle: int, clock: Callable[[], float] = boot_s) -> None:
        """``handle`` is that of the lease's file, written just now."""
        self._directory = directory
        self._handle = handle
        self._clock = clock
        self._lock = threading.Lock()
        self._renewed_s = clock()
        self._lost: str | None = None
        self.lease = lease

    @property
    def block(self) -> int:
        return self.lease.block

    @property
    def generation(self) -> int:
        return self.lease.generation

    @property
    def is_lost(self) -> bool:
        """True once it was found that another process may own the block."""
        return self._lost is not None

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

    The name is given by ``link``, which one process alone can do on any file system. Raises OSError where nothing
    can be written, UsageError on a file system without links.
    """
    now, token = utc_s(), secrets.token_hex(8)
    name, partial = lease_name(block, generation), f".{lease_name(block, generation)}.{token}.partial"
    lease = Lease(
        schema_version=SCHEMA_VERSION,
        block=block,
        generation=generation,
        token=token,
        node=owner.node,
        hostname=owner.hostname,
        boot_id=owner.boot_id,
        pid=owner.pid,
        job=owner.job,
        lease_s=lease_s,
        begun_at=now,
        beaten_at=now,
    )
    with opened_folder(directory / CLAIMS, within=directory) as folder:
        handle = os.open(partial, _NEW, 0o666, dir_fd=folder)
        is_ours = False
        try:
            lease = msgspec.structs.replace(lease, is_locked=_is_locked(handle))
            held = HeldBlock(directory, lease, handle, clock)  # its time begins before anyone can see it
            os.pwrite(handle, lease_bytes(lease), 0)
            os.fsync(handle)
            is_ours = _is_linked(folder, partial, name, directory)
        finally:
            if not is_ours:
                os.close(handle)
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
    return held if is_ours else None


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_linked(folder: int, partial: str, name: str, directory: Path) -> bool:
    """True when ``partial`` got the name ``name``, whatever the answer was: that of a remote disk can be lost."""
    try:
        os.link(partial, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if _is_same(folder, partial, name):
            return True
        if isinstance(error, FileExistsError):
            return False
        if isinstance(error, PermissionError) or error.errno in _NO_LINKS:
            raise UsageError(
                f"{directory / CLAIMS}: the file system gives no second name to a file ({error.strerror}), and "
                "blocks are claimed by that; put the result directory on another file system, or measure "
                "it in one process with 'benchctl run'"
            ) from error
        raise
    return True


def _is_same(folder: int, partial: str, name: str) -> bool:
    try:
        ours = os.stat(partial, dir_fd=folder, follow_symlinks=False)
        theirs = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return (ours.st_ino, ours.st_dev) == (theirs.st_ino, theirs.st_dev)
