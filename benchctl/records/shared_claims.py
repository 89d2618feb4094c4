"""Claims of single blocks of a shared directory, and signs of life of their owners without comparing clocks."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.errors import ClaimedError, RecordError, UsageError, as_usage_error
from benchctl.records.claims import (
    BEATS_PER_LEASE,
    CLAIMS,
    LEASE_S,
    HeldBlock,
    Lease,
    Owner,
    boot_id,
    boot_s,
    create_lease,
    decoded_lease,
    generations,
    is_shared,
    lease_path,
    settle_runs,
    sole_writer,
)
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import FOLDER, begin_digests
from benchctl.untrusted.files import make_folder, opened_folder, read_file

Sight: TypeAlias = Literal["free", "dead", "alive", "unknown"]
"""State of a block: never claimed or released; owner dead; seen alive; not watched for long enough."""
_LOCKING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class _Sighting:
    generation: int
    content: bytes
    since_s: float
    has_changed: bool = False


class LeaseWatch:
    """Looks at the leases of one directory again and again; remembers what it saw of each block."""

    def __init__(self, directory: Path, clock: Callable[[], float] = boot_s, this_boot: str | None = None) -> None:
        self._directory = directory
        self._clock = clock
        self._boot_id = this_boot or boot_id()
        self._sightings: dict[int, _Sighting] = {}
        self._least: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        """The newest lease of each block as last seen, as far as it can be read."""

    def newest(self, block: int) -> int:
        """The newest generation of a block that is known; 0 for none."""
        listed = generations(self._directory).get(block, 0)
        return max(listed, self._least.get(block, 0))

    def know(self, block: int, generation: int) -> None:
        """Note that a generation exists, which a listing of a remote file system may not show yet."""
        self._least[block] = max(generation, self._least.get(block, 0))

    def look(self, block: int, listed: int | None = None) -> Sight:
        """Look at the newest lease of a block once; ``listed`` is its generation, if the caller just listed all."""
        generation = self.newest(block) if listed is None else listed
        if generation == 0:
            return "free"
        path = lease_path(self._directory, block, generation)
        content = self._content(path)
        now_s = self._clock()  # after the reading: what it showed is at least so old
        lease = self._decoded(content, path, block, generation)
        if lease is not None:
            self.leases[block] = lease
            if lease.state == "released":
                return "free"
            if self._is_abandoned(lease, path):
                return "dead"
        sighting = self._sightings.get(block)
        if sighting is None or (sighting.generation, sighting.content) != (generation, content):
            self._sightings[block] = _Sighting(generation, content, now_s, has_changed=sighting is not None)
        elif now_s - sighting.since_s > (LEASE_S if lease is None else lease.lease_s):
            return "dead"
        return "alive" if self._sightings[block].has_changed else "unknown"

    def forget(self, block: int) -> None:
        """Begin to watch a block anew."""
        self._sightings.pop(block, None)

    def _content(self, path: Path) -> bytes:
        try:
            return read_file(path, within=self._directory)
        except OSError:
            return b""  # of which nothing is known, unless it stays so

    def _decoded(self, content: bytes, path: Path, block: int, generation: int) -> Lease | None:
        with suppress(RecordError):
            return decoded_lease(content, path, block, generation)
        return None

    def _is_abandoned(self, lease: Lease, path: Path) -> bool:
        """True where the owner ran on this machine since it was started, and its lock on the lease is free."""
        if not lease.is_locked or lease.boot_id is None or lease.boot_id != self._boot_id:
            return False
        try:
            with opened_folder(self._directory / CLAIMS, within=self._directory) as folder:
                handle = os.open(path.name, _LOCKING, dir_fd=folder)
        except (OSError, RecordError):
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(handle)
        content = self._content(path)
        # Released, or beaten, between the reading and the lock?
        return self._decoded(content, path, lease.block, lease.generation) == lease


_LOOKS_PER_LEASE: Final = 4 * BEATS_PER_LEASE
_LONGEST_PAUSE_S: Final = 2.0
"""Between two looks at a lease."""


def share(results: ResultDirectory) -> None:
    """Make an ordinary directory a shared one; no effect on one that is.

    Raises UsageError while a process measures into it, where nothing can be written, and where its blocks must be
    measured in order.
    """
    if is_shared(results.path):
        return
    if results.manifest().stopping is not None:
        raise UsageError(
            f"{results.path}: its stopping rule looks at the blocks in their order, so that they are not handed "
            "out; continue it with 'benchctl run --resume', or begin a new experiment without --until-precision"
        )
    with sole_writer(results.path):
        try:
            settle_runs(results)
            begin_digests(results)
            make_folder(results.path / FOLDER, within=results.path)
            make_folder(results.path / CLAIMS, within=results.path)  # last: it makes the directory a shared one
        except OSError as error:
            raise as_usage_error(
                error, results.path, remedy=f"copy {results.path} to where files can be written, and name the copy"
            ) from error


@contextmanager
def claimed_block(
    results: ResultDirectory,
    block: int,
    owner: Owner,
    lease_s: float = LEASE_S,
    *,
    watch: LeaseWatch | None = None,
    on_wait: Callable[[str], None] = lambda _text: None,
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[HeldBlock]:
    """Inside, this process owns ``block``; heartbeats keep it so, and ``on_lost`` is called by their thread if not.

    The block of a dead owner is taken over. To see whether the owner of a held one lives takes up to its lease;
    ``on_wait`` is told whom we wait for. Raises ClaimedError naming a live owner, OSError where nothing can
    be written.
    """
    watch, has_told = watch or LeaseWatch(results.path), False
    while (held := try_claim(results.path, block, owner, lease_s, watch)) is None:
        lease = watch.leases.get(block)
        wait_s = LEASE_S if lease is None else lease.lease_s
        if not has_told and lease is not None:
            on_wait(
                f"block {block} is claimed by {lease.owner}; waiting up to {wait_s:.0f} s for a sign of life of it"
            )
        has_told = True
        time.sleep(min(wait_s / _LOOKS_PER_LEASE, _LONGEST_PAUSE_S))
    ended = threading.Event()
    beats = threading.Thread(target=_keep_alive, args=(held, ended, on_lost), name="heartbeats", daemon=True)
    try:
        beats.start()
        yield held
    finally:
        ended.set()
        held.release()
        if beats.ident is not None:
            beats.join()
        held.close()


def _keep_alive(held: HeldBlock, ended: threading.Event, on_lost: Callable[[], None]) -> None:
    while not ended.wait(held.lease.lease_s / BEATS_PER_LEASE):
        if not held.beat():
            if not ended.is_set():
                on_lost()
            return


def try_claim(
    directory: Path,
    block: int,
    owner: Owner,
    lease_s: float,
    watch: LeaseWatch,
    clock: Callable[[], float] = boot_s,
) -> HeldBlock | None:
    """Claim a block that is free now; None while it is not known whether its owner lives.

    Raises as ``claimed_block`` does.
    """
    sight = watch.look(block)
    if sight == "alive":
        raise _claimed(directory, block, watch)
    if sight == "unknown":
        return None
    generation = watch.newest(block) + 1
    held = create_lease(directory, block, generation, owner, lease_s, clock)
    if held is None:
        watch.know(block, generation)
        if watch.look(block) in {"alive", "unknown"}:
            raise _claimed(directory, block, watch)  # of a process that was faster: a moment ago it was alive
    return held


def _claimed(directory: Path, block: int, watch: LeaseWatch) -> ClaimedError:
    lease = watch.leases.get(block)
    owner = "another process" if lease is None else lease.owner
    return ClaimedError(
        f"{directory}: block {block} is being measured by {owner}; wait until it has ended, or measure "
        "another block"
    )
