"""Progress of an experiment from its files: the state of each block, what is not well, and the time left.

It only reads. A record is read again when its file has changed since the last look.
"""

import datetime as dt
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from benchctl.errors import BenchctlError, RecordError, UsageError
from benchctl.records.directory import ResultDirectory, arm_label
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import ExperimentState
from benchctl.records.warning_codes import SUSPECT_CODES
from benchctl.records.writers import Owner, is_held, living_owner, owner_of, state_of_runs
from benchctl.units import s_from_ns
from benchctl.untrusted.files import is_there, stat_file

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
_AROUND_RUN_S: Final = 1.0
"""From the end of a run's server to the start of the next one's."""
_LATE_S: Final = 60.0
"""A run is late that takes three times as long as others did and this time more."""


class CurrentRun(Struct, frozen=True, kw_only=True):
    """The run of a block that goes on."""

    run_id: str
    """Name of the run."""
    arm: str
    """Its arm."""
    phase: Phase
    """Phase of the run."""
    elapsed_s: float | None
    """Seconds since it began, by the clocks of two hosts where another one measures; None where unknown."""


class BlockProgress(Struct, frozen=True, kw_only=True):
    """One block."""

    block: int
    """Its number, from 0."""
    state: BlockState
    """Its state."""
    num_runs: int
    """Its planned runs."""
    num_ended: int
    """Runs that need not be measured again before the block has ended: done, suspect or failed."""
    node: str | None
    """Node that measures it, or did; None before that, and where records are older."""
    devices: tuple[str, ...]
    """Identities of the devices that its server could use."""
    job: str | None
    """Job of the scheduler, such as ``slurm 17_3``."""
    current: CurrentRun | None
    """The run that goes on."""


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is not well."""

    block: int
    """The block."""
    kind: Literal["late", "lost", "interrupted", "failed", "suspect"]
    """What is not well."""
    run_id: str | None = None
    """None where it concerns the whole block."""
    message: str
    """The reason."""


class Progress(Struct, frozen=True, kw_only=True):
    """State of an experiment at one moment, which ``benchctl watch --json`` prints."""

    directory: str
    """The path as given."""
    profile: str
    """Name of the profile."""
    state: ExperimentState
    """State as ``benchctl list`` shows it."""
    is_shared: bool
    """Each block has a directory of its own, and is measured by a process of its own."""
    num_runs: int
    """Planned runs."""
    runs: Mapping[str, int]
    """Runs by state, without those that were not begun."""
    time_left_s: float | None
    """Zero when every run has ended; None before a run has, while one is late, and where nobody knows how many
    blocks are measured at a time."""
    blocks: tuple[BlockProgress, ...]
    """The blocks, in order."""
    problems: tuple[Problem, ...]
    """What is not well."""

    @property
    def num_ended(self) -> int:
        return sum(block.num_ended for block in self.blocks)

    @property
    def has_ended(self) -> bool:
        """Every run has ended, so that nothing is left to measure."""
        return self.num_ended == self.num_runs

    @property
    def running(self) -> tuple[BlockProgress, ...]:
        """The blocks that a process measures, as far as can be told."""
        return tuple(block for block in self.blocks if block.state == "running")


class Watcher:
    """Reads the progress of ``results``, again and again.

    ``width`` is the number of blocks at a time that its caller expects, which counts until more are measured.
    """

    def __init__(self, results: ResultDirectory, width: int | None = None) -> None:
        self._results = results
        self._width = width or 0
        self._records: dict[str, tuple[tuple[int, int], RunRecord]] = {}
        """Record of each run with time and size of its file."""
        self._latest: Progress | None = None

    def look(self) -> Progress:
        """The progress now; that of the last look where files cannot be read for a moment.

        Raises UsageError when the directory is not there any more, and what is wrong with it at the first look.
        """
        path = self._results.path
        try:
            self._latest = self._progress()
        except (BenchctlError, OSError):
            if self._latest is None:
                raise
            if not path.exists():
                raise UsageError(
                    f"{path} is not there any more: it was moved or deleted while it was watched"
                ) from None
        return self._latest

    def _progress(self) -> Progress:
        results, manifest, planned = self._results, self._results.manifest(), self._results.due_plan().runs
        records = self._read_records(planned)
        left = [run for run in planned if run.run_id not in records or not records[run.run_id].has_ended]
        owners, is_measured = dict[int, Owner](), manifest.state == "running" and is_held(results.path)
        alive = {run.block for run in left[:1]} if is_measured else set()
        if results.is_divided:
            owners = {block: owner for block in results.begun_blocks() if (owner := owner_of(results, block))}
            alive = {block for block in owners if living_owner(results, block)}
        blocks = tuple(
            self._block(block, tuple(runs), records, owners.get(block), is_alive=block in alive)
            for block, runs in groupby(planned, key=lambda run: run.block)
        )
        self._width = max(self._width, len(alive))
        expected_s = _expected_s(records.values())
        problems = tuple(_problems(blocks, planned, records, expected_s))
        is_late = any(problem.kind == "late" for problem in problems)
        return Progress(
            directory=str(results.path),
            profile=manifest.profile,
            state=state_of_runs(
                [records.get(run.run_id) for run in planned], is_measured=is_measured or bool(alive)
            ),
            is_shared=results.is_divided,
            num_runs=len(planned),
            runs=dict(sorted(Counter(record.state for record in records.values()).items())),
            time_left_s=None if is_late else _time_left_s(blocks, left, expected_s, self._width),
            blocks=blocks,
            problems=problems,
        )

    def _read_records(self, planned: Iterable[PlannedRun]) -> dict[str, RunRecord]:
        """The records of the runs that were begun; the last one of a run where it cannot be read now."""
        for run in planned:
            directory = self._results.run(run.run_id)
            try:
                status = stat_file(directory.path / "run.json", within=directory.root)
                stamp = (status.st_mtime_ns, status.st_size)
                if run.run_id not in self._records or self._records[run.run_id][0] != stamp:
                    self._records[run.run_id] = (stamp, directory.read())
            except FileNotFoundError:
                self._records.pop(run.run_id, None)
            except (RecordError, OSError):
                continue
        return {run.run_id: self._records[run.run_id][1] for run in planned if run.run_id in self._records}

    def _block(
        self,
        block: int,
        runs: Sequence[PlannedRun],
        records: Mapping[str, RunRecord],
        owner: Owner | None,
        *,
        is_alive: bool,
    ) -> BlockProgress:
        begun = [record for run in runs if (record := records.get(run.run_id)) is not None]
        current = next((record for record in begun if is_alive and record.state == "running"), None)
        newest = current or (begun[-1] if begun else None)
        node = None if newest is None else newest.node
        state = state_of_runs([records.get(run.run_id) for run in runs], is_measured=is_alive)
        is_lost = owner is not None and state in {"planned", "interrupted"}
        return BlockProgress(
            block=block,
            state="lost" if is_lost else "waiting" if state == "planned" else state,
            num_runs=len(runs),
            num_ended=sum(record.has_ended for record in begun),
            node=owner.node if owner else None if newest is None else newest.node_name,
            devices=() if node is None else tuple(gpu.uuid or f"{gpu.index}: {gpu.name}" for gpu in node.gpus),
            job=owner.job if owner else None if node is None else node.job,
            current=None if current is None else self._current(current),
        )

    def _current(self, record: RunRecord) -> CurrentRun:
        phase: Phase = "warm-up"
        if record.times.ready_ns is None:
            phase = "starting"
        elif record.times.stop_ns is not None:
            phase = "ending"
        elif is_there(self._results.run(record.run_id).path / "client.jsonl", within=self._results.path):
            phase = "load"
        return CurrentRun(
            run_id=record.run_id,
            arm=arm_label(record.variant, record.cell),
            phase=phase,
            elapsed_s=_elapsed_s(record),
        )


def _expected_s(records: Iterable[RunRecord]) -> Mapping[str, float]:
    """Seconds that a run takes by its arm: the median of those that ended, or else the mean of the other arms.

    Empty before a run has ended.
    """
    took_s = defaultdict[str, list[float]](list)
    for record in records:
        launch_ns, stop_ns = record.times.launch_ns, record.times.stop_ns
        if record.state in {"done", "suspect"} and launch_ns and stop_ns and not record.is_simulated:
            took_s[arm_label(record.variant, record.cell)].append(s_from_ns(stop_ns - launch_ns) + _AROUND_RUN_S)
    run_s = {arm: median(each) for arm, each in took_s.items()}
    return defaultdict(lambda: fmean(run_s.values()), run_s)


def _time_left_s(
    blocks: Iterable[BlockProgress], left: Sequence[PlannedRun], expected_s: Mapping[str, float], width: int
) -> float | None:
    """Seconds until the runs that are ``left`` have ended, each as expected: each block that waits begins on the
    first of ``width`` places that is free.
    """
    if not left or not expected_s or not width:
        return None if left else 0.0
    rest_s = defaultdict[int, float](float)
    for run in left:
        rest_s[run.block] += expected_s[arm_label(run.variant, run.cell)]
    ends_s = list[float]()
    for block in blocks:
        if block.state == "running":
            current, rest = block.current, rest_s.pop(block.block, 0.0)
            if current is not None:
                rest -= min(current.elapsed_s or 0.0, expected_s[current.arm])
            ends_s.append(rest)
    ends_s += [0.0] * (width - len(ends_s))
    heapq.heapify(ends_s)
    for waiting_s in rest_s.values():
        heapq.heapreplace(ends_s, ends_s[0] + waiting_s)
    return max(ends_s)


def _elapsed_s(record: RunRecord) -> float | None:
    try:
        elapsed = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(record.started_at or "")
    except (TypeError, ValueError):  # without a zone, or no time at all
        return None
    return max(elapsed.total_seconds(), 0.0)


def _problems(
    blocks: Iterable[BlockProgress],
    planned: Iterable[PlannedRun],
    records: Mapping[str, RunRecord],
    expected_s: Mapping[str, float],
) -> Iterator[Problem]:
    for block in blocks:
        current, node = block.current, block.node or "its node"
        is_slurm = (block.job or "").startswith("slurm")
        if current and expected_s and (current.elapsed_s or 0.0) > 3 * expected_s[current.arm] + _LATE_S:
            loss = f"waiting for Slurm to give up {node} (SlurmdTimeout)" if is_slurm else f"{node} is lost"
            message = f"{loss}, or the run hangs: it takes more than three times as long as others"
            yield Problem(block=block.block, kind="late", run_id=current.run_id, message=message)
        if block.state in {"lost", "interrupted"}:
            where = "" if block.node is None else f" on {block.node}" + (f" ({block.job})" if block.job else "")
            end = "; its process ended without giving it back" if block.state == "lost" else ""
            end += f"; waiting for Slurm to give up its task, or {node} (SlurmdTimeout)" if end and is_slurm else ""
            message = f"{block.num_ended} of {block.num_runs} runs ended{where}{end}"
            yield Problem(block=block.block, kind=block.state, message=message)
    for run in planned:
        record = records.get(run.run_id)
        if record is not None and record.state == "suspect":
            codes = dict.fromkeys(warning.code for warning in record.warnings)
            yield Problem(
                block=run.block,
                kind="suspect",
                run_id=run.run_id,
                message=", ".join(
                    [code for code in codes if code in SUSPECT_CODES] or list(codes) or ["no reason recorded"]
                ),
            )
        elif record is not None and record.has_ended and record.state == "failed":
            failure = record.failure
            message = "no cause recorded" if failure is None else f"{failure.cause}: {failure.message}"
            yield Problem(block=run.block, kind="failed", run_id=run.run_id, message=message)
