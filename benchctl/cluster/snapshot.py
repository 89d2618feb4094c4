"""Records of an experiment in progress, read again and again at little cost, also from a network file system.

A refresh opens the manifest, the leases that are held, and of each process that measures the record of its current
run. A record that is final for the process that wrote it is not read again until another process takes its place.
"""

import datetime as dt
import platform
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from benchctl.cluster.block_progress import BlockClaim, Snapshot, by_block
from benchctl.errors import RecordError
from benchctl.records.claims import Lease, boot_s, generations, is_claimed, is_shared
from benchctl.records.directory import ResultDirectory, as_ended
from benchctl.records.record import Manifest, Plan, PlannedRun, RunRecord
from benchctl.records.shared_claims import LeaseWatch
from benchctl.untrusted.files import entry_names, is_there, stat_file

_UNFINISHED: Final = frozenset({"planned", "running"})


class SnapshotReader:
    """Reads one result directory; keeps what cannot change any more."""

    def __init__(self, results: ResultDirectory, clock: Callable[[], float] = boot_s) -> None:
        self._results = results
        self._clock = clock
        self._leases = LeaseWatch(results.path, clock)
        self._plan: Plan | None = None
        self._queues: dict[int | None, _Queue] = {}
        """Runs that one process at a time does in order: by block in a shared directory, else all under None."""
        self._begun: dict[tuple[str, int], tuple[float, float]] = {}
        """When a running run was first looked at, and seconds since its beginning then, by run and attempt."""

    def read(self) -> Snapshot:
        """The records as they are now. Raises RecordError or OSError when manifest or plan cannot be read."""
        results = self._results
        manifest = results.manifest()
        runs = as_ended(self._current_plan(manifest), manifest).runs
        shared = is_shared(results.path)
        is_measured = not shared and is_claimed(results.path)
        claims = self._claims() if shared else {}  # before the records: those of a released block are final then
        if shared:
            self._read_blocks(runs, claims)
        else:
            self._read_in_order(runs, is_measured=is_measured)
        records = {run_id: record for queue in self._queues.values() for run_id, record in queue.records.items()}
        running = [record for record in records.values() if record.state == "running"]
        return Snapshot(
            path=results.path,
            manifest=manifest,
            runs=runs,
            records=records,
            is_shared=shared,
            claims=claims,
            is_measured=is_measured and manifest.state == "running",
            elapsed_s=self._elapsed(running, claims),
            loading=frozenset(record.run_id for record in running if self._is_loading(record)),
        )

    def _current_plan(self, manifest: Manifest) -> Plan:
        """The plan, which is read again when blocks were added."""
        plan = self._plan
        if plan is None or 1 + max((run.block for run in plan.runs), default=-1) != manifest.blocks:
            plan = self._plan = self._results.plan()
        return plan

    def _claims(self) -> dict[int, BlockClaim]:
        """The newest claim of each block; a released lease is not read again."""
        claims = {}
        for block, generation in generations(self._results.path).items():
            lease = self._leases.leases.get(block)
            is_released = lease is not None and (lease.generation, lease.state) == (generation, "released")
            sight = "free" if is_released else self._leases.look(block, generation)
            lease = self._leases.leases.get(block)
            if lease is not None:
                claims[block] = _claim(lease, is_dead=sight == "dead")
        return claims

    def _read_blocks(self, runs: Sequence[PlannedRun], claims: Mapping[int, BlockClaim]) -> None:
        begun = self._begun_names() if not self._queues or None in self._queues else None
        self._queues.pop(None, None)
        for block, of_block in by_block(runs).items():
            claim = claims.get(block)
            owner = None if claim is None else claim.generation
            queue = self._queues.setdefault(block, _Queue(self._results))
            queue.update(of_block, owner, begun, is_held=claim is not None and claim.is_held)

    def _read_in_order(self, runs: Sequence[PlannedRun], *, is_measured: bool) -> None:
        status = stat_file(self._results.path / "manifest.json", within=self._results.path)
        owner = (status.st_ino, status.st_mtime_ns)  # who begins writes the manifest
        begun = None if None in self._queues else self._begun_names()
        self._queues.setdefault(None, _Queue(self._results)).update(runs, owner, begun, is_held=is_measured)

    def _begun_names(self) -> frozenset[str]:
        try:
            return frozenset(entry_names(self._results.path / "runs", within=self._results.path))
        except FileNotFoundError:
            return frozenset()

    def _elapsed(self, running: Iterable[RunRecord], claims: Mapping[int, BlockClaim]) -> dict[str, float]:
        """Seconds since each running run began, as far as they are known."""
        now_s, first = self._clock(), {}
        elapsed_s: dict[str, float] = {}
        for record in running:
            key = (record.run_id, record.attempt)
            by_clock_s = _elapsed_s(record, claims.get(record.block))
            if by_clock_s is None:
                continue
            first[key] = self._begun.get(key, (now_s, by_clock_s))
            elapsed_s[record.run_id] = max(by_clock_s, first[key][1] + now_s - first[key][0])
        self._begun = first
        return elapsed_s

    def _is_loading(self, record: RunRecord) -> bool:
        if record.times.ready_ns is None or record.times.stop_ns is not None:
            return False
        with suppress(OSError, RecordError):
            return is_there(self._results.run(record.run_id).path / "client.jsonl", within=self._results.path)
        return False


def _claim(lease: Lease, *, is_dead: bool) -> BlockClaim:
    return BlockClaim(
        generation=lease.generation,
        node=lease.node,
        hostname=lease.hostname,
        job=lease.job,
        is_held=lease.state == "held",
        is_dead=is_dead,
        beaten_at=lease.beaten_at,
        lease_s=lease.lease_s,
    )


class _Queue:
    """Records of runs that one process at a time does in order."""

    def __init__(self, results: ResultDirectory) -> None:
        self.records: dict[str, RunRecord] = {}
        self._results = results
        self._runs: Sequence[PlannedRun] = ()
        self._owner: Hashable = None
        self._final: set[str] = set()
        """Runs to which the owner returns no more."""
        self._is_over = False

    def update(
        self, runs: Sequence[PlannedRun], owner: Hashable, begun: Collection[str] | None, *, is_held: bool
    ) -> None:
        """Read what can have changed.

        ``owner`` is another value for each process that does the runs; ``begun`` names the runs that have a folder,
        where the caller just listed them.
        """
        if owner != self._owner or len(runs) != len(self._runs):
            self._owner, self._runs = owner, runs
            self._final.clear()
            is_complete = self._read_all(begun)
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

    def _read_all(self, begun: Collection[str] | None) -> bool:
        readings = [self._read(run) for run in self._runs if begun is None or run.run_id in begun]
        return all(readings)

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
    if claim is None or claim.hostname == platform.node():
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
