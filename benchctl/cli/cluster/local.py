"""``benchctl run --on local --parallel N``: N blocks at a time on this host."""

import math
import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from benchctl.cli.checks import advising, refuse
from benchctl.cli.cluster.watch import show_until_done
from benchctl.cli.conduct import outcome_elsewhere
from benchctl.cli.estimates import estimate_plan
from benchctl.cli.options.options import RunOptions
from benchctl.cli.screen import warn
from benchctl.cluster.local.block_process import BlockProcess
from benchctl.cluster.local.blocks_on_slots import BlocksOnSlots
from benchctl.cluster.local.demand import check_beside, devices_begun_on, slot_text
from benchctl.cluster.local.fate import fate_of
from benchctl.cluster.local.held_slots import HeldSlot, held_slots
from benchctl.cluster.slots import Slot, slots_for
from benchctl.engines.engine import engine_for
from benchctl.errors import BenchctlError, InvalidDataError, RunError, UsageError
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


def check_slots(profile: Profile, num: int, *, is_plan: bool) -> None:
    """Raise UsageError, where this host has no place for ``num`` blocks; of a plan it is a warning."""
    try:
        check_beside(profile, num)
        with _held(profile, num):
            pass
    except UsageError as error:
        refuse(str(error), is_plan=is_plan)


def _held(profile: Profile, num: int) -> AbstractContextManager[tuple[HeldSlot, ...]]:
    """The slots of this experiment, which no other benchctl has."""
    is_virtual = engine_for(profile.engine.kind).clock == "virtual"
    return held_slots(slots_for(profile, num), num, is_virtual=is_virtual)


def print_slots(profile: Profile, requests: Sequence[PreparedRequest], num: int) -> None:
    """Print the devices and cores of each slot, and the expected duration with ``num`` blocks at a time."""
    try:
        slots = slots_for(profile, num)[:num]
    except UsageError:
        return  # told by check_slots
    _tell_slots(profile, requests, slots)


def _tell_slots(profile: Profile, requests: Sequence[PreparedRequest], slots: Sequence[Slot]) -> None:
    print(f"{count_of(len(slots), 'block')} at a time on this host:")
    for slot in slots:
        print(f"  slot {slot.index}: {slot_text(slot)}")
    estimate = estimate_plan(profile, requests, visible=",".join(slots[0].gpus))
    if estimate.run_s:
        first_block = [run for run in plan_runs(profile).runs if run.block == 0]
        block_s = sum(estimate.run_s[arm_label(run.variant, run.cell)] for run in first_block)
        rounds = math.ceil(profile.blocks / len(slots))
        what = "" if estimate.has_starts else " of the loads"
        print(
            f"estimated duration{what} with {len(slots)} at a time: "
            f"{duration(rounds * block_s + estimate.around_s)}, {count_of(rounds, 'round')} of {duration(block_s)}",
            flush=True,
        )


def measure_on_slots(
    results: ResultDirectory, profile: Profile, requests: Sequence[PreparedRequest], options: RunOptions
) -> Outcome:
    """Measure the blocks that are not done, at most ``--parallel`` at a time; returns their outcome."""
    num = options.parallel or 1
    command = ["benchctl", "run", "--resume", str(results.path), "--on", "local", "--parallel", str(num)]
    with _held(profile, num) as slots:
        _tell_slots(profile, requests, [held.slot for held in slots])
        pending = undone_runs(results)
        with advising(f"Continue with: {shlex.join(command)}"):
            blocks = _hand_out(results, profile, slots, pending, options)
    _tell_left(results, blocks)
    if pending and len(blocks.of_others) == len({planned.block for planned in pending}):
        raise UsageError(
            f"{results.path}: every block that is left is being measured by other processes; 'benchctl watch "
            f"{shlex.quote(str(results.path))}' shows them"
        )
    return outcome_elsewhere(results, pending, blocks.of_others)


def _hand_out(
    results: ResultDirectory,
    profile: Profile,
    slots: Sequence[HeldSlot],
    pending: Sequence[PlannedRun],
    options: RunOptions,
) -> BlocksOnSlots:
    """Measure the blocks of ``pending``; returns what became of those that were not measured."""
    words = ("--keep-raw-logs",) if options.keep_raw_logs else ()

    def start(block: int, held: HeldSlot) -> BlockProcess:
        return BlockProcess(results.path, block, held.slot, words, held.handles)

    numbers, begun_on = {planned.block for planned in pending}, devices_begun_on(results, pending)
    blocks = BlocksOnSlots(slots, numbers, start, partial(fate_of, results), begun_on)
    with noting_interrupt() as has_come:

        def is_over() -> bool:
            if not has_come():
                blocks.advance()
            return blocks.is_over or has_come()

        is_quiet = options.is_quiet or bool(os.environ.get("CI"))
        try:
            show_until_done(results, is_over, is_quiet=is_quiet, width=len(slots))
        finally:
            blocks.end(profile.timeouts.stop_s + _END_LIMIT_S)
    return blocks


def _tell_left(results: ResultDirectory, blocks: BlocksOnSlots) -> None:
    """Print which blocks were not measured here, and why. Raises the kind of error with which one was refused."""
    for block in blocks.of_others:
        warn(f"block {block} is measured by another process; 'benchctl watch {results.path}' shows it")
    for left in blocks.left:
        end = f"by signal {-left.code}" if left.code < 0 else f"with exit code {left.code}"
        warn(f"block {left.block} was given up: its process ended twice, {end}; {left.process.log}")
    if blocks.refused is not None:
        process = blocks.refused.process
        kinds: tuple[type[BenchctlError], ...] = (InvalidDataError, RunError)
        kind = next((each for each in kinds if each.exit_code == blocks.refused.code), UsageError)
        error = kind(f"block {process.block} could not be measured, and no other was begun after it: {process.log}")
        error.log_tail, error.log_title = process.last_lines(), "its log ends"
        raise error
