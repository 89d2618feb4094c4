"""One block of an experiment as its records show it: its state, and the run of it that goes on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.records.directory import arm_label
from benchctl.records.record import Manifest, PlannedRun, RunRecord

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

    def has_ended(self, planned: PlannedRun) -> bool:
        """Nothing is left to measure of a run, as ``RunRecord.has_ended``; false for one that was not begun."""
        record = self.records.get(planned.run_id)
        return record is not None and record.has_ended


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


def by_block(runs: Iterable[PlannedRun]) -> dict[int, list[PlannedRun]]:
    """The runs of each block in planned order, by block."""
    blocks: dict[int, list[PlannedRun]] = {}
    for planned in runs:
        blocks.setdefault(planned.block, []).append(planned)
    return dict(sorted(blocks.items()))


def measured_block(snapshot: Snapshot) -> int | None:
    """The block on which the process of an ordinary directory works: of its running run, else of the next one."""
    if snapshot.is_shared or not snapshot.is_measured:
        return None
    records = snapshot.records
    running = [run.block for run in snapshot.runs if _state(records.get(run.run_id)) == "running"]
    left = [run.block for run in snapshot.runs if not snapshot.has_ended(run)]
    not_done = [run.block for run in snapshot.runs if _state(records.get(run.run_id)) != "done"]
    return next(iter([*running, *left, *not_done]), None)


def _state(record: RunRecord | None) -> str:
    return "planned" if record is None else record.state


def block_progress(
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
        num_ended=sum(record.has_ended for record in records.values()),
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
    if len(records) == len(runs) and all(record.has_ended for record in records.values()):
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
