"""Leases: files by which one process holds one block of a shared directory, and lets others see that it lives.

    claims/b<block>-<generation>.json

A generation is one claim of a block; the highest one owns it. A lease is created once, under a name that nothing
else ever gets, and rewritten in place by its owner alone; it always has the same length.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from benchctl.errors import RecordError
from benchctl.records.documents import record_of
from benchctl.records.jsonl import encode
from benchctl.records.record import Count, Record
from benchctl.untrusted.files import entry_names, is_there, read_file
from benchctl.untrusted.text import visible_value

CLAIMS: Final = "claims"
LEASE_S: Final = 120.0
"""Default time without a heartbeat after which an owner counts as dead."""
LEASE_BYTES: Final = 2048
_NAME: Final = re.compile(r"b(\d{1,9})-(\d{1,9})\.json")
_LONGEST_WORD: Final = 200
_MAX_BYTES: Final = 65_536
_REMEDY: Final = "another program wrote it; remove the file if no benchctl measures into this directory"


class Lease(Record, frozen=True, kw_only=True, omit_defaults=True):
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
    node: str
    """Name of the owner's node in its cluster, or of its host."""
    hostname: str
    """Name that the owner's machine itself has."""
    boot_id: str | None = None
    """Identity of the machine's current boot."""
    pid: Count
    """The owner's process."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that claims blocks."""

    node: str
    hostname: str
    boot_id: str | None
    pid: int
    job: str | None = None


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


def lease_name(block: int, generation: int) -> str:
    """Name of the file of one claim."""
    return f"b{block:03d}-{generation}.json"


def lease_path(directory: Path, block: int, generation: int) -> Path:
    """The file of one claim."""
    return directory / CLAIMS / lease_name(block, generation)


def lease_bytes(lease: Lease) -> bytes:
    """Content of a lease's file: one line, padded to a constant length, so that it never grows or shrinks."""
    cut = {
        name: value[:_LONGEST_WORD]
        for name, value in msgspec.structs.asdict(lease).items()
        if isinstance(value, str)
    }
    content = encode(msgspec.structs.replace(lease, **cut))
    return content.ljust(LEASE_BYTES - 1) + b"\n"


def generations(directory: Path) -> dict[int, int]:
    """The newest generation of each claimed block, as far as the directory shows them."""
    newest: dict[int, int] = {}
    for block, generation in _listed(directory):
        newest[block] = max(generation, newest.get(block, 0))
    return newest


def _listed(directory: Path) -> Iterator[tuple[int, int]]:
    try:
        names = entry_names(directory / CLAIMS, within=directory)
    except FileNotFoundError:
        return
    for name in names:
        if (match := _NAME.fullmatch(name)) and lease_name(int(match[1]), int(match[2])) == name:
            yield int(match[1]), int(match[2])


def lease_content(path: Path, directory: Path) -> bytes | None:
    """The content of a lease's file; None without one. Raises OSError and RecordError as ``read_file`` does."""
    try:
        return read_file(path, within=directory, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return None


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
        try:
            content = lease_content(path, directory)
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror}; correct its permissions") from error
        if content is not None:
            leases[block] = decoded_lease(content, path, block, generation)
    return leases
