"""The runs of a simulated experiment on several cores: ahead of their turn, in processes of their own."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Final

from benchctl.errors import RunError
from benchctl.measure.experiment import MeasureRun
from benchctl.measure.resume.pending import undone_runs
from benchctl.measure.run import RunContext
from benchctl.measure.simulated_run import Kept, simulate_run
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.record import PlannedRun, PreparedRequest, RunRecord

_INTERRUPTED: Final = 130
_MANY_TOKENS: Final = 1_000_000
"""Output tokens that take about as long to simulate as to start a process: 5 and 1.3 s on one core."""


@contextmanager
def simulated_runs(
    results: ResultDirectory, profile: Profile, requests: Sequence[PreparedRequest], *, jobs: int | None, keep: Kept
) -> Iterator[MeasureRun]:
    """Yields what simulates one run after the other, with up to ``jobs`` of them at the same time.

    Without ``jobs``, as many as there are cores if that pays. Runs in progress when this ends early are recorded as
    interrupted.
    """
    pending = undone_runs(results)
    num_tokens = sum(request.n * request.max_tokens for request in requests) * len(pending)
    jobs = min(jobs or (os.cpu_count() if num_tokens >= _MANY_TOKENS else 1) or 1, len(pending))
    if jobs <= 1:
        yield partial(simulate_run, keep=keep)
        return
    context = RunContext(profile=profile, requests=tuple(requests))
    with simulating_processes(jobs, partial(_begin, context, keep)) as executor:
        yield _Ahead(executor, pending, is_sequential=profile.stopping is not None).measure


@contextmanager
def simulating_processes(
    jobs: int, initializer: Callable[[], object] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of fresh processes, which leave interrupts to this one and end with it."""
    executor = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts, initargs=(initializer,)
    )
    try:
        yield executor
    except BrokenProcessPool as error:
        raise RunError(
            "a process that simulates was ended from outside; the system does this when memory runs out (see "
            "dmesg): lower --jobs",
            cause="worker-died",
        ) from error
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _ignore_interrupts(then: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends its children
    if then is not None:
        then()


class _Ahead:
    """Runs that were begun ahead of their turn: all of them, or those of a block where a look may end the rest."""

    def __init__(
        self, executor: ProcessPoolExecutor, pending: Sequence[PlannedRun], *, is_sequential: bool
    ) -> None:
        self._executor = executor
        self._pending = pending
        self._is_sequential = is_sequential
        self._futures: dict[str, Future[RunRecord]] = {}

    def measure(self, _: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        if planned.run_id not in self._futures:
            for run in self._pending:
                if not self._is_sequential or run.block == planned.block:
                    path = directory.path.with_name(run.run_id)
                    self._futures[run.run_id] = self._executor.submit(
                        _simulate, run, RunDirectory(path, directory.within)
                    )
        return self._futures.pop(planned.run_id).result()


_shared: list[tuple[RunContext, Kept]] = []
"""Of a process that simulates: the values that all its runs share."""


def _begin(context: RunContext, keep: Kept) -> None:
    _shared.append((context, keep))


def _simulate(planned: PlannedRun, directory: RunDirectory) -> RunRecord:
    context, keep = _shared[0]
    try:
        return simulate_run(context, planned, directory, keep=keep)
    except KeyboardInterrupt:  # recorded; the runs behind it are not to begin
        os._exit(_INTERRUPTED)
