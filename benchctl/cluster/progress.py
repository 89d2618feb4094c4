"""Progress of an experiment as its files show it: blocks, the runs that go on, time left, and what is not well.

Pure: a ``Snapshot`` in, a ``Progress`` out. ``snapshot.py`` reads the files, ``block_progress.py`` has the blocks,
``forecast.py`` the time left.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchctl.cluster.block_progress import (
    ENDED,
    STATES,
    BlockProgress,
    BlockState,
    Snapshot,
    block_progress,
    by_block,
    measured_block,
)
from benchctl.cluster.forecast import ArmDuration, BlockWork, TimeLeft, arm_durations, time_left
from benchctl.records.directory import arm_label
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import ExperimentState
from benchctl.records.warning_codes import SUSPECT_CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not well."""

    block: int
    kind: Literal["lost", "interrupted", "failed", "suspect"]
    run_id: str | None
    """None where it concerns the whole block."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of an experiment at one moment."""

    path: Path
    profile: str
    state: ExperimentState
    is_shared: bool
    blocks: tuple[BlockProgress, ...]
    num_runs: int
    run_states: Mapping[str, int]
    """Runs by state, without those that were not begun."""
    arms: tuple[ArmDuration, ...]
    """Durations by arm, in the order of their first runs."""
    time_left: TimeLeft | None
    """Zero when every run has ended; None where it cannot be estimated."""
    problems: tuple[Problem, ...]

    @property
    def block_states(self) -> Counter[BlockState]:
        """Number of blocks in each state."""
        return Counter(block.state for block in self.blocks)

    @property
    def has_ended(self) -> bool:
        """Every run has ended, so that nothing is left to measure."""
        return all(block.state in ENDED for block in self.blocks)

    @property
    def is_idle(self) -> bool:
        """No process measures, as far as can be told."""
        return not any(block.state == "running" for block in self.blocks)


def progress_of(
    snapshot: Snapshot, *, width: int | None = None, earlier_s: Mapping[str, float] | None = None
) -> Progress:
    """The progress that the records of ``snapshot`` show.

    ``width`` is the number of blocks that will be measured at a time, if that is more than now; ``earlier_s`` the
    duration of a run in earlier experiments, by arm: it counts where no run of the arm has ended.
    """
    runs_of = by_block(snapshot.runs)
    measured = measured_block(snapshot)
    blocks = tuple(
        block_progress(snapshot, block, runs, is_measured=block == measured) for block, runs in runs_of.items()
    )
    records = [record for run in snapshot.runs if (record := snapshot.records.get(run.run_id)) is not None]
    current = [block.current for block in blocks if block.current is not None]
    labels = dict.fromkeys(arm_label(run.variant, run.cell) for run in snapshot.runs)
    elapsed_s = {
        arm: [run.elapsed_s for run in current if run.arm == arm and run.elapsed_s is not None] for arm in labels
    }
    arms = arm_durations(tuple(labels), records, earlier_s, elapsed_s)
    work = [_work(snapshot, block, runs_of[block.block]) for block in blocks if block.state not in ENDED]
    in_order = None if measured is None else 1
    return Progress(
        path=snapshot.path,
        profile=snapshot.manifest.profile,
        state=_experiment_state(snapshot, blocks),
        is_shared=snapshot.is_shared,
        blocks=blocks,
        num_runs=len(snapshot.runs),
        run_states=dict(Counter(record.state for record in records)),
        arms=arms,
        time_left=time_left(work, records, arms, width if snapshot.is_shared else in_order),
        problems=tuple(_problems(snapshot, blocks, runs_of)),
    )


def progress_document(progress: Progress) -> dict[str, Any]:
    """As JSON; ``docs/tasks/watch-an-experiment.md`` describes it."""
    return {
        "directory": str(progress.path),
        "profile": progress.profile,
        "state": progress.state,
        "is_shared": progress.is_shared,
        "num_runs": progress.num_runs,
        "runs": dict(sorted(progress.run_states.items())),
        "num_blocks": len(progress.blocks),
        "blocks": {state: progress.block_states[state] for state in STATES},
        "time_left": msgspec.to_builtins(progress.time_left),
        "arms": [msgspec.to_builtins(arm) for arm in progress.arms],
        "details": [msgspec.to_builtins(block) for block in progress.blocks],
        "problems": [msgspec.to_builtins(problem) for problem in progress.problems],
    }


def _work(snapshot: Snapshot, block: BlockProgress, runs: Sequence[PlannedRun]) -> BlockWork:
    """The runs of a block that have not ended, the current one first."""
    current = None if block.current is None else block.current.run_id
    left = [run for run in runs if not snapshot.has_ended(run)]
    left.sort(key=lambda run: run.run_id != current)
    return BlockWork(
        node=block.node,
        arms=tuple(arm_label(run.variant, run.cell) for run in left),
        is_running=block.state == "running",
        elapsed_s=(block.current.elapsed_s or 0.0) if block.current is not None else 0.0,
    )


def _experiment_state(snapshot: Snapshot, blocks: Iterable[BlockProgress]) -> ExperimentState:
    states = {block.state for block in blocks}
    if snapshot.is_measured or "running" in states:
        return "running"
    if states <= ENDED:
        return "failed" if "failed" in states else "suspect" if "suspect" in states else "done"
    if states <= {"waiting"}:
        return "planned"
    return "interrupted"


def _problems(
    snapshot: Snapshot, blocks: Sequence[BlockProgress], runs_of: Mapping[int, Sequence[PlannedRun]]
) -> Iterable[Problem]:
    for block in blocks:
        if block.state in {"lost", "interrupted"}:
            yield _unfinished(block)
        for planned in runs_of[block.block]:
            record = snapshot.records.get(planned.run_id)
            if record is not None and record.has_ended and record.state != "done":
                yield _not_done(planned, record)


def _unfinished(block: BlockProgress) -> Problem:
    where = "" if block.node is None else f" on {block.node}" + (f" ({block.job})" if block.job else "")
    message = f"{block.num_ended} of {block.num_runs} runs ended{where}"
    if block.state == "lost":
        message += f"; the process gave no sign of life since {block.beaten_at}" if block.beaten_at else ""
        return Problem(block=block.block, kind="lost", run_id=None, message=message)
    return Problem(block=block.block, kind="interrupted", run_id=None, message=message)


def _not_done(planned: PlannedRun, record: RunRecord) -> Problem:
    if record.state == "suspect":
        codes = dict.fromkeys(warning.code for warning in record.warnings)
        decisive = [code for code in codes if code in SUSPECT_CODES] or list(codes) or ["no reason recorded"]
        return Problem(block=planned.block, kind="suspect", run_id=planned.run_id, message=", ".join(decisive))
    failure = record.failure
    message = "no cause recorded" if failure is None else f"{failure.cause}: {failure.message}"
    return Problem(block=planned.block, kind="failed", run_id=planned.run_id, message=message)
