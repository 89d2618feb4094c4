"""``benchctl run --on local --parallel N``: N blocks at a time on this host."""

import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from benchctl.cli.cluster.watch import show_until_done
from benchctl.cli.options.options import Distribution
from benchctl.cli.output.verdicts import estimate_plan
from benchctl.cli.screen import warn
from benchctl.cluster.local.block_process import BlockProcess
from benchctl.cluster.local.blocks_on_slots import BlocksOnSlots, LeftBlock
from benchctl.cluster.local.demand import check_beside, devices_begun_on, slot_text
from benchctl.cluster.local.fate import fate_of
from benchctl.cluster.local.held_slots import HeldSlot, held_slots
from benchctl.cluster.slots import Slot, slots_for
from benchctl.engines.engine import engine_for
from benchctl.errors import BenchctlError, InvalidDataError, RecordError, RunError, UsageError
from benchctl.formats import count_of, duration
from benchctl.measure.experiment import Outcome
from benchctl.measure.interrupt import noting_interrupt
from benchctl.measure.resume.pending import undone_runs
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import ResultDirectory, arm_label
from benchctl.records.record import PlannedRun, PreparedRequest

_END_LIMIT_S: Final = 60.0
"""Time beyond that of a server's own end for the processes of blocks to end when they are asked to."""


def check_slots(profile: Profile, distribution: Distribution, *, is_plan: bool) -> None:
    """Raise UsageError, before anything is written, where this host has no place for so many blocks.

    A plan may be made on another host than the one that measures: that is then a warning.
    """
    try:
        check_beside(profile, _num_slots(distribution))
        with _held(profile, distribution):
            pass
    except UsageError as error:
        if not is_plan:
            raise
        warn(f"not to be measured on this machine: {error}")


def _num_slots(distribution: Distribution) -> int:
    return distribution.parallel or 1


def _held(profile: Profile, distribution: Distribution) -> AbstractContextManager[tuple[HeldSlot, ...]]:
    """The slots of this experiment, which no other benchctl has."""
    is_virtual = engine_for(profile.engine.kind).clock == "virtual"
    return held_slots(slots_for(profile, _num_slots(distribution)), _num_slots(distribution), is_virtual=is_virtual)


def print_slots(profile: Profile, requests: tuple[PreparedRequest, ...], distribution: Distribution) -> None:
    """Print the devices and cores of each slot, and the expected duration with so many blocks at a time."""
    num = _num_slots(distribution)
    try:
        slots = slots_for(profile, num)[:num]
    except UsageError:
        return  # told by check_slots
    _tell_slots(profile, requests, slots)


def _tell_slots(profile: Profile, requests: tuple[PreparedRequest, ...], slots: Sequence[Slot]) -> None:

    print(f"{count_of(len(slots), 'block')} at a time on this host:")
    for slot in slots:
        print(f"  slot {slot.index}: {slot_text(slot)}")
    estimate = estimate_plan(profile, requests, visible=",".join(slots[0].gpus))
    if estimate.run_s:
        block_s = sum(
            estimate.run_s[arm_label(run.variant, run.cell)] for run in plan_runs(profile).runs if run.block == 0
        )
        rounds = math.ceil(profile.blocks / len(slots))
        total_s = rounds * block_s + estimate.around_s
        what = "" if estimate.has_starts else " of the loads"
        print(
            f"estimated duration{what} with {len(slots)} at a time: {duration(total_s)}, "
            f"{count_of(rounds, 'round')} of {duration(block_s)}",
            flush=True,
        )


def measure_on_slots(
    results: ResultDirectory,
    profile: Profile,
    requests: tuple[PreparedRequest, ...],
    distribution: Distribution,
    *,
    is_quiet: bool,
    keeps_raw_logs: bool,
) -> Outcome | None:
    """Measure the blocks that are not done, at most ``--parallel`` at a time; returns their outcome."""
    num = _num_slots(distribution)
    with _held(profile, distribution) as slots:
        _tell_slots(profile, requests, [held.slot for held in slots])
        pending = undone_runs(results)
        try:
            blocks = _hand_out(results, profile, slots, pending, is_quiet=is_quiet, keeps_raw_logs=keeps_raw_logs)
        except KeyboardInterrupt:
            command = shlex.join(
                ["benchctl", "run", "--resume", str(results.path), "--on", "local", "--parallel", str(num)]
            )
            print(f"interrupted; results until now are kept. Continue with: {command}", file=sys.stderr)
            raise
    _tell_left(results, blocks)
    if pending and len(blocks.of_others) == len({planned.block for planned in pending}):
        raise UsageError(
            f"{results.path}: every block that is left is being measured by other processes; 'benchctl watch "
            f"{shlex.quote(str(results.path))}' shows them"
        )
    return _outcome(results, pending, blocks.of_others)


def _hand_out(
    results: ResultDirectory,
    profile: Profile,
    slots: Sequence[HeldSlot],
    pending: Sequence[PlannedRun],
    *,
    is_quiet: bool,
    keeps_raw_logs: bool,
) -> BlocksOnSlots:
    """Measure the blocks of ``pending``; returns what became of those that were not measured."""
    options = ("--keep-raw-logs",) if keeps_raw_logs else ()

    def start(block: int, held: HeldSlot) -> BlockProcess:
        return BlockProcess(results.path, block, held.slot, options, held.handles)

    blocks = BlocksOnSlots(
        slots,
        {planned.block for planned in pending},
        start,
        partial(fate_of, results),
        devices_begun_on(results, pending),
    )
    with noting_interrupt() as has_come:
        try:
            show_until_done(
                results,
                should_stop=lambda: blocks.is_over or has_come(),
                on_tick=lambda _: None if has_come() else blocks.advance(),
                is_quiet=is_quiet or bool(os.environ.get("CI")),
                width=len(slots),
            )
        finally:
            blocks.end(profile.timeouts.stop_s + _END_LIMIT_S)
    return blocks


def _tell_left(results: ResultDirectory, blocks: BlocksOnSlots) -> None:
    """Print which blocks were not measured here, and why. Raises the kind of error with which one was refused."""
    for block in blocks.of_others:
        warn(f"block {block} is measured by another process; 'benchctl watch {results.path}' shows it")
    for left in blocks.left:
        warn(f"block {left.block} was given up: its process ended twice, {_end_text(left)}; {left.process.log}")
    if blocks.refused is not None:
        process = blocks.refused.process
        kinds: tuple[type[BenchctlError], ...] = (InvalidDataError, RunError)
        kind = next((each for each in kinds if each.exit_code == blocks.refused.code), UsageError)
        error = kind(f"block {process.block} could not be measured, and no other was begun after it: {process.log}")
        error.log_tail, error.log_title = process.last_lines(), "its log ends"
        raise error


def _end_text(left: LeftBlock) -> str:
    return f"by signal {-left.code}" if left.code < 0 else f"with exit code {left.code}"


def _outcome(results: ResultDirectory, pending: Sequence[PlannedRun], of_others: Sequence[int]) -> Outcome:
    """Numbers of the runs that were to be measured by their end; one without an end counts as failed."""
    ours = [planned for planned in pending if planned.block not in of_others]
    states = Counter(_state(results, planned) for planned in ours)
    return Outcome(
        num_done=states["done"],
        num_failed=states["failed"],
        num_suspect=states["suspect"],
        num_skipped=len(results.due_plan().runs) - len(pending),
    )


def _state(results: ResultDirectory, planned: PlannedRun) -> str:
    try:
        state = results.run(planned.run_id).read().state
    except (RecordError, OSError):
        return "failed"
    return state if state in {"done", "suspect"} else "failed"
