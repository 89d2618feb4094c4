"""The blocks of an experiment handed out, each to a process of its own.

``benchctl run --on slurm``: as an array job. ``--on local --parallel N``: N at a time on this host.
``--prepare``: to any job system, each of whose tasks is ``--block I --into DIR``, one block that is measured here.
"""

import math
import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

import typer

from benchctl.cli.commands.watch import show_until_done
from benchctl.cli.conduct import experiment_progress
from benchctl.cli.failures import advising, exit_code_of
from benchctl.cli.options import RunOptions, refuse, refuse_certain
from benchctl.cli.plan import estimate_plan
from benchctl.cli.screen import note, say, warn
from benchctl.cluster.blocks import block_runs, check_block, run_block
from benchctl.cluster.local import BlocksOnSlots, end_with_parent, held_slots
from benchctl.cluster.slots import Slot, check_beside, slots_for
from benchctl.cluster.slurm import ArrayJob, BlocksOnSlurm, queued_blocks, require_slurm, submit_blocks
from benchctl.errors import INTERRUPTED_CODE, RecordError, RunError, UsageError
from benchctl.measure.devices import gpu_shortfalls, gpus_of_block
from benchctl.measure.directory import reopen_experiment, undone_runs
from benchctl.measure.experiment import Outcome
from benchctl.measure.interrupt import noting_interrupt
from benchctl.measure.machine import loads_at, shortfalls
from benchctl.measure.server.process import number_ranges
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs, servers
from benchctl.records.directory import RequestSets, ResultDirectory, Submission, arm_label
from benchctl.records.record import PlannedRun
from benchctl.units import count_of, duration
from benchctl.workload.prepare import LENGTHS_KEY, needs_lengths

_END_LIMIT_S: Final = 60.0
"""Time beyond that of a server's own end for the processes of blocks to end when they are asked to."""


def check_handing_out(profile: Profile, options: RunOptions) -> None:
    """Raise UsageError, before anything is written, for an experiment that cannot be measured where it shall be.

    A plan may be made where Slurm and devices are not: that is then a warning.
    """
    if options.is_shared and profile.stopping is not None:
        raise UsageError(
            "a stopping rule looks at the blocks in their order, and here they are handed out; leave out "
            "--until-precision (stopping in the profile), or --on and --prepare"
        )
    if options.is_shared and profile.loads_per_server == "auto":
        raise UsageError(
            "loads_per_server: auto chooses a number from the first blocks, and here all are handed out at once; "
            "set loads_per_server to a number ('benchctl noise show' names a cheap one), or leave out --on and "
            "--prepare"
        )
    if options.on == "slurm":
        check_slurm(profile, is_plan=options.dry_run)
    elif options.on == "local":
        check_slots(profile, options.parallel or 1, is_plan=options.dry_run)
    refuse_certain(gpu_shortfalls(profile), is_plan=options.dry_run or options.is_elsewhere)


def check_slurm(profile: Profile, *, is_plan: bool) -> None:
    """Raise UsageError, before anything is written, where blocks cannot be submitted."""
    if gpus_of_block(profile) is None:
        raise UsageError(
            f"profile {profile.name}: engine {profile.engine.kind!r} can do with or without a GPU, and Slurm gives "
            "a task what it asks for; set cluster.gpus_per_block to their number, such as --set "
            "cluster.gpus_per_block=1, or to 0"
        )
    if needs_lengths(profile):
        raise UsageError(
            f"profile {profile.name}: stop is replay-natural, and a server on this machine would measure them "
            "first; measure the lengths on the cluster (--set stop=natural --blocks 1 --on slurm) and name their "
            f"result directory: --set {LENGTHS_KEY}=DIR"
        )
    try:
        require_slurm()
    except UsageError as error:
        refuse(str(error), is_plan=is_plan)


def check_block_time(profile: Profile, requests: RequestSets, *, is_plan: bool) -> None:
    """Raise UsageError where one block is expected to need longer than its time limit; of a plan, warn."""
    limit_s, estimate = profile.cluster.time_s, estimate_plan(profile, requests)
    labels = [arm_label(variant, cell) for variant, cell in servers(profile)]
    needed_s = sum(estimate.run_s.get(label, 0.0) for label in labels)
    if limit_s is not None and needed_s > limit_s:
        limit = f"cluster.time is {profile.cluster.time}, {limit_s:.0f} s"
        needed = f"{count_of(len(labels), 'run')} needs about {needed_s:.0f} s ({estimate.basis})"
        refuse(f"{limit}, and one block of {needed}; raise cluster.time, or measure less in a run", is_plan=is_plan)


def print_submission(profile: Profile, blocks: Sequence[int]) -> None:
    """Print the job script, and the block of each index of the array."""
    if not blocks:
        say("no block is left to submit")
        return
    directory = Path("DIR")
    array = ArrayJob(directory, profile)
    with suppress(ImportError):  # told by check_slurm
        text = array.script(directory / "submissions" / "UTC", len(blocks))
        say("job script, for sbatch:")
        print(text.replace(str(Path.cwd() / directory), str(directory)))
        say(f"each task measures one block; the first: {shlex.join(array.words(blocks[0]))}")
        for index, block in enumerate(blocks):
            say(f"array index {index}: block {block}")


def measure_on_slurm(results: ResultDirectory, profile: Profile, options: RunOptions) -> Outcome | None:
    """Submit the blocks that are not done; returns their outcome, None when detached."""
    path, pending = results.path, undone_runs(results)
    go_on = shlex.join(["benchctl", "run", "--resume", str(path), "--on", "slurm"])
    array = ArrayJob(path.resolve(), profile, _further_words(options))
    tasks = queued_blocks(array.directory)
    blocks = sorted({planned.block for planned in pending} - set(tasks.values()))
    if tasks:
        queued = ", ".join(sorted(tasks))
        say(f"{_blocks_text(tasks.values())}: queued or running already, as {queued}")

    def tell_submitted(submission: Submission) -> None:
        text = _blocks_text(submission.tasks.values())
        say(f"submitted as job {submission.job}: {text}; logs in {path}/submissions")

    if blocks:
        submission = submit_blocks(array, blocks)
        tell_submitted(submission)
        tasks |= submission.tasks
    if options.detach:
        say(f"progress: {shlex.join(['benchctl', 'watch', str(path)])}")
        say(f"afterwards, also for blocks whose task was lost: {go_on}")
        return None
    watched = BlocksOnSlurm(array, tasks, on_submit=tell_submitted, on_problem=warn)

    def is_over() -> bool:
        watched.look()
        return watched.is_over

    try:
        show_until_done(results, is_over, is_quiet=options.is_quiet, width=profile.cluster.parallel)
    except KeyboardInterrupt:
        note(
            f"no longer watching: the tasks go on without this command. Progress: benchctl watch {path}; "
            f"cancel: scancel {' '.join(watched.jobs)}; afterwards: {go_on}"
        )
        raise
    if watched.given_up:
        logs = ", ".join(f"{path}/submissions/*/{task}_0_log.out" for task in watched.given_up.values())
        times = count_of(profile.cluster.resubmissions + 1, "time")
        raise RunError(
            f"{_blocks_text(watched.given_up)}: submitted {times}, and no task ended its block ({logs}); when the "
            f"reason is removed, continue with: {go_on}",
            cause="task-lost",
        )
    if watched.cancelled:
        text = f"{_blocks_text(watched.cancelled)}: the task was cancelled; what was measured is kept"
        note(f"{text}. Continue with: {go_on}")
        raise typer.Exit(INTERRUPTED_CODE)
    return _outcome_elsewhere(results, pending)


def _outcome_elsewhere(
    results: ResultDirectory, pending: Sequence[PlannedRun], of_others: Collection[int] = ()
) -> Outcome:
    """Numbers of the ``pending`` runs by their end, which other processes measured; one without an end has failed.

    The blocks ``of_others`` are left out.
    """
    ours = [planned for planned in pending if planned.block not in of_others]
    states: Counter[str] = Counter()
    for planned in ours:
        with suppress(RecordError, OSError):
            states[results.run(planned.run_id).read().state] += 1
    return Outcome(
        num_done=states["done"],
        num_failed=len(ours) - states["done"] - states["suspect"],
        num_suspect=states["suspect"],
        num_skipped=len(results.due_plan().runs) - len(pending),
    )


def _further_words(options: RunOptions) -> tuple[str, ...]:
    """Words of the command of each block that are those of this one."""
    return ("--keep-raw-logs",) if options.keep_raw_logs else ()


def _blocks_text(blocks: Iterable[int]) -> str:
    """``block 3``, or ``blocks 0-3, 7``."""
    numbers = frozenset(blocks)
    return f"{'block' if len(numbers) == 1 else 'blocks'} {number_ranges(numbers).replace(',', ', ')}"


def measure_block(path: Path, block: int, options: RunOptions) -> int:
    """Measure block ``block`` of ``path``, as far as it is not done; returns the exit code."""
    end_with_parent()
    reopened = reopen_experiment(path, None)
    results, profile, requests = reopened.results, reopened.profile, reopened.requests
    check_block(results, block)
    refuse_certain(gpu_shortfalls(profile))
    refuse_certain(shortfalls(loads_at(profile, requests), path))
    num_runs = len(block_runs(results, block))
    try:
        with experiment_progress(num_runs, num_runs, is_quiet=options.is_quiet) as listener:
            outcome = run_block(
                results,
                profile,
                requests,
                block,
                listener,
                keeps_raw_logs=options.keep_raw_logs,
                takes_over=options.take_over,
            )
    except KeyboardInterrupt:
        note(f"block {block} was interrupted; what was measured is kept, and its task may run again")
        raise
    from benchctl.cli.outcome import counts_text

    say(f"block {block}: {counts_text(outcome)}")
    return exit_code_of(outcome.num_failed, outcome.num_suspect)


def print_tasks(results: ResultDirectory) -> None:
    """Print the command of a task, and for which blocks it is needed."""
    path = shlex.quote(str(results.path))
    last = results.manifest().blocks - 1
    say(f"nothing was measured: each block from 0 to {last} is one task: benchctl run --block I --into {path}")
    say(f"progress: benchctl watch {path}; afterwards: benchctl compare {path}")


def check_slots(profile: Profile, num: int, *, is_plan: bool) -> None:
    """Raise UsageError, where this host has no place for ``num`` blocks; of a plan it is a warning."""
    try:
        check_beside(profile, num)
        with _held(profile, num):
            pass
    except UsageError as error:
        refuse(str(error), is_plan=is_plan)


def _held(profile: Profile, num: int) -> AbstractContextManager[tuple[Slot, ...]]:
    """The slots of this experiment, which no other benchctl has."""
    return held_slots(slots_for(profile, num), num, is_virtual=is_virtual(profile.engine.kind))


def print_slots(profile: Profile, requests: RequestSets, num: int) -> None:
    """Print the devices and cores of each slot, and the expected duration with ``num`` blocks at a time."""
    with suppress(UsageError):  # told by check_slots
        _tell_slots(profile, requests, slots_for(profile, num)[:num])


def _tell_slots(profile: Profile, requests: RequestSets, slots: Sequence[Slot]) -> None:
    say(f"{count_of(len(slots), 'block')} at a time on this host:")
    for slot in slots:
        say(f"  slot {slot.index}: {slot}")
    estimate = estimate_plan(profile, requests, visible=",".join(slots[0].gpus))
    if estimate.run_s:
        block_s = estimate.total_s(run for run in plan_runs(profile).runs if run.block == 0)
        rounds = math.ceil(profile.blocks / len(slots))
        what = " of the loads" if estimate.overhead_s is None else ""
        say(
            f"estimated duration{what} with {len(slots)} at a time: "
            f"{duration(rounds * block_s + estimate.around_s)}, {count_of(rounds, 'round')} of {duration(block_s)}",
        )


def measure_on_slots(
    results: ResultDirectory, profile: Profile, requests: RequestSets, options: RunOptions
) -> Outcome:
    """Measure the blocks that are not done, at most ``--parallel`` at a time; returns their outcome."""
    num, path = options.parallel or 1, results.path
    command = ["benchctl", "run", "--resume", str(path), "--on", "local", "--parallel", str(num)]
    with _held(profile, num) as slots:
        _tell_slots(profile, requests, slots)
        pending = undone_runs(results)
        blocks = BlocksOnSlots(results, slots, pending, _further_words(options), on_problem=warn)
        with advising(f"Continue with: {shlex.join(command)}"), noting_interrupt() as has_come:

            def is_over() -> bool:
                if not has_come():
                    blocks.advance()
                return blocks.is_over or has_come()

            is_quiet = options.is_quiet or bool(os.environ.get("CI"))
            try:
                show_until_done(results, is_over, is_quiet=is_quiet, width=len(slots))
            finally:
                blocks.end(profile.timeouts.stop_s + _END_LIMIT_S)
    for process in blocks.given_up:
        warn(f"block {process.block} was given up: its process ended twice")
    if blocks.refused is not None:
        raise blocks.refused.refusal()
    for block in blocks.of_others:
        warn(f"block {block} is measured by another process; 'benchctl watch {path}' shows it")
    if pending and len(blocks.of_others) == len({planned.block for planned in pending}):
        raise UsageError(f"{path}: every block that is left is being measured by other processes")
    return _outcome_elsewhere(results, pending, blocks.of_others)
