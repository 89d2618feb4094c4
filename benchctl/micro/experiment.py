"""A micro-benchmark as an experiment: a result directory like any other, whose runs are replays of forward passes.

    first worker ▸ peaks ▸ directory ▸ blocks: worker ▸ runs ▸ verdict

Any profile of the engine ``micro`` can be measured, whatever its variants are. The first worker starts before there
is a directory: a machine without torch, the device, or memory for a pass leaves nothing behind.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.micro.options import MicroOptions
from benchctl.errors import UsageError
from benchctl.measure.experiment import Listener, Outcome, run_experiment
from benchctl.measure.interrupt import interruptible
from benchctl.measure.machine import new_manifest
from benchctl.measure.measured_run import ignore
from benchctl.measure.on_file import peaks_on_file
from benchctl.measure.result_directory import Origin, ReopenedExperiment, create_results
from benchctl.measure.run import RunContext
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.micro.floor import Peaks
from benchctl.micro.peaks_of_device import peaks_of_device
from benchctl.micro.run import BELOW_FLOOR, MeasuredPasses
from benchctl.micro.worker import Worker, WorkerInfo, WorkerSettings, find_torch_python, started_worker
from benchctl.micro.workers_of_blocks import PassWorker, WorkersOfBlocks, visible_devices
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import GpuInfo, ResultWarning
from benchctl.workload.prepare import prepare_requests

StartWorker: TypeAlias = Callable[[Profile], AbstractContextManager[PassWorker]]
"""Starts a worker for the passes of a profile, which ends with the context."""


def worker_for(profile: Profile) -> AbstractContextManager[Worker]:
    """A worker for the passes of a profile. Raises UsageError where its settings cannot be met here."""
    options = shared_options(profile)
    return started_worker(
        WorkerSettings(
            python=find_torch_python(None if options.python is None else Path(options.python)),
            shape=shape_for(profile.model),
            device=options.device,
            dtype=options.dtype,
            kv_layout=options.kv_layout,
            seed=profile.seed,
            threads=options.threads,
        )
    )


def shared_options(profile: Profile) -> MicroOptions:
    """The options of all runs, such as the device; those that differ are those of the first run."""
    (variant, cell), *_ = arms(profile)
    return own_options(variant_settings(profile, variant, cell), MicroOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroOutcome:
    """The directory of an experiment, and how its runs of this call ended."""

    path: Path
    outcome: Outcome
    below_floor: tuple[str, ...]
    """Runs that were faster than their device can be; they count nowhere."""


def measure_forward(
    profile: Profile,
    origin: Origin,
    listener: Listener,
    start: StartWorker = worker_for,
    on_results: Callable[[ResultDirectory], object] = ignore,
) -> MicroOutcome:
    """Measure an experiment of the engine ``micro`` in a new directory, given to ``on_results`` when it is there.

    Raises UsageError where a pass cannot be computed here, and KeyboardInterrupt on SIGINT or SIGTERM; what was
    measured until then is kept.
    """
    with interruptible(), WorkersOfBlocks(partial(start, profile)) as workers:
        info = _checked(workers.first(), profile).info
        gpus = _gpus(shared_options(profile).device)
        measured = peaks_on_file(profile, [gpu.name for gpu in gpus])
        peaks = peaks_of_device(info, measured)
        results = _create(profile, info, gpus, peaks, measured, origin)
        on_results(results)
        return _measure(results, profile, workers, peaks, listener)


def resume_forward(
    reopened: ReopenedExperiment, listener: Listener, start: StartWorker = worker_for
) -> MicroOutcome:
    """Measure the runs of an earlier experiment that are not done. Raises as ``measure_forward``."""
    profile = reopened.profile
    if profile.engine.kind != "micro":
        raise UsageError(
            f"{reopened.results.path} holds requests to engine {profile.engine.kind!r}; continue it with "
            f"'benchctl run --resume {reopened.results.path}'"
        )
    with interruptible(), WorkersOfBlocks(partial(start, profile)) as workers:
        peaks = peaks_of_device(_checked(workers.first(), profile).info, PEAKS.in_results(reopened.results.path))
        return _measure(reopened.results, profile, workers, peaks, listener)


def _checked(worker: PassWorker, profile: Profile) -> PassWorker:
    """The worker, which has memory for every pass. Raises UsageError where it has not."""
    options = (own_options(variant_settings(profile, *arm), MicroOptions) for arm in arms(profile))
    worker.check_fits(list(dict.fromkeys(each.forward_pass[0] for each in options)))
    return worker


def _create(
    profile: Profile,
    info: WorkerInfo,
    gpus: tuple[GpuInfo, ...],
    peaks: Peaks | None,
    measured: MeasuredPeaks | None,
    origin: Origin,
) -> ResultDirectory:
    """Write everything that is known before the first run."""
    shape_for(profile.model)
    prepared = prepare_requests(profile)
    manifest = new_manifest(profile, prepared, origin.argv)
    versions = {**manifest.versions, "torch": info.torch_version}
    notes = () if peaks is not None else (_floor_unknown(info, measured),)
    manifest = msgspec.structs.replace(
        manifest,
        label=origin.label,
        gpus=gpus,
        versions=dict(sorted(versions.items())),
        warnings=(*manifest.warnings, *notes),
    )
    return create_results(profile, prepared, origin, manifest, peaks=measured)


def _gpus(device: str) -> tuple[GpuInfo, ...]:
    """The device of the worker; none where it computes on the CPU."""
    if device == "cpu":
        return ()
    return gpu_inventory(visible_devices(device))


def _floor_unknown(info: WorkerInfo, measured: MeasuredPeaks | None) -> ResultWarning:
    lacking = "are known" if measured is None else "were measured while the machine was quiet"
    message = (
        f"no peaks of {info.device_name} {lacking}, so that no result is held against the least time of its FLOPs "
        "and bytes; 'benchctl micro roofline' measures them"
    )
    return ResultWarning(code="floor-unknown", message=message)


def _measure(
    results: ResultDirectory,
    profile: Profile,
    workers: WorkersOfBlocks,
    peaks: Peaks | None,
    listener: Listener,
) -> MicroOutcome:
    passes = MeasuredPasses(workers=workers, peaks=peaks)
    below_floor: list[str] = []

    def measure(_context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        record = passes.measure(profile, planned, directory)
        if record.failure is not None and record.failure.cause == BELOW_FLOOR:
            below_floor.append(record.run_id)
        return record

    outcome = run_experiment(results, profile, (), listener, measure)
    return MicroOutcome(path=results.path, outcome=outcome, below_floor=tuple(below_floor))
