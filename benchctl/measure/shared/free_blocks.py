"""All blocks of a shared directory that nobody measures, one after the other."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from benchctl.errors import ClaimedError
from benchctl.measure.experiment import Listener, MeasureRun, Outcome
from benchctl.measure.measured_run import ignore
from benchctl.measure.resume.here import Here
from benchctl.measure.resume.pending import pending_in_block
from benchctl.measure.run import measure_run
from benchctl.measure.shared.assembly import assemble
from benchctl.measure.shared.block import block_runs, run_block
from benchctl.profile.model import Profile
from benchctl.records.claims import LEASE_S
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PreparedRequest
from benchctl.records.shared_claims import LeaseWatch

_PAUSE_S: Final = 1.0


def run_free_blocks(
    results: ResultDirectory,
    profile: Profile,
    requests: Sequence[PreparedRequest],
    listener: Listener,
    measure: MeasureRun = measure_run,
    *,
    keeps_raw_logs: bool = False,
    lease_s: float = LEASE_S,
    on_claimed: Callable[[str], None] = ignore,
    on_wait: Callable[[str], None] = ignore,
) -> Outcome:
    """Measure each block that is not done and that no live process holds.

    ``on_claimed`` is told of each block that one holds. To see that an owner is dead takes the time of its lease.
    Raises ClaimedError when live processes hold all blocks that are left, and as ``run_block`` does.
    """
    here, watch = Here(profile), LeaseWatch(results.path)
    left = _unfinished(results, here)
    total = Outcome(num_done=0, num_failed=0, num_suspect=0, num_skipped=_num_done(results, here))
    held_by_others: dict[int, str] = {}
    has_measured = False
    while left:
        block = _free(left, watch)
        if block is None:
            if not (left := _to_await(left, watch, held_by_others)):
                break
            on_wait(f"waiting for a sign of life of the owners of blocks {', '.join(map(str, left))}")
            time.sleep(_PAUSE_S)
            continue
        left.remove(block)
        try:
            outcome = run_block(
                results,
                profile,
                requests,
                block,
                listener,
                measure,
                keeps_raw_logs=keeps_raw_logs,
                lease_s=lease_s,
                watch=watch,
            )
        except ClaimedError as error:  # another process was faster
            held_by_others[block] = str(error)
            continue
        has_measured = True
        total = Outcome(
            num_done=total.num_done + outcome.num_done,
            num_failed=total.num_failed + outcome.num_failed,
            num_suspect=total.num_suspect + outcome.num_suspect,
            num_skipped=total.num_skipped,
        )
    for message in held_by_others.values():
        on_claimed(message)
    if not held_by_others:
        assemble(results)  # unless the last owner could not
    if held_by_others and not has_measured:
        raise ClaimedError(
            f"{results.path}: live processes measure all blocks that are left; 'benchctl watch' shows them"
        )
    return total


def _unfinished(results: ResultDirectory, here: Here) -> list[int]:
    blocks = range(results.manifest().blocks)
    return [block for block in blocks if pending_in_block(results, block_runs(results, block), here)]


def _num_done(results: ResultDirectory, here: Here) -> int:
    runs = (block_runs(results, block) for block in range(results.manifest().blocks))
    return sum(len(of_block) - len(pending_in_block(results, of_block, here)) for of_block in runs)


def _free(left: Sequence[int], watch: LeaseWatch) -> int | None:
    return next((block for block in left if watch.look(block) in {"free", "dead"}), None)


def _to_await(left: Sequence[int], watch: LeaseWatch, held_by_others: dict[int, str]) -> list[int]:
    """The blocks of which it is not known yet whether their owners live; those that do are noted."""
    awaited = []
    for block in left:
        if watch.look(block) == "alive":
            lease = watch.leases.get(block)
            owner = "another process" if lease is None else lease.owner
            held_by_others[block] = f"block {block} is being measured by {owner}"
        else:
            awaited.append(block)
    return awaited
