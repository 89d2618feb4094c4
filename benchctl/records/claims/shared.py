"""Directories whose blocks are claimed one by one, so that several processes of several hosts may write into them.

Nothing here needs a lock, or clocks that agree: the name of a claim goes to the first process that links it, and
its owner shows by heartbeats that it lives. ``docs/design/shared-directories.md`` explains why that holds.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchctl.errors import ClaimedError, UsageError
from benchctl.records.claims.held import BEATS_PER_LEASE, HeldBlock, create_lease
from benchctl.records.claims.lease import CLAIMS, LEASE_S, Lease, Owner, boot_s, is_shared, newest_leases
from benchctl.records.claims.lock import settle_runs, sole_writer
from benchctl.records.claims.watch import LeaseWatch
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity.block_digests import FOLDER
from benchctl.records.integrity.digests import begin_digests
from benchctl.system_errors import as_usage_error
from benchctl.untrusted.writing import make_folder

__all__ = ["HeldBlock", "Lease", "Owner", "claimed_block", "is_shared", "newest_leases", "share"]

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
    held = claim_block(results.path, block, owner, lease_s, watch=watch, on_wait=on_wait)
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


def claim_block(
    directory: Path,
    block: int,
    owner: Owner,
    lease_s: float,
    *,
    watch: LeaseWatch | None = None,
    on_wait: Callable[[str], None] = lambda _text: None,
    sleep: Callable[[float], None] = time.sleep,
) -> HeldBlock:
    """Claim a block without heartbeats. Raises as ``claimed_block`` does."""
    watch = watch or LeaseWatch(directory)
    has_told = False
    while (held := try_claim(directory, block, owner, lease_s, watch)) is None:
        lease = watch.leases.get(block)
        wait_s = LEASE_S if lease is None else lease.lease_s
        if not has_told and lease is not None:
            on_wait(
                f"block {block} is claimed by {lease.owner}; waiting up to {wait_s:.0f} s for a sign of life of it"
            )
        has_told = True
        sleep(min(wait_s / _LOOKS_PER_LEASE, _LONGEST_PAUSE_S))
    return held


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
