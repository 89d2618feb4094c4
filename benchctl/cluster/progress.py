"""Progress of an experiment as its files show it: blocks, the runs that go on, time left, and what is not well.

Pure: a ``Snapshot`` in, a ``Progress`` out. ``snapshot.py`` reads the files, ``forecast.py`` has the
time left.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from benchctl.cluster.forecast import ArmDuration, BlockWork, TimeLeft, arm_durations, time_left
from benchctl.records.directory import arm_label
from benchctl.records.manifest import Manifest, PlannedRun
from benchctl.records.record import ExperimentState
from benchctl.records.run import RunRecord
from benchctl.records.warning_codes import SUSPECT_CODES

BlockState: TypeAlias = Literal["waiting", "running", "done", "suspect", "failed", "lost", "interrupted"]
Phase: TypeAlias = Literal["starting", "warm-up", "load", "ending"]
STATES: Final[tuple[BlockState, ...]] = (
    "running",
    "lost",
    "failed",
    "suspect",
    "interrupted",
    "waiting",
    "done",
)
"""States of a block in the order in which they are shown."""
ENDED: Final[frozenset[BlockState]] = frozenset({"done", "suspect", "failed"})
"""States of a block of which every run has ended."""
_FINAL: Final = frozenset({"done", "suspect", "failed"})
_INTERRUPTED: Final = "interrupted"
"""Cause of a run that a signal ended; it is measured again when the block is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClaim:
    """The newest claim of a block, as far as a stranger can judge it."""

    generation: int
    node: str
    hostname: str
    job: str | None = None
    is_held: bool = True
    """Not released by its owner."""
    is_dead: bool = False
    """Held by a process that no longer exists, or gave no sign of life for as long as its lease lasts."""
    beaten_at: str | None = None
    """Last sign of life by the owner's own clock, UTC, ISO 8601; for people only."""
    lease_s: float = 0.0
    """Seconds without a sign of life after which the owner counts as dead."""

    @property
    def is_alive(self) -> bool:
        """A process measures the block, as far as can be told."""
        return self.is_held and not self.is_dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The records of an experiment at one moment."""

    path: Path
    manifest: Manifest
    runs: tuple[PlannedRun, ...]
    """Planned runs in order, without those that a stopping rule made unnecessary."""
    records: Mapping[str, RunRecord]
    """Records of the runs that were begun, by ``run_id``."""
    is_shared: bool = False
    """Blocks are claimed one by one, by processes of any host."""
    claims: Mapping[int, BlockClaim] = field(default_factory=dict)
    """Newest claim of each block of a shared directory that was ever claimed."""
    is_measured: bool = False
    """One process measures all of an ordinary directory now."""
    elapsed_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each running run began, by ``run_id``; absent where unknown."""
    loading: frozenset[str] = frozenset()
    """Running runs whose load has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRun:
    """The run of a block that goes on."""

    run_id: str
    arm: str
    phase: Phase
    elapsed_s: float | None
    """Seconds since it began; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgress:
    """One block."""

    block: int
    state: BlockState
    num_runs: int
    num_ended: int
    """Runs that need not be measured again before the block has ended: done, suspect or failed."""
    node: str | None = None
    """Node that measures it, or did; None before that, and where records are older."""
    devices: tuple[str, ...] = ()
    """Identities of the devices that its server could use."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""
    generation: int | None = None
    """Number of its newest claim; None without one."""
    beaten_at: str | None = None
    """Last sign of life of the process that holds it, by that process's clock."""
    current: CurrentRun | None = None


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
    measured = _measured_block(snapshot)
    blocks = tuple(
        _block_progress(snapshot, block, runs, is_measured=block == measured) for block, runs in runs_of.items()
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


def by_block(runs: Iterable[PlannedRun]) -> dict[int, list[PlannedRun]]:
    """The runs of each block in planned order, by block."""
    blocks: dict[int, list[PlannedRun]] = {}
    for planned in runs:
        blocks.setdefault(planned.block, []).append(planned)
    return dict(sorted(blocks.items()))


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
    left = [run for run in runs if not _has_ended(snapshot.records.get(run.run_id))]
    left.sort(key=lambda run: run.run_id != current)
    return BlockWork(
        node=block.node,
        arms=tuple(arm_label(run.variant, run.cell) for run in left),
        is_running=block.state == "running",
        elapsed_s=(block.current.elapsed_s or 0.0) if block.current is not None else 0.0,
    )


def _measured_block(snapshot: Snapshot) -> int | None:
    """The block on which the process of an ordinary directory works: of its running run, else of the next one."""
    if snapshot.is_shared or not snapshot.is_measured:
        return None
    records = snapshot.records
    running = [run.block for run in snapshot.runs if _state(records.get(run.run_id)) == "running"]
    left = [run.block for run in snapshot.runs if not _has_ended(records.get(run.run_id))]
    not_done = [run.block for run in snapshot.runs if _state(records.get(run.run_id)) != "done"]
    return next(iter([*running, *left, *not_done]), None)


def _state(record: RunRecord | None) -> str:
    return "planned" if record is None else record.state


def _has_ended(record: RunRecord | None) -> bool:
    if record is None or record.state not in _FINAL:
        return False
    return record.failure is None or record.failure.cause != _INTERRUPTED


def _block_progress(
    snapshot: Snapshot, block: int, runs: Sequence[PlannedRun], *, is_measured: bool
) -> BlockProgress:
    claim = snapshot.claims.get(block)
    records = {run.run_id: record for run in runs if (record := snapshot.records.get(run.run_id)) is not None}
    is_running = is_measured if claim is None else claim.is_alive
    running = next((run for run in runs if is_running and _state(records.get(run.run_id)) == "running"), None)
    newest = records[running.run_id] if running else next(reversed(records.values()), None)
    node = newest.node if newest is not None else None
    host = None if newest is None else newest.node_name
    return BlockProgress(
        block=block,
        state=_block_state(runs, records, claim, is_running=is_running),
        num_runs=len(runs),
        num_ended=sum(_has_ended(record) for record in records.values()),
        node=host if claim is None else claim.node,
        devices=tuple(gpu.uuid or f"{gpu.index}: {gpu.name}" for gpu in node.gpus) if node is not None else (),
        job=claim.job if claim is not None else node.job if node is not None else None,
        generation=None if claim is None else claim.generation,
        beaten_at=claim.beaten_at if claim is not None and claim.is_held else None,
        current=None if running is None else _current_run(snapshot, running, records[running.run_id]),
    )


def _block_state(
    runs: Sequence[PlannedRun], records: Mapping[str, RunRecord], claim: BlockClaim | None, *, is_running: bool
) -> BlockState:
    if is_running:
        return "running"
    if claim is not None and claim.is_held:
        return "lost"
    if all(_has_ended(records.get(run.run_id)) for run in runs):
        states = {record.state for record in records.values()}
        return "failed" if "failed" in states else "suspect" if "suspect" in states else "done"
    return "interrupted" if records else "waiting"


def _current_run(snapshot: Snapshot, planned: PlannedRun, record: RunRecord) -> CurrentRun:
    return CurrentRun(
        run_id=planned.run_id,
        arm=arm_label(planned.variant, planned.cell),
        phase=_phase(record, is_loading=planned.run_id in snapshot.loading),
        elapsed_s=snapshot.elapsed_s.get(planned.run_id),
    )


def _phase(record: RunRecord, *, is_loading: bool) -> Phase:
    if record.times.stop_ns is not None:
        return "ending"
    if record.times.ready_ns is None:
        return "starting"
    return "load" if is_loading else "warm-up"


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
            if record is not None and _has_ended(record) and record.state != "done":
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
