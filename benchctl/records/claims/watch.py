"""Signs of life of the owners of blocks, as another process sees them without comparing any two clocks.

A lease that changes has a living owner. One that has not changed for its ``lease_s`` on the observer's own clock,
which nobody sets, has a dead one: it would have stopped writing long before. On the owner's own machine, a lock of
the kernel that is free says the same at once.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.errors import RecordError
from benchctl.records.claims.lease import (
    CLAIMS,
    LEASE_S,
    Lease,
    boot_id,
    boot_s,
    decoded_lease,
    generations,
    lease_content,
    lease_path,
)
from benchctl.untrusted.files import opened_folder

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
        if sighting is None or sighting.generation != generation:
            is_newer = sighting is not None
            self._sightings[block] = _Sighting(generation, content, now_s, has_changed=is_newer)
        elif sighting.content != content:
            self._sightings[block] = _Sighting(generation, content, now_s, has_changed=True)
        elif now_s - sighting.since_s > (LEASE_S if lease is None else lease.lease_s):
            return "dead"
        return "alive" if self._sightings[block].has_changed else "unknown"

    def forget(self, block: int) -> None:
        """Begin to watch a block anew."""
        self._sightings.pop(block, None)

    def _content(self, path: Path) -> bytes:
        try:
            return lease_content(path, self._directory) or b""
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
