"""Blocks that several processes measure: each in a directory of its own, with one owner at a time.

``DIR/blocks/b003`` is an ordinary result directory of the runs of one block. Slurm, the process that hands out
blocks, or the user decides who measures it; a second process is refused by a lock of the kernel and by the record
of its owner.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import msgspec

from benchctl.errors import OwnedError, RecordError, UsageError, as_usage_error
from benchctl.measure.experiment import MeasureRun, Outcome, pending_in_block, run_experiment
from benchctl.measure.interrupt import OF_SCHEDULERS, interruptible
from benchctl.measure.machine import job_name, node_name
from benchctl.measure.measured_run import ignore, utc_now
from benchctl.measure.run import Listener, measure_run
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.model import Profile
from benchctl.profile.planning import servers
from benchctl.records.directory import BLOCKS, RequestSets, ResultDirectory
from benchctl.records.integrity import FILE_MEASUREMENTS, begin_digests, forget_run, record_run
from benchctl.records.record import Plan, PlannedRun, PreparedRequest
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.records.writers import Owner, boot_id, living_owner, owned_block, settle_runs, sole_writer
from benchctl.units import count_of
from benchctl.untrusted.files import inside, is_there, make_folder, move_entry

_COPIED = ("profile.yaml", *FILE_MEASUREMENTS)


def this_owner() -> Owner:
    """This process as the owner of a block."""
    return Owner(
        schema_version=SCHEMA_VERSION,
        node=node_name(),
        boot_id=boot_id(),
        pid=os.getpid(),
        job=job_name(),
        begun_at=utc_now(),
    )


def divide(results: ResultDirectory) -> None:
    """Let each block of an experiment have a directory of its own; no effect where that is so already.

    Runs that one process has measured move there. Raises UsageError while a process measures, where nothing can be
    written, and where the blocks must be measured in order.
    """
    if results.is_divided:
        return
    if results.manifest().stopping is not None:
        raise UsageError(
            f"{results.path}: its stopping rule looks at the blocks in their order, so that they are not handed "
            "out; continue it with 'benchctl run --resume', or begin a new experiment without --until-precision"
        )
    with sole_writer(results.path):
        try:
            settle_runs(results)
            begun = [each for each in results.plan().runs if results.run(each.run_id).is_begun()]
            for planned in begun:
                forget_run(results, planned.run_id)
            make_folder(results.path / BLOCKS, within=results.path)
            for planned in begun:
                of_block = begin_block(results, planned.block)
                make_folder(of_block.path / "runs", within=results.path)
                move_entry(
                    results.path / "runs" / planned.run_id, of_block.run(planned.run_id).path, within=results.path
                )
                record_run(of_block, planned.run_id)
        except OSError as error:
            raise as_usage_error(
                error, results.path, remedy=f"copy {results.path} to where files can be written, and name the copy"
            ) from error


def begin_block(results: ResultDirectory, block: int) -> ResultDirectory:
    """The directory of a block, which is made whole in one step where there is none. Raises OSError."""
    of_block = results.block(block)
    if is_there(of_block.path, within=results.path):
        return of_block
    unfinished = ResultDirectory(of_block.path.with_name(f".{of_block.path.name}.{os.getpid()}.partial"))
    try:
        make_folder(unfinished.path, within=results.path)
        for name in (*_COPIED, *(each.file for each in results.manifest().all_sets)):
            if is_there(results.path / name, within=results.path):
                shutil.copyfile(inside(results.path / name, results.path), unfinished.path / name)
        unfinished.write_plan(Plan(schema_version=SCHEMA_VERSION, runs=block_runs(results, block)))
        unfinished.write_manifest(
            msgspec.structs.replace(
                results.manifest(), state="planned", blocks=1, extensions=(), warnings=(), gpus=gpu_inventory()
            )
        )
        begin_digests(unfinished)
        unfinished.path.rename(of_block.path)
    except OSError:
        if not is_there(of_block.path, within=results.path):  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished.path, ignore_errors=True)
    return of_block


def block_runs(results: ResultDirectory, block: int) -> tuple[PlannedRun, ...]:
    """The runs of one block in planned order."""
    return tuple(run for run in results.plan().runs if run.block == block)


def has_ended(results: ResultDirectory, block: int) -> bool:
    """Every run of the block has ended, for better or worse; an interrupted one has not."""
    with suppress(RecordError):
        return all(
            run.is_begun() and run.read().has_ended
            for run in (results.run(planned.run_id) for planned in block_runs(results, block))
        )
    return False


def check_block(results: ResultDirectory, block: int) -> None:
    """Raise UsageError for a block that the experiment does not have, and where blocks have no directories."""
    num_blocks = results.manifest().blocks
    if block >= num_blocks:
        numbers = "0" if num_blocks == 1 else f"0 to {num_blocks - 1}"
        raise UsageError(f"{results.path} has {count_of(num_blocks, 'block')}: {numbers}; --block {block} is none")
    if not results.is_divided:
        raise UsageError(
            f"{results.path} is measured by one process, so that its blocks cannot be measured one by one; hand "
            f"them out with 'benchctl run --resume {results.path} --prepare' first"
        )


def run_block(
    results: ResultDirectory,
    profile: Profile,
    requests: RequestSets | Sequence[PreparedRequest],
    block: int,
    listener: Listener,
    measure: MeasureRun = measure_run,
    *,
    keeps_raw_logs: bool = False,
    takes_over: bool = False,
) -> Outcome:
    """Measure what is not done of one block, in planned order; one that is done is given back with ``takes_over``.

    Raises OwnedError where another owner is on record, as ``owned_block`` does, KeyboardInterrupt after a signal,
    also one of a job system, UsageError and RunError as ``run_experiment`` does.
    """
    check_block(results, block)
    runs = block_runs(results, block)
    if not pending_in_block(results, runs, profile):
        if takes_over and living_owner(results, block) is not None:  # which died behind its last run
            with owned_block(results, block, this_owner(), takes_over=True):
                pass
        return Outcome(num_done=0, num_failed=0, num_suspect=0, num_skipped=len(runs))
    with interruptible(OF_SCHEDULERS):
        try:
            of_block = begin_block(results, block)
        except OSError as error:
            raise as_usage_error(
                error, results.path, remedy="free space, or correct the permissions, and run the task again"
            ) from error
        with owned_block(results, block, this_owner(), takes_over=takes_over):
            return run_experiment(of_block, profile, requests, listener, measure, keeps_raw_logs=keeps_raw_logs)


def run_free_blocks(
    results: ResultDirectory,
    profile: Profile,
    requests: RequestSets | Sequence[PreparedRequest],
    listener: Listener,
    measure: MeasureRun = measure_run,
    *,
    keeps_raw_logs: bool = False,
    takes_over: bool = False,
    on_owned: Callable[[str], None] = ignore,
) -> Outcome:
    """Measure each block that is not done, one after the other; ``on_owned`` is told of those with an owner.

    Raises OwnedError when that is so of all blocks that are left, and as ``run_block`` does.
    """
    total, num_owned = Counter[str](), 0
    for block in range(results.manifest().blocks):
        try:
            outcome = run_block(
                results,
                profile,
                requests,
                block,
                listener,
                measure,
                keeps_raw_logs=keeps_raw_logs,
                takes_over=takes_over,
            )
            total.update(asdict(outcome))
            if outcome.num_failed == len(servers(profile)):  # the other blocks would fail as well
                break
        except OwnedError as error:
            num_owned += 1
            on_owned(str(error))
    if num_owned and total.total() == total["num_skipped"]:
        raise OwnedError(
            f"{results.path}: other processes measure all blocks that are left; 'benchctl watch' shows them"
        )
    return Outcome(**total)
