"""Progress of one experiment, looked at again and again: what a look cannot know, earlier ones remember."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from benchctl.cluster.block_progress import Snapshot
from benchctl.cluster.progress import Progress, progress_of
from benchctl.cluster.snapshot import SnapshotReader
from benchctl.errors import BenchctlError, UsageError
from benchctl.records.directory import ResultDirectory, read_submissions
from benchctl.records.stores import stored_durations
from benchctl.untrusted.files import is_there

_RECENT_S: Final = 60.0
"""For so long the largest number of blocks that were measured at a time counts: one ends and the next begins."""


class Watcher:
    """Reads the progress of ``results``.

    ``width`` is the number of blocks at a time that its caller expects, which counts until blocks are measured.
    """

    def __init__(
        self,
        results: ResultDirectory,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._results = results
        self._reader = SnapshotReader(results)
        self._width = width
        self._clock = clock
        self._running: deque[tuple[float, int]] = deque()
        self._earlier_s: Mapping[str, float] | None = None
        self.latest: Progress | None = None

    def look(self) -> Progress:
        """The progress now; that of the last look where files cannot be read for a moment.

        Raises UsageError when the directory is not there any more, and what is wrong with it at the first look.
        """
        try:
            snapshot = self._reader.read()
        except (BenchctlError, OSError):
            if self.latest is None:
                raise
            self._check_there()
            return self.latest
        self.latest = self._progress(snapshot)
        return self.latest

    def _progress(self, snapshot: Snapshot) -> Progress:
        width = self._recent_width(sum(claim.is_alive for claim in snapshot.claims.values())) or self._width
        if not width and snapshot.is_shared:
            width = submitted_width(self._results)
        has_ended = any(record.state in {"done", "suspect"} for record in snapshot.records.values())
        if not has_ended and self._earlier_s is None:
            self._earlier_s = earlier_durations_s(self._results)
        return progress_of(snapshot, width=width, earlier_s=self._earlier_s)

    def _recent_width(self, num_running: int) -> int:
        """The largest number of blocks that were measured at a time of late, now included."""
        now_s = self._clock()
        self._running.append((now_s, num_running))
        while now_s - self._running[0][0] > _RECENT_S:
            self._running.popleft()
        return max(count for _, count in self._running)

    def _check_there(self) -> None:
        path = self._results.path
        with suppress(OSError, BenchctlError):
            if is_there(path / "manifest.json", within=path):
                return
        if path.exists() and any(path.iterdir()):
            return  # a document that is being replaced, or a network that does not answer
        raise UsageError(f"{path} is not there any more: it was moved or deleted while it was watched")


def submitted_width(results: ResultDirectory) -> int | None:
    """Blocks at a time that the newest submission to a scheduler allows; None without any."""
    submissions = read_submissions(results.path)
    if not submissions:
        return None
    parallel = submissions[-1].cluster.get("parallel")
    num_tasks = len(submissions[-1].tasks)
    return min(parallel, num_tasks) if isinstance(parallel, int) and parallel > 0 else num_tasks or None


def earlier_durations_s(results: ResultDirectory) -> Mapping[str, float]:
    """Seconds of a run of each arm by earlier experiments on this machine; empty where there are none."""
    from benchctl.measure.durations import estimate_durations  # noqa: PLC0415 - where no run has ended
    from benchctl.profile.load import parse_profile  # noqa: PLC0415 - as above

    try:
        if not stored_durations(results.manifest().engine):
            return {}
        profile = parse_profile(results.profile_yaml(), str(results.path / "profile.yaml"))
        gpus = [gpu.name for gpu in results.manifest().gpus]
        estimate = estimate_durations(profile, tuple(results.prepared_requests()), gpus)
    except (BenchctlError, OSError):
        return {}
    return {} if estimate is None else estimate.run_s
