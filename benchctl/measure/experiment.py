"""An experiment: create its result directory and do every run that is not done.

The order is the plan's. A failed run is kept and the next one starts; an interrupt stops the experiment with
everything measured so far on disk.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Final, TypeAlias

import msgspec

from benchctl.analysis.validity.machines import chooses_devices, scattered_blocks, version_warning
from benchctl.engines.engine import engine_for
from benchctl.errors import (
    KEPT,
    BenchctlError,
    RequestRefusedError,
    as_run_error,
    as_usage_error,
    is_of_the_system,
)
from benchctl.measure.directory import Origin, create_results, done_runs, set_state, undone_runs
from benchctl.measure.machine import new_manifest, node_name
from benchctl.measure.on_file import gpu_names_here, noise_on_file, peaks_on_file, remember_duration
from benchctl.measure.run import Listener, RunContext, decline_run, loads_of, measure_run
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.model import Profile
from benchctl.profile.planning import PILOT_BLOCKS, arms, servers, variant_settings
from benchctl.records.directory import RequestSets, ResultDirectory, RunDirectory, arm_label
from benchctl.records.integrity import begin_digests, forget_run, record_run
from benchctl.records.record import (
    Manifest,
    Plan,
    PlannedRun,
    PreparedRequest,
    RunFailure,
    RunRecord,
)
from benchctl.records.schema import ResultWarning, RunState
from benchctl.records.stores import NOISE, NoiseFloor
from benchctl.records.writers import settle_runs, sole_writer
from benchctl.workload.prepare import PreparedSet

MeasureRun: TypeAlias = Callable[[RunContext, PlannedRun, RunDirectory], RunRecord]
"""Does one run, and returns its final record, which is also on disk."""
OUT_OF_MEMORY: Final = "out-of-memory"
"""Cause of a failure that makes the settings of a run infeasible here."""

_ELSEWHERE: Final = ResultWarning(
    code="measured-elsewhere",
    message="the directory was created on a machine that does not measure: devices and driver are in the record of "
    "each run, and no noise on file goes along",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Number of runs of one call by their result."""

    num_done: int
    num_failed: int
    num_suspect: int
    num_skipped: int
    """Runs that an earlier call had done."""


def create_experiment(profile: Profile, prepared: PreparedSet, origin: Origin) -> ResultDirectory:
    """Write everything that is known before the first run; returns the new directory.

    The noise on file for this machine and server goes along, with the warnings about it, and the measured peaks of
    its device; none of them where other machines measure, and a note says so.
    """
    manifest = new_manifest(profile, prepared, origin.argv)
    if origin.is_elsewhere:
        return _created(profile, prepared, origin, manifest, [_ELSEWHERE])
    manifest = msgspec.structs.replace(manifest, gpus=gpu_inventory())
    noise, warnings = noise_on_file(
        profile,
        manifest.gpus,
        request_set_sha256=manifest.request_set_sha256,
        begins_at=manifest.created_at,
    )
    return _created(profile, prepared, origin, manifest, warnings, noise)


def create_simulation(profile: Profile, prepared: PreparedSet, origin: Origin) -> ResultDirectory:
    """The same for an experiment whose runs are simulated in virtual time; a note in its manifest says so.

    It takes no noise from this machine's file, which holds that of real clients.
    """
    from benchctl.sim.virtual import costs_in_words  # noqa: PLC0415 - the simulator, where it runs in this process

    costs = {costs_in_words(variant_settings(profile, variant, cell)) for variant, cell in arms(profile)}
    message = (
        "no server and no client ran: 'benchctl simulate' ran the core of the simulator in virtual time, with "
        + " and ".join(sorted(costs))
    )
    note = ResultWarning(code="simulated", message=message)
    return _created(profile, prepared, origin, new_manifest(profile, prepared, origin.argv), [note])


def _created(
    profile: Profile,
    prepared: PreparedSet,
    origin: Origin,
    manifest: Manifest,
    warnings: Iterable[ResultWarning],
    noise: NoiseFloor | None = None,
) -> ResultDirectory:
    warnings = (*manifest.warnings, *warnings)
    if any(getattr(variant_settings(profile, *arm).server, "step_time_model", None) for arm in arms(profile)):
        from benchctl.sim.predict import profile_draft_warnings  # noqa: PLC0415 - numpy

        warnings += profile_draft_warnings(profile)
    manifest = msgspec.structs.replace(manifest, label=origin.label, warnings=warnings)
    return create_results(
        profile, prepared, origin, manifest, noise, peaks_on_file(profile, [gpu.name for gpu in manifest.gpus])
    )


def run_experiment(
    results: ResultDirectory,
    profile: Profile,
    requests: RequestSets | Sequence[PreparedRequest],
    listener: Listener,
    measure: MeasureRun = measure_run,
    *,
    keeps_raw_logs: bool = False,
) -> Outcome:
    """Run everything that is not done, in plan order, until the last run or until the stopping rule ends it.

    It also ends after a block in which the server of every arm failed.

    ``measure`` does one run: with a server, unless it is another function. A KeyboardInterrupt passes through after
    the manifest says ``interrupted``; what was measured is kept. Raises UsageError when another benchctl measures
    into the directory or nothing can be written there, and RunError when the system refuses files or memory later.
    """
    context = RunContext(
        profile=profile,
        requests=requests if isinstance(requests, RequestSets) else RequestSets.single(requests),
        listener=listener,
        keeps_raw_logs=keeps_raw_logs,
    )
    with sole_writer(results.path):
        _begin(results)
        try:
            return _run_pending(results, context, listener, measure)
        except Exception as error:
            if isinstance(error, BenchctlError) or not is_of_the_system(error):
                raise
            raise as_run_error(error, results.path, next_step=f", then continue with --resume; {KEPT}") from error


def _begin(results: ResultDirectory) -> None:
    """Note that the experiment runs, and what became of runs whose process ended before it could note it.

    Raises UsageError where nothing can be written.
    """
    try:
        settle_runs(results)
        set_state(results, "running")
        begin_digests(results)
    except OSError as error:
        raise as_usage_error(
            error, results.path, remedy=f"copy {results.path} to where files can be written, and name the copy"
        ) from error


def _run_pending(
    results: ResultDirectory,
    context: RunContext,
    listener: Listener,
    measure: MeasureRun,
) -> Outcome:
    profile, has_requests = context.profile, any(requests for _, requests in context.requests.sets)
    pending = pending_runs(results, profile)
    num_skipped = len(results.due_plan().runs) - len(pending)
    states, failed_in_block = dict[str, RunState](), Counter[int]()
    failed: dict[str, RunRecord] = {}
    noise, gpus = NOISE.in_results(results.path), gpu_names_here(results.manifest())
    try:
        for planned in _with_repeat(results, pending, failed, listener):
            if planned.block >= _take_looks(results, profile, planned.block, failed, listener):
                break
            context = replace(context, num_loads=_num_loads(results, profile, planned.block, listener))
            listener.on_run_start(planned, sum(load.size.num_requests for load in loads_of(context, planned)))
            began_s = time.monotonic()
            with suppress(OSError):  # a full disk is reported as the failure of the run
                forget_run(results, planned.run_id)
            try:
                record = _measure_feasible(measure, context, planned, results.run(planned.run_id), failed)
            finally:
                with suppress(OSError):
                    record_run(results, planned.run_id)
            remember_duration(profile, context.requests, record, time.monotonic() - began_s, gpus)
            states[planned.run_id] = record.state
            failed_in_block[planned.block] += record.state == "failed"
            _warn_of_version(results, noise, record)
            listener.on_run_end(planned, record)
            num_refused = sum(_has_failed_by(first, RequestRefusedError.cause) for first in failed.values())
            num_failed = failed_in_block[planned.block] if has_requests else 0  # passes do not share a server
            if len(servers(profile)) in (num_refused, num_failed):  # the other blocks would fail as well
                break
        else:
            _take_looks(results, profile, results.manifest().blocks, failed, listener)
    except BaseException as error:
        with suppress(OSError, MemoryError):  # a full disk is reported as the failure of the run
            set_state(results, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    counts = Counter(states.values())
    set_state(results, "failed" if counts["failed"] else "suspect" if counts["suspect"] else "done")
    return Outcome(
        num_done=counts["done"], num_failed=counts["failed"], num_suspect=counts["suspect"], num_skipped=num_skipped
    )


def _with_repeat(
    results: ResultDirectory, pending: Sequence[PlannedRun], failed: Mapping[str, RunRecord], listener: Listener
) -> Iterator[PlannedRun]:
    """The pending runs; then once more those of the only block that does not count, where a verdict takes all.

    What decides is the state of its runs, never their results, so that this does not count as a look at the data.
    Runs in ``failed`` fail by their settings: they would again.
    """
    yield from pending
    from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS  # noqa: PLC0415 - numpy, after the runs

    manifest, blocks = results.manifest(), {planned.block for planned in undone_runs(results)}
    if manifest.blocks == MIN_PAIRED_BLOCKS and len(blocks) == 1 and manifest.stopping is None and not failed:
        again = [planned for planned in results.plan().runs if planned.block in blocks]
        listener.on_repeat(again)
        yield from again


def _take_looks(
    results: ResultDirectory, profile: Profile, num_blocks: int, failed: Mapping[str, RunRecord], listener: Listener
) -> float:
    """Take each look that is due after ``num_blocks`` blocks and was not; returns how many blocks are needed.

    Of the arms in ``failed``, those that no server has the memory for are left out. Without a stopping rule there
    are no looks.
    """
    rule = results.manifest().stopping
    if rule is None:
        return math.inf
    from benchctl.analysis.compare.looks import take_look  # noqa: PLC0415 - numpy, after runs
    from benchctl.analysis.compare.metric import roles_of  # noqa: PLC0415 - as above
    from benchctl.analysis.experiment.experiment import load_experiment  # noqa: PLC0415 - as above

    roles = roles_of(profile.primary_metrics, is_forced=profile.stop != "natural")
    metrics = [name for name, role in roles.items() if role == "deciding"]
    infeasible = [
        arm_label(first.variant, first.cell | point)
        for first in failed.values()
        if _has_failed_by(first, OUT_OF_MEMORY)
        for point in first.ladder or ({},)
    ]
    looked_at = {look.num_blocks for look in rule.looks}
    for due in rule.look_blocks:
        if due <= num_blocks and due not in looked_at and rule.ended_after is None:
            look = take_look(load_experiment(results.path), rule, due, metrics, left_out=infeasible)
            rule = msgspec.structs.replace(rule, looks=(*rule.looks, look))
            results.write_manifest(msgspec.structs.replace(results.manifest(), stopping=rule))
            listener.on_look(look, rule)
    return math.inf if rule.ended_after is None else rule.ended_after


def _num_loads(results: ResultDirectory, profile: Profile, block: int, listener: Listener) -> int:
    """The number of loads of each server of a block. With ``auto`` it is chosen after the pilot, once."""
    if profile.loads_per_server != "auto":
        return profile.num_loads
    manifest = results.manifest()
    choice = manifest.loads
    if choice is None and block >= PILOT_BLOCKS:
        from benchctl.analysis.experiment.experiment import load_experiment  # noqa: PLC0415 - numpy, after runs
        from benchctl.analysis.planning import choose_loads  # noqa: PLC0415 - as above

        choice = choose_loads(load_experiment(results.path).first_blocks(block), manifest.blocks)
        if choice is not None:
            results.write_manifest(msgspec.structs.replace(manifest, loads=choice))
            listener.on_loads(choice)
    return profile.num_loads if choice is None or block < choice.from_block else choice.num_loads


def _measure_feasible(
    measure: MeasureRun,
    context: RunContext,
    planned: PlannedRun,
    directory: RunDirectory,
    failed: dict[str, RunRecord],
) -> RunRecord:
    """Measure a run, unless one of its arm is in ``failed``, where runs that fail by their settings are noted."""
    arm = arm_label(planned.variant, planned.cell)
    if first := failed.get(arm):
        cause, why = (
            "infeasible",
            f"{first.run_id} ran out of memory with the same settings; --resume tries it again",
        )
        if _has_failed_by(first, RequestRefusedError.cause):
            cause, why = RequestRefusedError.cause, f"the server refused the same requests in {first.run_id}"
        failure = RunFailure(cause=cause, message=f"not tried, because {why}")
        return decline_run(context, planned, directory, failure)
    record = measure(context, planned, directory)
    if _has_failed_by(record, OUT_OF_MEMORY) or _has_failed_by(record, RequestRefusedError.cause):
        failed[arm] = record
    return record


def _has_failed_by(record: RunRecord, cause: str) -> bool:
    return record.failure is not None and record.failure.cause == cause


def _warn_of_version(results: ResultDirectory, noise: NoiseFloor | None, record: RunRecord) -> None:
    """Warn, once, of noise on file from another version of the engine, which only a server reports."""
    warning = None if noise is None else version_warning(noise, record.engine_version)
    manifest = results.manifest()
    if warning is not None and warning not in manifest.warnings:
        results.write_manifest(msgspec.structs.replace(manifest, warnings=(*manifest.warnings, warning)))


def pending_runs(results: ResultDirectory, profile: Profile, plan: Plan | None = None) -> tuple[PlannedRun, ...]:
    """The runs of ``plan`` that are to be measured here, in its order: see ``pending_in_block``.

    By default it is that of ``results`` without blocks that a stopping rule made unnecessary.
    """
    runs = (plan or results.due_plan()).runs
    blocks = groupby(runs, key=lambda planned: planned.block)
    return tuple(
        planned for _, of_block in blocks for planned in pending_in_block(results, tuple(of_block), profile)
    )


def pending_in_block(
    results: ResultDirectory, runs: Sequence[PlannedRun], profile: Profile
) -> tuple[PlannedRun, ...]:
    """The runs of one block that are to be measured here: those that are not done.

    They are all of them where some were done on another node or other devices, because runs of a block are
    compared.
    """
    done = dict(done_runs(results, runs))
    settings = {key: variant_settings(profile, record.variant, record.cell) for key, record in done.items()}
    is_together = not scattered_blocks((record, settings[key]) for key, record in done.items())
    if len(done) == len(runs) and is_together:
        return ()
    if not is_together or not all(is_comparable_here(profile, record) for record in done.values()):
        return tuple(runs)
    return tuple(planned for planned in runs if planned.run_id not in done)


def is_comparable_here(profile: Profile, record: RunRecord) -> bool:
    """True where runs that are measured here can be compared with a run of their block: it was measured on this
    node and the devices that a server of its arm would see here. A simulator's numbers do not depend on the node.
    """
    if record.is_virtual or record.node is None:
        return record.is_virtual
    engine, settings = engine_for(profile.engine.kind), variant_settings(profile, record.variant, record.cell)
    devices = frozenset[str | None]()
    if (engine.is_launched and engine.clock != "virtual") or chooses_devices(settings):
        visible = getattr(settings.server, "env", {}).get(VARIABLE, os.environ.get(VARIABLE))
        devices = frozenset(gpu.uuid for gpu in _inventory(visible))
    return record.node.name == node_name() and devices == {gpu.uuid for gpu in record.node.gpus}


_inventory: Final = cache(gpu_inventory)
