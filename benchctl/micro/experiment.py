"""A micro-benchmark as an experiment: a result directory like any other, whose runs are replays of forward passes.

    first worker ▸ peaks ▸ directory ▸ blocks: worker ▸ runs ▸ verdict

Any profile of the engine ``micro`` can be measured, whatever its variants are. The first worker starts before there
is a directory: a machine without torch, the device, or memory for a pass leaves nothing behind.

One run is the replays of one point in one mode, in the worker of its block:

    begin ▸ configuration ▸ warm-up and replays ∥ samplers ▸ steps ▸ floor ▸ verdict

A run below its floor is a failed one, whatever else is asked for: it measured something else than its pass. Points
and the profile of an experiment that measures them come last.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.environment import build_versions
from benchctl.engines.micro import MicroOptions
from benchctl.errors import RunError, UsageError
from benchctl.measure.directory import Origin, ReopenedExperiment, create_results
from benchctl.measure.experiment import Outcome, run_experiment
from benchctl.measure.interrupt import interruptible
from benchctl.measure.machine import new_manifest, this_node
from benchctl.measure.measured_run import MeasuredRun, ignore
from benchctl.measure.on_file import peaks_on_file
from benchctl.measure.run import Listener, RunContext
from benchctl.measure.telemetry.gpus import gpu_inventory, open_gpu
from benchctl.measure.telemetry.samplers import sampling
from benchctl.micro.peaks import Peaks, peaks_of_device
from benchctl.micro.worker import (
    ForwardTimes,
    Worker,
    WorkerInfo,
    WorkerSettings,
    find_torch_python,
    started_worker,
)
from benchctl.profile.choices import ForwardPoint, Mode, Phase
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import Cell, GpuInfo, ResultWarning, StepRecord
from benchctl.units import us_from_ns
from benchctl.workload.prepare import prepare_requests

BELOW_FLOOR: Final = "below-floor"
"""Cause of the failure of a run that is faster than its device."""

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


class WorkersOfBlocks:
    """A fresh worker for every block, which measures all runs of it; one lives at a time.

    What differs from process to process, such as where its memory lies, is thus in the scatter of the blocks.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[Worker]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._worker: Worker | None = None
        self._block: int | None = None

    def of(self, block: int | None) -> Worker:
        """The worker of a block, or with None of the one that comes next; that of another block is ended."""
        if self._block not in {None, block}:
            self.close()
        if self._worker is None:
            self._worker = self._stack.enter_context(self._start())
        self._block = block
        return self._worker

    def close(self) -> None:
        """End the worker, if there is one: the next run gets another."""
        self._worker = self._block = None
        self._stack.close()


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
    with interruptible(), closing(WorkersOfBlocks(partial(start, profile))) as workers:
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
    with interruptible(), closing(WorkersOfBlocks(partial(start, profile))) as workers:
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
    return ResultWarning(
        code="floor-unknown",
        message=(
            f"no peaks of {info.device_name} {lacking}, so that no result is held against the least time of its "
            "FLOPs and bytes; 'benchctl micro roofline' measures them"
        ),
    )


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


def measure_passes(
    workers: WorkersOfBlocks, peaks: Peaks | None, profile: Profile, planned: PlannedRun, directory: RunDirectory
) -> RunRecord:
    """Measure one run; returns its final record, which is also on disk.

    ``peaks`` are those of the device, if they are known. A failed run is a record with state ``failed``. Raises
    UsageError where no such run can succeed here, and KeyboardInterrupt; in both cases the record says so.
    """
    settings = variant_settings(profile, planned.variant, planned.cell)
    options = own_options(settings, MicroOptions)
    journal = MeasuredRun(profile, planned, directory, node=this_node())
    with journal.begun():
        try:
            worker = workers.of(planned.block)
            shape, (point, _) = shape_for(settings.model), options.forward_pass
            about = {"model": settings.model, "server.num_params": shape.num_params()}
            journal.update(
                effective_config={**about, **_configuration(options, worker.info)},
                engine_version=worker.info.torch_version,
                floor_ns=None if peaks is None else peaks.floor_ns(shape, point, options.dtype),
            )
            times = _replays(worker, options, profile, directory, journal)
        except RunError as error:  # after which the next run may succeed, with a worker of its own
            workers.close()
            return journal.fail(error.cause, str(error), error.log_tail)
        with directory.append("steps") as writer:
            for step in steps_of(point, times):
                writer.write(step)
        journal.update(clock=times.clock)
        journal.time(first_send_ns=times.start_ns[0], last_token_ns=times.start_ns[0] + times.wall_ns)
        problem = None if peaks is None else _problem(journal.record.floor_ns, times, peaks)
        if problem is None:
            return journal.close("done")
        journal.suspect(BELOW_FLOOR, problem)
        return journal.fail(BELOW_FLOOR, problem)


def _configuration(options: MicroOptions, info: WorkerInfo) -> dict[str, Any]:
    """Settings of a pass, and what the worker says of where it computes."""
    reported = msgspec.structs.asdict(info)
    # Values of a worker's description that do not change what it computes
    where = {
        key: value
        for key, value in reported.items()
        if key not in {"python", "free_bytes", "device_uuid"} and value is not None
    }
    chosen = options.model_dump(mode="json", exclude={"python", "replays", "warmups"})
    return {f"server.{key}": value for key, value in {**where, **chosen}.items()}


def _replays(
    worker: Worker, options: MicroOptions, profile: Profile, directory: RunDirectory, journal: MeasuredRun
) -> ForwardTimes:
    """Measure and sample; recorded are the operators of the pass, and what disturbed its replays."""
    samples_gpu = options.device != "cpu" and profile.telemetry.gpu_hz
    with open_gpu(visible_devices(options.device), warn=journal.warn if samples_gpu else ignore) as gpu:
        gpus = () if gpu is None else gpu.described()
        journal.update(node=this_node(gpus, build_versions(Path(worker.info.python))))
        with sampling(directory.log, profile.telemetry, processes=worker.processes, gpu=gpu) as warnings:
            point, mode = options.forward_pass
            times = worker.measure(point, mode, warmups=options.warmups, replays=options.replays)
    journal.warn(*warnings)
    if times.num_operators is not None:
        config = {**journal.record.effective_config, "server.operators": times.num_operators}
        journal.update(effective_config=config)
    if times.num_allocations:
        journal.warn(
            ResultWarning(
                code="replays-allocate",
                message=(
                    f"the device handed out {times.num_allocations} pieces of memory during "
                    f"{len(times.duration_ns)} replays, which wait for it"
                ),
            )
        )
    return times


def _problem(floor_ns: int | None, times: ForwardTimes, peaks: Peaks) -> str | None:
    """The sentence on a median below the floor of the pass; None where it is above."""
    median_ns = float(np.median(times.duration_ns))
    if floor_ns is None or median_ns >= floor_ns:
        return None
    return (
        f"the median of {len(times.duration_ns)} replays is {us_from_ns(median_ns):.1f} µs, and no such pass takes "
        f"less than {us_from_ns(floor_ns):.1f} µs by its FLOPs and bytes on {peaks.hardware.title}: something else "
        "was timed, and the run counts nowhere"
    )


def steps_of(point: ForwardPoint, times: ForwardTimes) -> Iterator[StepRecord]:
    """One step for each replay."""
    new, is_decode = point.total_new_tokens, point.phase == "decode"
    for number, (start_ns, dur_ns) in enumerate(zip(times.start_ns, times.duration_ns, strict=True)):
        yield StepRecord(
            step=number,
            start_ns=start_ns,
            dur_ns=dur_ns,
            clock=times.clock,
            phase=point.phase,
            num_seqs=point.batch_size,
            num_prefill_tokens=0 if is_decode else new,
            num_decode_tokens=new if is_decode else 0,
            context_tokens=point.batch_size * (point.context_tokens + point.new_tokens),
        )


def visible_devices(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES that names the device of a worker alone: empty for ``cpu``."""
    if not device.startswith("cuda"):
        return ""
    number = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(number)
    entries = visible.split(",")
    return entries[number].strip() if number < len(entries) else ""


def grid_of_points(
    phases: Sequence[Phase], batch_sizes: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]
) -> tuple[ForwardPoint, ...]:
    """Decodes behind each context and prefills of each prompt, at every batch size."""
    points = (
        ForwardPoint(phase=phase, batch_size=size, context_tokens=length)
        if phase == "decode"
        else ForwardPoint(phase=phase, batch_size=size, new_tokens=length)
        for phase in phases
        for length, size in product(contexts if phase == "decode" else prompts, batch_sizes)
    )
    return tuple(dict.fromkeys(points))


def forward_profile(
    points: Sequence[ForwardPoint],
    *,
    model: str,
    modes: Sequence[Mode],
    hardware: str | None = None,
    blocks: int = 8,
    replays: int = 200,
    seed: int = 0,
    name: str = "forward",
    **engine_options: Any,
) -> Profile:
    """The experiment ``micro-<name>-<model>`` of these points in all modes.

    Every mode is a variant, the first of them the baseline, and every point a cell; each cell of a variant is
    compared with the same cell of the baseline. ``replays`` are those of each point and mode over all blocks,
    rounded up to as many in each; ``hardware`` names the device in the table of hardware, if it is there.
    ``engine_options`` are options of the engine ``micro``, None for its default. Raises ProfileError for values
    that make no experiment.
    """
    cells = cells_of_points(points)
    sweep = {factor: list(dict.fromkeys(cell[factor] for cell in cells)) for factor in cells[0]}
    name = f"micro-{name}-{_slug(shape_for(model).name)}"
    options = {"replays": -(-replays // max(blocks, 1)), **engine_options}
    plain: dict[str, Any] = {
        "name": name,
        "description": f"forward passes of {model} with random weights on {options['device']}",
        "seed": seed,
        "blocks": blocks,
        "model": model,
        "engine": {"kind": "micro", "options": {key: value for key, value in options.items() if value is not None}},
        "workload": {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}},
        "variants": {mode: {"server": {"mode": mode}} for mode in modes},
        "baseline": modes[0],
        "sweep": sweep,
        "cells": [dict(cell) for cell in cells],
        "sweep_baseline": True,
        "allowed_differences": [
            f"server.{setting}" for setting in ("mode", "phase", "batch_size", "length", "new_tokens")
        ],
        # The median of a block's replays: a pass that the host interrupts moves a mean and not a median
        "primary_metrics": ["p50_step_ms"],
        **({} if hardware is None else {"hardware": hardware}),
    }
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


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
