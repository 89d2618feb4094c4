"""One block of a shared directory: claimed, measured on one node, given back.

Everything that is written is fenced: it appears only while the claim stands, so that a process which was paused,
or cut off from the disk, leaves the block to the one that took it over.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

from benchctl.errors import (
    KEPT,
    BenchctlError,
    OutOfTimeError,
    RecordError,
    UsageError,
    as_run_error,
    as_usage_error,
    is_of_the_system,
)
from benchctl.measure.durations import remember_duration, seconds_by_arm
from benchctl.measure.experiment import FailedArms, Listener, MeasureRun, Outcome, measure_feasible
from benchctl.measure.interrupt import warned_by_scheduler
from benchctl.measure.measured_run import ignore
from benchctl.measure.resume.here import Here, this_owner
from benchctl.measure.resume.pending import pending_in_block
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.shared.assembly import assemble
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms
from benchctl.records.claims import LEASE_S, HeldBlock, is_shared, settled
from benchctl.records.directory import ResultDirectory, arm_label
from benchctl.records.integrity import BlockDigests, digest_of, files_of_block, run_record_path, write_block_digests
from benchctl.records.record import PlannedRun, PreparedRequest
from benchctl.records.schema import SCHEMA_VERSION, RunState
from benchctl.records.shared_claims import LeaseWatch, claimed_block


def run_block(
    results: ResultDirectory,
    profile: Profile,
    requests: Sequence[PreparedRequest],
    block: int,
    listener: Listener,
    measure: MeasureRun = measure_run,
    *,
    time_left: Callable[[], float | None] = lambda: None,
    keeps_raw_logs: bool = False,
    lease_s: float = LEASE_S,
    watch: LeaseWatch | None = None,
    on_wait: Callable[[str], None] = ignore,
) -> Outcome:
    """Measure what is not done of one block, in planned order.

    ``time_left`` gives the seconds until this process must end; None where nobody knows. Raises ClaimedError when a
    live process holds the block, LostClaimError when another one may have taken it over, OutOfTimeError before what
    would not end in time, KeyboardInterrupt after a signal, UsageError and RunError as ``run_experiment`` does.
    """
    check_block(results, block)
    here = Here(profile)
    if (num_done := _num_done(results, block, here)) is not None:
        with _explained(results, block):
            assemble(results)  # unless the last owner could not
        return Outcome(num_done=0, num_failed=0, num_suspect=0, num_skipped=num_done)
    with warned_by_scheduler(), _explained(results, block):
        holding = claimed_block(
            results, block, this_owner(), lease_s, watch=watch, on_wait=on_wait, on_lost=_interrupt_ourselves
        )
        with holding as held:
            context = RunContext(
                profile=profile,
                requests=tuple(requests),
                on_progress=listener.on_request_end,
                on_log_line=listener.on_log_line,
                keeps_raw_logs=keeps_raw_logs,
            )
            try:
                outcome = _Block(results, context, held, here, time_left).measure(listener, measure)
            except KeyboardInterrupt:
                held.check()  # the interrupt was our own where the claim is lost
                raise
        assemble(results)
    return outcome


def check_block(results: ResultDirectory, block: int) -> None:
    """Raise UsageError for a block that the experiment does not have, and for a directory that is not shared."""
    num_blocks = results.manifest().blocks
    if block >= num_blocks:
        raise UsageError(
            f"{results.path} has {num_blocks} blocks, from 0 to {num_blocks - 1}; --block {block} is none"
        )
    if not is_shared(results.path):
        raise UsageError(
            f"{results.path} is measured by one process, so that its blocks cannot be measured one by one; hand "
            f"them out with 'benchctl run --resume {results.path} --prepare' first"
        )


def _num_done(results: ResultDirectory, block: int, here: Here) -> int | None:
    """The number of runs of a block that is done and recorded; None for any other block."""
    runs = block_runs(results, block)
    if pending_in_block(results, runs, here):
        return None
    recorded = files_of_block(results.path, (run.run_id for run in runs))
    return len(runs) if len(recorded) == len(runs) else None


def block_runs(results: ResultDirectory, block: int) -> tuple[PlannedRun, ...]:
    """The runs of one block in planned order."""
    return tuple(run for run in results.due_plan().runs if run.block == block)


def _interrupt_ourselves() -> None:
    """End the run in progress; called by another thread."""
    os.kill(os.getpid(), signal.SIGUSR1)


@contextmanager
def _explained(results: ResultDirectory, block: int) -> Iterator[None]:
    """Refusals of the system as RunError, with what to do next."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BenchctlError) or not is_of_the_system(error):
            raise
        next_step = f", then run the task of block {block} again; {KEPT}"
        raise as_run_error(error, results.path, next_step=next_step) from error


class _Block:
    """A block that this process holds: its runs, their digests, and the time that is left for them."""

    def __init__(
        self,
        results: ResultDirectory,
        context: RunContext,
        held: HeldBlock,
        here: Here,
        time_left: Callable[[], float | None],
    ) -> None:
        self._results = results
        self._context = context
        self._held = held
        self._time_left = time_left
        self._here = here
        self._runs = block_runs(results, held.block)
        self._arm_s: Mapping[str, float] | None = None

    def measure(self, listener: Listener, measure: MeasureRun) -> Outcome:
        pending = pending_in_block(self._results, self._runs, self._here)
        states, num_skipped = Counter[RunState](), len(self._runs) - len(pending)
        self._begin(pending)
        failed_arms = FailedArms()
        requests, profile = self._context.requests, self._context.profile
        num_arms = len(arms(profile))
        for number, planned in enumerate(pending):
            self._check_time(pending[number:])
            self._held.check()
            listener.on_run_start(planned, len(requests))
            began_s = time.monotonic()
            directory = self._results.run(planned.run_id, fence=self._held.check)
            with self._recording_end(planned):
                record = measure_feasible(measure, self._context, planned, directory, failed_arms)
            remember_duration(profile, requests, record, time.monotonic() - began_s, self._here.gpu_names)
            states[record.state] += 1
            listener.on_run_end(planned, record)
            if len(failed_arms.refused) == num_arms:
                break
        return Outcome(
            num_done=states["done"],
            num_failed=states["failed"],
            num_suspect=states["suspect"],
            num_skipped=num_skipped,
        )

    def _begin(self, pending: Sequence[PlannedRun]) -> None:
        """Note what became of runs of an owner that died, and which runs have ended.

        Raises UsageError where nothing can be written.
        """
        try:
            for planned in pending:
                with suppress(RecordError):  # it is measured again
                    run = self._results.run(planned.run_id, fence=self._held.check)
                    if run.is_begun() and (record := run.read()).state == "running":
                        run.write(settled(record))
            run_ids = tuple(planned.run_id for planned in self._runs)
            earlier = files_of_block(self._results.path, run_ids)
            self._digests = BlockDigests(
                schema_version=SCHEMA_VERSION,
                block=self._held.block,
                generation=self._held.generation,
                runs=run_ids,
                files=earlier,
            )
            for planned in self._runs:
                if run_record_path(planned.run_id) not in earlier:
                    self._record(planned)  # its owner died before it could
            self._write_digests()
        except OSError as error:
            remedy = "free space, or correct the permissions, and run the task again"
            raise as_usage_error(error, self._results.path, remedy=remedy) from error

    def _check_time(self, pending: Sequence[PlannedRun]) -> None:
        """Raise OutOfTimeError where the time left is known to be too short for the rest of the block."""
        left_s = self._time_left()
        if left_s is None:
            return
        labels = [arm_label(planned.variant, planned.cell) for planned in pending]
        if self._arm_s is None:
            profile, requests = self._context.profile, self._context.requests
            self._arm_s = seconds_by_arm(self._results, profile, requests, labels, self._here.gpu_names)
        rest_s = sum(self._arm_s[label] for label in labels) if set(labels) <= self._arm_s.keys() else None
        if rest_s is not None and rest_s > left_s:
            num_runs = "1 run" if len(pending) == 1 else f"{len(pending)} runs"
            raise OutOfTimeError(
                f"{self._results.path}: {num_runs} of block {self._held.block} would take about {rest_s:.0f} s, "
                f"and {max(left_s, 0.0):.0f} s are left; nothing of that was begun: run the task again with more "
                "time"
            )

    @contextmanager
    def _recording_end(self, planned: PlannedRun) -> Iterator[None]:
        """Remove the digest of a run's record while it is measured, and store the new one however it ends."""
        with suppress(OSError):  # a full disk is reported as the failure of the run
            name = run_record_path(planned.run_id)
            files = {each: digest for each, digest in self._digests.files.items() if each != name}
            if files != self._digests.files:
                self._digests = msgspec.structs.replace(self._digests, files=files)
                self._write_digests()
        try:
            yield
        finally:
            with suppress(OSError):
                self._record(planned)
                self._write_digests()

    def _record(self, planned: PlannedRun) -> None:
        """Note the digest of a run's record, if it has one."""
        name = run_record_path(planned.run_id)
        with suppress(FileNotFoundError):
            digest = digest_of(self._results.path / name, within=self._results.path)
            self._digests = msgspec.structs.replace(self._digests, files=self._digests.files | {name: digest})

    def _write_digests(self) -> None:
        write_block_digests(self._results.path, self._digests, fence=self._held.check)
