"""Records of an experiment in progress, read again and again at little cost, also from a network file system.

A refresh opens the manifest, the leases that are held, and of each process that measures the record of its current
run. A record that is final for the process that wrote it is not read again until another process takes its place.
"""

import datetime as dt
import platform
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Final

from benchctl.cluster.progress import BlockClaim, Snapshot
from benchctl.errors import RecordError
from benchctl.records.claims.lock import is_claimed
from benchctl.records.directory import ResultDirectory, as_ended
from benchctl.records.manifest import Manifest, Plan, PlannedRun
from benchctl.records.run import RunRecord
from benchctl.untrusted.files import entry_names, is_there, stat_file

_UNFINISHED: Final = frozenset({"planned", "running"})


class SnapshotReader:
    """Reads one result directory; keeps what cannot change any more."""

    def __init__(self, results: ResultDirectory) -> None:
        self._results = results
        self._plan: Plan | None = None
        self._queues: dict[int | None, _Queue] = {}
        """Runs that one process does in order: by block in a shared directory, else all."""

    def read(self) -> Snapshot:
        """The records as they are now. Raises RecordError or OSError when manifest or plan cannot be read."""
        results = self._results
        manifest = results.manifest()
        runs = as_ended(self._current_plan(manifest), manifest).runs
        is_measured = is_claimed(results.path)
        if None not in self._queues:
            self._queues[None] = _Queue(results, runs)
        status = stat_file(results.path / "manifest.json", within=results.path)
        self._queues[None].update(runs, (status.st_ino, status.st_mtime_ns), is_held=is_measured)
        records = {run_id: record for queue in self._queues.values() for run_id, record in queue.records.items()}
        claims: dict[int, BlockClaim] = {}
        running = [record for record in records.values() if record.state == "running"]
        return Snapshot(
            path=results.path,
            manifest=manifest,
            runs=runs,
            records=records,
            claims=claims,
            is_measured=is_measured and manifest.state == "running",
            elapsed_s={
                record.run_id: elapsed_s
                for record in running
                if (elapsed_s := _elapsed_s(record, claims.get(record.block))) is not None
            },
            loading=frozenset(record.run_id for record in running if self._is_loading(record)),
        )

    def _current_plan(self, manifest: Manifest) -> Plan:
        """The plan, which is read again when blocks were added."""
        plan = self._plan
        if plan is None or 1 + max((run.block for run in plan.runs), default=-1) != manifest.blocks:
            plan = self._plan = self._results.plan()
        return plan

    def _is_loading(self, record: RunRecord) -> bool:
        if record.times.ready_ns is None or record.times.stop_ns is not None:
            return False
        with suppress(OSError, RecordError):
            return is_there(self._results.run(record.run_id).path / "client.jsonl", within=self._results.path)
        return False


class _Queue:
    """Records of runs that one process at a time does in order."""

    def __init__(self, results: ResultDirectory, runs: Sequence[PlannedRun]) -> None:
        self.records: dict[str, RunRecord] = {}
        self._results = results
        self._runs = runs
        self._owner: Hashable = None
        self._is_known = False
        self._final: set[str] = set()
        """Runs to which the owner returns no more."""
        self._is_over = False

    def update(self, runs: Sequence[PlannedRun], owner: Hashable, *, is_held: bool) -> None:
        """Read what can have changed. ``owner`` is another value for each process that does the runs."""
        if owner != self._owner or len(runs) != len(self._runs) or not self._is_known:
            self._owner, self._runs, self._is_known = owner, runs, True
            self._final.clear()
            is_complete = self._read_all()
        elif self._is_over:
            return
        else:
            is_complete = self._read_changing()
        running = next((i for i, run in enumerate(self._runs) if self._is_running(run)), 0)
        self._final.update(run.run_id for run in self._runs[:running])
        self._is_over = is_complete and not is_held

    def _is_running(self, run: PlannedRun) -> bool:
        record = self.records.get(run.run_id)
        return record is not None and record.state == "running"

    def _read_all(self) -> bool:
        try:
            begun = set(entry_names(self._results.path / "runs", within=self._results.path))
        except FileNotFoundError:
            begun = set()
        self.records = {run_id: record for run_id, record in self.records.items() if run_id in begun}
        results = [self._read(run) for run in self._runs if run.run_id in begun]
        return all(results)

    def _read_changing(self) -> bool:
        """Read up to the run that goes on, and in its block earlier attempts, which the owner may move aside."""
        current: PlannedRun | None = None
        is_complete = True
        for run in self._runs:
            if run.run_id in self._final or (current is not None and run.run_id not in self.records):
                continue
            if current is not None and run.block != current.block:
                break
            before = self.records.get(run.run_id)
            is_complete &= self._read(run)
            record = self.records.get(run.run_id)
            if record is None or record.state in _UNFINISHED:
                current = current or run
            elif record != before:
                self._final.add(run.run_id)
        return is_complete

    def _read(self, run: PlannedRun) -> bool:
        """Read one record, if there is one; False where it cannot be read now and the earlier one is kept."""
        directory = self._results.run(run.run_id)
        try:
            if directory.is_begun():
                self.records[run.run_id] = directory.read()
            else:
                self.records.pop(run.run_id, None)
        except (RecordError, OSError):
            return False
        return True


def _elapsed_s(record: RunRecord, claim: BlockClaim | None) -> float | None:
    """Seconds since a run began, by two readings of the same wall clock: this host's, or that of its owner, whose
    last sign of life is at most a few heartbeats old.
    """
    begun = _moment(record.started_at)
    if begun is None:
        return None
    if claim is None or record.host == platform.node():
        return max((dt.datetime.now(dt.UTC) - begun).total_seconds(), 0.0)
    beaten = _moment(claim.beaten_at)
    return None if beaten is None else max((beaten - begun).total_seconds(), 0.0)


def _moment(text: str | None) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
