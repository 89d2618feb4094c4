"""The check itself: begin it, measure its runs with and without neighbours, and conclude it.

begin_check ▸ run_experiment(measure=RunsBeside) ▸ conclude_check
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning.noise_floor import engine_sha256
from benchctl.analysis.statistics.decide import confidence_of_claims
from benchctl.analysis.validity.noise import BESIDE, NEIGHBOUR_LOST, checked, neighbour_warnings
from benchctl.cluster.local.demand import slot_text
from benchctl.cluster.neighbours.children import NeighbourPlan, neighbours_loading
from benchctl.cluster.slots import Slot
from benchctl.engines.engine import engine_for
from benchctl.errors import RunError, UsageError
from benchctl.measure.interrupt import interruptible
from benchctl.measure.run import RunContext, decline_run, measure_run
from benchctl.measure.server.cores import process_on
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.integrity.digests import record_file
from benchctl.records.record import PlannedRun, RunFailure, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, ResultWarning
from benchctl.records.stores.peaks_store import NOISE_FILE, NoiseFloor, load_noise, write_noise
from benchctl.records.stores.stores import (
    CHECK_NOTE,
    NEIGHBOURS_FILE,
    NeighbourCheck,
    NeighbourSlot,
    load_neighbours,
    write_neighbours,
)
from benchctl.records.warning_codes import by_severity

_LOGS: Final = "logs"


def nothing_to_check(profile: Profile) -> str | None:
    """The reason why neighbours cannot disturb the servers of ``profile``; None where they can.

    Raises UsageError for servers that are not ours, whose neighbours nobody here can start.
    """
    engine = engine_for(profile.engine.kind)
    if not engine.is_launched:
        raise UsageError(
            f"engine {engine.kind!r}: the server is not started by benchctl and may be on another machine, so no "
            "neighbours can be put beside it; check an engine that benchctl starts"
        )
    if engine.clock == "virtual":
        return f"engine {engine.kind!r} steps in virtual time, which no neighbour changes: nothing to check"
    return None


def begin_check(
    results: ResultDirectory, profile: Profile, slots: tuple[Slot, ...], noise: NoiseFloor | None
) -> None:
    """Note in a new result directory that it is a check, on which slots, and the noise that it is judged by."""
    manifest = results.manifest()
    write_neighbours(
        results.path / NEIGHBOURS_FILE,
        NeighbourCheck(
            schema_version=SCHEMA_VERSION,
            measured_at=manifest.created_at,
            source=str(results.path.resolve()),
            host=manifest.host.hostname,
            gpus=tuple(gpu.name for gpu in manifest.gpus),
            engine=profile.engine.kind,
            engine_sha256=engine_sha256(profile),
            model=profile.model,
            request_set_sha256=manifest.request_set_sha256,
            slots=tuple(NeighbourSlot(index=slot.index, gpus=slot.gpus, cores=slot.cores) for slot in slots),
            confidence=confidence_of_claims(1),
        ),
    )
    if noise is not None:
        write_noise(results.path / NOISE_FILE, noise)
        record_file(results, NOISE_FILE)
    others = " and ".join(slot_text(slot) for slot in slots[1:])
    message = (
        f"a check of neighbours: both arms are the same server on {slot_text(slots[0])}, and during {BESIDE!r} the "
        f"same load runs on {others}"
    )
    note = ResultWarning(code="neighbour-check", message=message)
    results.write_manifest(msgspec.structs.replace(manifest, warnings=(*manifest.warnings, note)))


def slots_of_check(results: ResultDirectory) -> tuple[Slot, ...]:
    """The slots of a check that was begun. Raises UsageError for any other experiment."""
    begun = load_neighbours(results.path)
    if begun is None or not is_check(results):
        raise UsageError(f"{results.path} is not a check of neighbours; continue it with 'benchctl run --resume'")
    return tuple(Slot(index=slot.index, gpus=slot.gpus, cores=slot.cores) for slot in begun.slots)


def is_check(results: ResultDirectory) -> bool:
    """True for the experiment that a check is; others only hold the copy of one."""
    return any(warning.code == CHECK_NOTE for warning in results.manifest().warnings)


class RunsBeside:
    """Measures the runs of a check: all on the first slot, those of ``beside`` while the other slots load."""

    def __init__(self, results: ResultDirectory, slots: tuple[Slot, ...]) -> None:
        self._results = results
        self._slots = slots

    def __call__(self, context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        """Measure one run as ``measure_run`` does. Without neighbours it fails; if one is lost it is suspect."""
        if planned.variant != BESIDE:
            with on_slot(self._slots[0]):
                return measure_run(context, planned, directory)
        plan = NeighbourPlan(
            results=self._results.path,
            slots=self._slots[1:],
            logs=self._results.path / _LOGS,
            name=planned.run_id,
            timeouts=context.profile.timeouts,
        )
        try:
            with interruptible(), neighbours_loading(plan) as neighbours:
                with on_slot(self._slots[0]):
                    record = measure_run(context, planned, directory)
                problems = neighbours.end()
        except RunError as error:
            if error.cause != NEIGHBOUR_LOST:
                raise
            return decline_run(context, planned, directory, RunFailure(cause=NEIGHBOUR_LOST, message=str(error)))
        return _with_problems(directory, record, problems) if problems else record


def conclude_check(results: ResultDirectory) -> NeighbourCheck:
    """The result of a finished check, which its directory then holds, with the warning about it.

    Raises as ``checked`` does.
    """
    begun = load_neighbours(results.path)
    if begun is None:
        raise UsageError(f"{results.path / NEIGHBOURS_FILE} is missing; restore it, or check again")
    check = checked(load_experiment(results.path), begun, load_noise(results.path))
    write_neighbours(results.path / NEIGHBOURS_FILE, check)
    manifest = results.manifest()
    own = tuple(warning for warning in manifest.warnings if not warning.code.startswith("neighbours-"))
    warnings = neighbour_warnings(check, check.measured_at, command="")
    results.write_manifest(msgspec.structs.replace(manifest, warnings=(*own, *warnings)))
    return check


@contextmanager
def on_slot(slot: Slot) -> Iterator[None]:
    """Bind this process, and what it starts meanwhile, to the devices and cores of a slot."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(slot.gpus)
    try:
        with process_on(frozenset(slot.cores) or None):
            yield
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})


def _with_problems(directory: RunDirectory, record: RunRecord, problems: tuple[str, ...]) -> RunRecord:
    """The record of a run that was not beside all its neighbours all the time: it does not count."""
    warnings = tuple(
        ResultWarning(code="neighbours-lost", message=problem, where=record.run_id) for problem in problems
    )
    doubted = msgspec.structs.replace(
        record,
        state="suspect" if record.state == "done" else record.state,
        warnings=by_severity((*warnings, *record.warnings)),
    )
    directory.write(doubted)
    return doubted
