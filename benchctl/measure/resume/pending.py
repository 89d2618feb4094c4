"""The rest of an experiment: the runs that are not done, and those that are measured again."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby

from benchctl.errors import RecordError
from benchctl.measure.resume.here import Here
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import Plan, PlannedRun, RunRecord


def undone_runs(results: ResultDirectory, plan: Plan | None = None) -> tuple[PlannedRun, ...]:
    """The runs of ``plan`` that are not done, in its order.

    By default it is that of ``results`` without blocks that a stopping rule made unnecessary. A run with an
    unreadable ``run.json`` is not done.
    """
    runs = (plan or results.due_plan()).runs
    done = dict(_done_runs(results, runs))
    return tuple(planned for planned in runs if planned.run_id not in done)


def pending_runs(results: ResultDirectory, here: Here, plan: Plan | None = None) -> tuple[PlannedRun, ...]:
    """The runs of ``plan`` that are to be measured here, in its order: see ``pending_in_block``.

    By default it is that of ``results`` without blocks that a stopping rule made unnecessary.
    """
    runs = (plan or results.due_plan()).runs
    blocks = groupby(runs, key=lambda planned: planned.block)
    return tuple(planned for _, of_block in blocks for planned in pending_in_block(results, tuple(of_block), here))


def pending_in_block(results: ResultDirectory, runs: Sequence[PlannedRun], here: Here) -> tuple[PlannedRun, ...]:
    """The runs of one block that are to be measured here: those that are not done.

    They are all of them where some were done on another node or other devices, because runs of a block are
    compared.
    """
    done = dict(_done_runs(results, runs))
    records = list(done.values())
    is_together = here.are_together(records)
    if len(done) == len(runs) and is_together:
        return ()
    if not is_together or not all(map(here.has_measured, records)):
        return tuple(runs)
    return tuple(planned for planned in runs if planned.run_id not in done)


def repeated_runs(results: ResultDirectory, pending: Sequence[PlannedRun]) -> tuple[RunRecord, ...]:
    """The records of the pending runs that are done, but on another node or other devices than their block now."""
    return tuple(record for _, record in _done_runs(results, pending))


def _done_runs(results: ResultDirectory, runs: Sequence[PlannedRun]) -> Iterator[tuple[str, RunRecord]]:
    for planned in runs:
        with suppress(RecordError):  # a run with an unreadable record is measured again
            directory = results.run(planned.run_id)
            if directory.is_begun() and (record := directory.read()).state == "done":
                yield planned.run_id, record
