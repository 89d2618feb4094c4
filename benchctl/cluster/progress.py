"""Progress of an experiment from its files: the state of each block, what is not well, and the time left.

It only reads. A record is read again when its file has changed since the last look.
"""

import datetime as dt
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal, TypeAlias

import msgspec

from benchctl.errors import BenchctlError, RecordError, UsageError
from benchctl.measure.durations import estimate_durations
from benchctl.profile.load import parse_profile
from benchctl.records.directory import ResultDirectory, arm_label, read_submissions
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import ExperimentState
from benchctl.records.stores import stored_durations
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
ENDED: Final[frozenset[BlockState]] = frozenset({"done", "suspect", "failed"})
"""States of a block of which every run has ended."""
_AROUND_RUN_S: Final = 1.0
"""From the end of a run's server to the start of the next one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRun:
    """The run of a block that goes on."""

    run_id: str
    arm: str
    phase: Phase
    elapsed_s: float | None
    """Seconds since it began, by the clocks of two hosts where another one measures; None where unknown."""


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
    current: CurrentRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDuration:
    """Duration of the runs of one arm, from the start of one to the start of the next."""

    arm: str
    num_ended: int
    """Runs that ended regularly, whose median it is."""
    run_s: float | None
    """Median in seconds; of earlier experiments where no run ended; None where those are unknown, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Seconds until the last run has ended."""

    s: float
    num_at_a_time: int
    """Blocks measured at a time."""
    source: Literal["ended-runs", "earlier-experiments"]


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
    """Each block has a directory of its own, and is measured by a process of its own."""
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


class Watcher:
    """Reads the progress of ``results``, again and again.

    ``width`` is the number of blocks at a time that its caller expects, which counts until more are measured.
    """

    def __init__(self, results: ResultDirectory, width: int | None = None) -> None:
        self._results = results
        self._width = width or 0
        self._records: dict[str, tuple[tuple[int, int], RunRecord]] = {}
        """Record of each run with time and size of its file."""
        self._earlier_s: Mapping[str, float] | None = None
        self.latest: Progress | None = None

    def look(self) -> Progress:
        """The progress now; that of the last look where files cannot be read for a moment.

        Raises UsageError when the directory is not there any more, and what is wrong with it at the first look.
        """
        path = self._results.path
        try:
            self.latest = self._progress()
        except (BenchctlError, OSError):
            if self.latest is None:
                raise
            with suppress(OSError):
                if not path.exists() or not any(path.iterdir()):
                    raise UsageError(
                        f"{path} is not there any more: it was moved or deleted while it was watched"
                    ) from None
        return self.latest

    def _progress(self) -> Progress:
        results, manifest, planned = self._results, self._results.manifest(), self._results.due_plan().runs
        records = self._read_records(planned)
        is_divided, owners = results.is_divided, dict[int, Owner]()
        measured = None if is_divided else _measured_block(results, planned, records)
        runs_of = defaultdict[int, list[PlannedRun]](list)
        for run in planned:
            runs_of[run.block].append(run)
        alive = {} if measured is None else {measured}
        if is_divided:
            owners = {block: owner for block in results.begun_blocks() if (owner := owner_of(results, block))}
            alive = {block for block in owners if living_owner(results, block)}
        blocks = tuple(
            self._block(block, runs, records, owners.get(block), is_alive=block in alive)
            for block, runs in sorted(runs_of.items())
        )
        arms = self._arms(planned, records.values())
        self._width = max(self._width, len(alive))
        is_measured = bool(alive) or (not is_divided and _is_measured(results))
        return Progress(
            path=results.path,
            profile=manifest.profile,
            state=state_of_runs([records.get(run.run_id) for run in planned], is_measured=is_measured),
            is_shared=is_divided,
            blocks=blocks,
            num_runs=len(planned),
            run_states=dict(Counter(record.state for record in records.values())),
            arms=arms,
            time_left=_time_left(blocks, runs_of, records, arms, self._width or _submitted_width(results)),
            problems=tuple(_problems(blocks, runs_of, records)),
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
            devices=tuple(gpu.uuid or f"{gpu.index}: {gpu.name}" for gpu in node.gpus) if node is not None else (),
            job=owner.job if owner else None if node is None else node.job,
            current=None if current is None else self._current(current),
        )

    def _current(self, record: RunRecord) -> CurrentRun:
        phase: Phase = "starting" if record.times.ready_ns is None else "warm-up"
        if record.times.stop_ns is not None:
            phase = "ending"
        elif phase == "warm-up":
            with suppress(OSError, RecordError):
                path = self._results.run(record.run_id).path / "client.jsonl"
                phase = "load" if is_there(path, within=self._results.path) else phase
        return CurrentRun(
            run_id=record.run_id,
            arm=arm_label(record.variant, record.cell),
            phase=phase,
            elapsed_s=_elapsed_s(record),
        )

    def _arms(self, planned: Iterable[PlannedRun], records: Iterable[RunRecord]) -> tuple[ArmDuration, ...]:
        durations_s = defaultdict[str, list[float]](list)
        for record in records:
            if record.state in {"done", "suspect"} and (took_s := _duration_s(record)):
                durations_s[arm_label(record.variant, record.cell)].append(took_s + _AROUND_RUN_S)
        if not durations_s and self._earlier_s is None:
            self._earlier_s = _earlier_s(self._results)
        expected_s = dict(self._earlier_s or {}) | {arm: median(each) for arm, each in durations_s.items()}
        labels = dict.fromkeys(arm_label(run.variant, run.cell) for run in planned)
        return tuple(
            ArmDuration(arm=arm, num_ended=len(durations_s.get(arm, ())), run_s=expected_s.get(arm))
            for arm in labels
        )


def _has_ended(run: PlannedRun, records: Mapping[str, RunRecord]) -> bool:
    return run.run_id in records and records[run.run_id].has_ended


def _is_measured(results: ResultDirectory) -> bool:
    """One process measures all of a directory now."""
    return results.manifest().state == "running" and is_held(results.path)


def _measured_block(
    results: ResultDirectory, planned: Iterable[PlannedRun], records: Mapping[str, RunRecord]
) -> int | None:
    """The block on which the one process of a directory works: of its running run, else of the next one."""
    if not _is_measured(results):
        return None
    running = [run.block for run in planned if run.run_id in records and records[run.run_id].state == "running"]
    left = [run.block for run in planned if not _has_ended(run, records)]
    return next(iter([*running, *left]), None)


def _time_left(
    blocks: Sequence[BlockProgress],
    runs_of: Mapping[int, Sequence[PlannedRun]],
    records: Mapping[str, RunRecord],
    arms: Sequence[ArmDuration],
    width: int,
) -> TimeLeft | None:
    """Time until all blocks have ended, each that waits on the first of ``width`` places that is free.

    An arm without a known duration counts as the mean of the others. None where no duration is known, or nobody
    knows how many blocks are measured at a time.
    """
    known_s = {arm.arm: arm.run_s for arm in arms if arm.run_s is not None}
    left = [block for block in blocks if block.state not in ENDED]
    if not left:
        return TimeLeft(s=0.0, num_at_a_time=0, source="ended-runs")
    if not known_s or not width:
        return None
    others_s, running_s, waiting_s = fmean(known_s.values()), list[float](), list[float]()
    for block in left:
        rest = [run for run in runs_of[block.block] if not _has_ended(run, records)]
        rest_s = sum(known_s.get(arm_label(run.variant, run.cell), others_s) for run in rest)
        if block.current is not None:
            full_s = known_s.get(block.current.arm, others_s)
            rest_s -= min(block.current.elapsed_s or 0.0, full_s)
        (running_s if block.state == "running" else waiting_s).append(rest_s)
    ends_s = running_s + [0.0] * (width - len(running_s))
    heapq.heapify(ends_s)
    for rest_s in waiting_s:
        heapq.heapreplace(ends_s, ends_s[0] + rest_s)
    has_ended = any(arm.num_ended for arm in arms)
    return TimeLeft(
        s=max(ends_s), num_at_a_time=len(ends_s), source="ended-runs" if has_ended else "earlier-experiments"
    )


def _problems(
    blocks: Iterable[BlockProgress],
    runs_of: Mapping[int, Sequence[PlannedRun]],
    records: Mapping[str, RunRecord],
) -> Iterable[Problem]:
    for block in blocks:
        if block.state in {"lost", "interrupted"}:
            where = "" if block.node is None else f" on {block.node}" + (f" ({block.job})" if block.job else "")
            message = f"{block.num_ended} of {block.num_runs} runs ended{where}"
            if block.state == "lost":
                message += "; its process ended without giving it back"
            yield Problem(block=block.block, kind=block.state, run_id=None, message=message)
        for planned in runs_of[block.block]:
            record = records.get(planned.run_id)
            if record is not None and record.has_ended and record.state != "done":
                yield _not_done(planned, record)


def _not_done(planned: PlannedRun, record: RunRecord) -> Problem:
    if record.state == "suspect":
        codes = dict.fromkeys(warning.code for warning in record.warnings)
        decisive = [code for code in codes if code in SUSPECT_CODES] or list(codes) or ["no reason recorded"]
        return Problem(block=planned.block, kind="suspect", run_id=planned.run_id, message=", ".join(decisive))
    failure = record.failure
    message = "no cause recorded" if failure is None else f"{failure.cause}: {failure.message}"
    return Problem(block=planned.block, kind="failed", run_id=planned.run_id, message=message)


def _duration_s(record: RunRecord) -> float | None:
    """Seconds from the start of a run's server to its end; None where they are unknown, or of no clock of ours."""
    launch_ns, stop_ns = record.times.launch_ns, record.times.stop_ns
    if launch_ns is None or stop_ns is None or record.is_simulated or stop_ns < launch_ns:
        return None
    return s_from_ns(stop_ns - launch_ns)


def _elapsed_s(record: RunRecord) -> float | None:
    try:
        begun = dt.datetime.fromisoformat(record.started_at or "")
    except ValueError:
        return None
    begun = begun if begun.tzinfo is not None else begun.replace(tzinfo=dt.UTC)
    return max((dt.datetime.now(dt.UTC) - begun).total_seconds(), 0.0)


def _submitted_width(results: ResultDirectory) -> int:
    """Blocks at a time that the newest submission to a scheduler allows; 1 where one process measures all."""
    submissions = read_submissions(results.path)
    if not submissions:
        return 0 if results.is_divided else 1
    parallel, num_tasks = submissions[-1].cluster.get("parallel"), len(submissions[-1].tasks)
    return min(parallel, num_tasks) if isinstance(parallel, int) and parallel > 0 else num_tasks


def _earlier_s(results: ResultDirectory) -> Mapping[str, float]:
    """Seconds of a run of each arm by earlier experiments on this machine; empty where there are none."""
    try:
        if not stored_durations(results.manifest().engine):
            return {}
        profile = parse_profile(results.profile_yaml(), str(results.path / "profile.yaml"))
        gpus = [gpu.name for gpu in results.manifest().gpus]
        estimate = estimate_durations(profile, tuple(results.prepared_requests()), gpus)
    except (BenchctlError, OSError):
        return {}
    return {} if estimate is None else estimate.run_s
