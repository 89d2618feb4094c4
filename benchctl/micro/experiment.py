"""A micro-benchmark as an experiment: a result directory like any other, whose runs are replays of forward passes.

    first worker ▸ peaks ▸ directory ▸ blocks: worker ▸ runs ▸ verdict

Any profile of the engine ``micro`` can be measured, whatever its variants are. The first worker starts before there
is a directory: a machine without torch, the device, or memory for a pass leaves nothing behind.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.micro import MicroOptions
from benchctl.errors import UsageError
from benchctl.measure.directory import Origin, ReopenedExperiment, create_results
from benchctl.measure.experiment import Listener, Outcome, run_experiment
from benchctl.measure.interrupt import interruptible
from benchctl.measure.machine import new_manifest
from benchctl.measure.measured_run import ignore
from benchctl.measure.on_file import peaks_on_file
from benchctl.measure.run import RunContext
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.micro.peaks import Peaks, peaks_of_device
from benchctl.micro.run import BELOW_FLOOR, WorkersOfBlocks, measure_passes, visible_devices
from benchctl.micro.worker import Worker, WorkerInfo, WorkerSettings, find_torch_python, started_worker
from benchctl.profile.choices import DataType, ForwardPoint, KvLayout, Mode, Phase
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import Cell, GpuInfo, ResultWarning
from benchctl.workload.prepare import prepare_requests

DEFAULT_BLOCKS: Final = 8
DEFAULT_REPLAYS: Final = 200
PRIMARY_METRICS: Final = ("p50_step_ms",)
"""The median of a block's replays: a pass that the host interrupts moves a mean and not a median."""
_POINT_SETTINGS: Final = ("mode", "phase", "batch_size", "length", "new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Settings that all points of an experiment share, and how often each is measured."""

    model: str
    device: str
    dtype: DataType
    modes: Sequence[Mode]
    """The first is the baseline."""
    kv_layout: KvLayout = "contiguous"
    hardware: str | None = None
    """Name of the device in the table of hardware, if it is there."""
    python: str | None = None
    threads: int | None = None
    """Threads of an operator on a CPU; None on a GPU, and for torch's own choice."""
    blocks: int = DEFAULT_BLOCKS
    replays: int = DEFAULT_REPLAYS
    """Of each point and mode over all blocks; rounded up to as many in each."""
    seed: int = 0


def grid_of_points(
    phases: Sequence[Phase], batch_sizes: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]
) -> tuple[ForwardPoint, ...]:
    """Decodes behind each context and prefills of each prompt, at every batch size."""
    points: list[ForwardPoint] = []
    for phase in phases:
        lengths = contexts if phase == "decode" else prompts
        for length, batch_size in product(lengths, batch_sizes):
            tokens = {"context_tokens": length} if phase == "decode" else {"new_tokens": length}
            points.append(ForwardPoint(phase=phase, batch_size=batch_size, **tokens))
    return tuple(dict.fromkeys(points))


def forward_profile(settings: PassSettings, points: Sequence[ForwardPoint], name: str = "forward") -> Profile:
    """The experiment ``micro-<name>-<model>`` of these points in all modes.

    Every mode is a variant, the first of them the baseline, and every point a cell; each cell of a variant is
    compared with the same cell of the baseline. Raises ProfileError for values that make no experiment.
    """
    cells = cells_of_points(points)
    sweep = {factor: list(dict.fromkeys(cell[factor] for cell in cells)) for factor in cells[0]}
    name = f"micro-{name}-{_slug(shape_for(settings.model).name)}"
    plain: dict[str, Any] = {
        "name": name,
        "description": f"forward passes of {settings.model} with random weights on {settings.device}",
        "seed": settings.seed,
        "blocks": settings.blocks,
        "model": settings.model,
        "engine": {"kind": "micro", "options": _engine_options(settings)},
        "workload": {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}},
        "variants": {mode: {"server": {"mode": mode}} for mode in settings.modes},
        "baseline": settings.modes[0],
        "sweep": sweep,
        "cells": [dict(cell) for cell in cells],
        "sweep_baseline": True,
        "allowed_differences": [f"server.{setting}" for setting in _POINT_SETTINGS],
        "primary_metrics": list(PRIMARY_METRICS),
    }
    if settings.hardware is not None:
        plain["hardware"] = settings.hardware
    return profile_from_plain(plain, f"benchctl micro ({name})")


def cells_of_points(points: Sequence[ForwardPoint]) -> tuple[Cell, ...]:
    """The cell of each point, in options of the engine ``micro``.

    ``length`` is the context of a decode and the prompt of a prefill. Where some prefill has a context, it is the
    context of all, and ``new_tokens`` says how many tokens follow.
    """
    names_new_tokens = any(point.phase == "prefill" and point.context_tokens for point in points)
    cells: list[Cell] = []
    for point in points:
        is_of_context = names_new_tokens or point.phase == "decode"
        cell: Cell = {"phase": point.phase, "batch_size": point.batch_size}
        cell["length"] = point.context_tokens if is_of_context else point.new_tokens
        cells.append({**cell, "new_tokens": point.new_tokens} if names_new_tokens else cell)
    return tuple(cells)


def _engine_options(settings: PassSettings) -> dict[str, Any]:
    options = {
        "device": settings.device,
        "dtype": settings.dtype,
        "kv_layout": settings.kv_layout,
        "replays": -(-settings.replays // max(settings.blocks, 1)),
        "python": settings.python,
        "threads": settings.threads,
    }
    return {name: value for name, value in options.items() if value is not None}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


StartWorker: TypeAlias = Callable[[Profile], AbstractContextManager[Worker]]
"""Starts a worker for the passes of a profile, which ends with the context."""


def worker_for(profile: Profile) -> AbstractContextManager[Worker]:
    """A worker for the passes of a profile. Raises UsageError where its settings cannot be met here."""
    all_options = [own_options(variant_settings(profile, *arm), MicroOptions) for arm in arms(profile)]
    options = all_options[0]
    return started_worker(
        WorkerSettings(
            python=str(find_torch_python(None if options.python is None else Path(options.python))),
            shape=shape_for(profile.model),
            points=tuple(dict.fromkeys(each.forward_pass[0] for each in all_options)),
            device=options.device,
            dtype=options.dtype,
            kv_layout=options.kv_layout,
            seed=profile.seed,
            threads=options.threads,
        )
    )


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
        info = workers.of(None).info
        gpus = gpu_inventory(visible_devices(info.device))
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
        peaks = peaks_of_device(workers.of(None).info, PEAKS.in_results(reopened.results.path))
        return _measure(reopened.results, profile, workers, peaks, listener)


def _create(
    profile: Profile,
    info: WorkerInfo,
    gpus: tuple[GpuInfo, ...],
    peaks: Peaks | None,
    measured: MeasuredPeaks | None,
    origin: Origin,
) -> ResultDirectory:
    """Write everything that is known before the first run."""
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
    below_floor: list[str] = []

    def measure(_context: RunContext, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        record = measure_passes(workers, peaks, profile, planned, directory)
        if record.failure is not None and record.failure.cause == BELOW_FLOOR:
            below_floor.append(record.run_id)
        return record

    outcome = run_experiment(results, profile, (), listener, measure)
    return MicroOutcome(path=results.path, outcome=outcome, below_floor=tuple(below_floor))
