"""The steps of measured runs as input of a step-time model, and the model that explains them.

Steps by name: result directories, and tables of steps as CSV or JSON Lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np

from benchctl.analysis.attribution.estimate import ModelledRun, SourcedModel, mean_work
from benchctl.analysis.attribution.work import NO_PEAKS, NO_STEPS, deployment_of, or_zero, work_of
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.errors import UsageError
from benchctl.interop.foreign_readers import MANIFEST
from benchctl.interop.tables import TableDefaults, is_step_table, read_step_table
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import digest_of
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.model import read_model
from benchctl.steptime.work import CACHE_FULL_FRAC, Deployment, ObservedSteps, Origin, first_reasons
from benchctl.units import NS_PER_US, US_PER_S
from benchctl.untrusted.files import is_there


def observed_steps(experiment: Experiment, run: LoadedRun, hardware: Hardware | None = None) -> ObservedSteps:
    """The steps of the load of a run. Raises UsageError with the reason why a model cannot use them.

    ``hardware`` stands for the device of a machine that has no name for it, or for the peaks of the one it has.
    """
    columns, record = run.columns, run.record
    if not len(columns):
        raise UsageError(NO_STEPS)
    if not record.times_whole_steps:
        raise UsageError("the step log times the sampler alone")
    deployment = _deployment(experiment, run, hardware)
    work = work_of(columns)
    reasons = {
        "empty batch": columns.num_seqs <= 0,
        "time not positive": columns.dur_ns <= 0,
        "preemption": or_zero(columns, "preempted") > 0,
    }
    blocks = record.effective_config.get("num_kv_blocks")
    if isinstance(blocks, int) and blocks > 0:
        is_full = or_zero(columns, "kv_used_blocks") > CACHE_FULL_FRAC * blocks
        reasons[f"key-value memory above {CACHE_FULL_FRAC:.0%}"] = is_full
    is_out, left_out = first_reasons(reasons)
    directory = ResultDirectory(experiment.path).run(record.run_id)
    logs = [directory.of_load(load.load or 1).step_log for load in run.loads]
    sums = [(record.files.get(log.name) or digest_of(log, within=experiment.path)).sha256 for log in logs]
    settings = experiment.settings(record)
    return ObservedSteps(
        run=run_label(experiment, run),
        model=settings.model if settings is not None else deployment.shape.name,
        deployment=deployment,
        work=work,
        duration_us=columns.dur_ns / NS_PER_US,
        is_saturated=is_out,
        left_out=left_out,
        origin=Origin(
            path=str(logs[0]),
            sha256=sums[0] if len(sums) == 1 else sha256("".join(sums).encode()).hexdigest(),
            engine=record.engine or experiment.results.manifest.engine,
            engine_version=record.engine_version,
            clock=record.clock,
        ),
    )


def run_label(experiment: Experiment, run: LoadedRun) -> str:
    """Profile, directory and run: no two runs have the same, also where both were named by ``latest``."""
    return f"{experiment.results.manifest.profile}/{experiment.path.resolve().name}/{run.record.run_id}"


def _deployment(experiment: Experiment, run: LoadedRun, hardware: Hardware | None) -> Deployment:
    """Model and devices of a run. Raises UsageError where they are unknown, or other devices are named."""
    settings, own = experiment.settings(run.record), experiment.hardware_of(run.record)
    is_assumed = any(warning.code == "hardware-unknown" for warning in experiment.warnings)
    if own is not None and hardware is not None and hardware.device != own.device and not is_assumed:
        raise UsageError(f"it ran on {own.device}, and {hardware.device} is named for it: leave out --hardware")
    if settings is not None and own is None and hardware is None:
        raise UsageError(f"{NO_PEAKS}; --hardware NAME gives them")
    return deployment_of(settings, hardware or own)


def explaining_model(experiments: Sequence[Experiment], named: Path | None) -> SourcedModel | str:
    """The named model, else that of the baseline's profile; or why there is none.

    ``experiments`` are those of both sides, the baseline's first. Raises UsageError for a named model that is
    damaged or of other hardware; one that the profile names and that is not there is only a reason.
    """
    if named is not None:
        return _named_model(experiments, named)
    profile = experiments[0].profile_or_none
    if profile is None or profile.step_time_model is None:
        return "no step-time model is named, neither by --step-time-model nor by the profile"
    try:
        return _named_model(experiments, Path(profile.step_time_model))
    except UsageError as error:
        return f"the step-time model of the profile cannot be used: {error}"


def _named_model(experiments: Sequence[Experiment], path: Path) -> SourcedModel:
    """The model of a file. Raises UsageError for one of other hardware than that of the experiments.

    A machine without a GPU is what the model says it is. Features have the peaks that the model was fitted with,
    whatever those of the directory.
    """
    model = read_model(path)
    hardware, held_out = hardware_for(model.hardware), model.provenance.held_out
    for experiment in experiments:
        device = experiment.hardware
        if device is not None and device.device != hardware.device:
            raise UsageError(
                f"{path}: a step-time model of {model.hardware}, and {experiment.path} is of {device.device}; "
                f"name a model of {device.device}, or carry this one over with 'benchctl steptime calibrate'"
            )
    mape_frac = held_out[0].mape_frac if held_out else None
    return SourcedModel(name=str(path), predict_us=model.extrapolate_us, hardware=hardware, mape_frac=mape_frac)


def modelled_run(experiment: Experiment, run: LoadedRun, model: SourcedModel) -> ModelledRun | str:
    """A run with its steps as the model predicts them, or the reason why it predicts nothing."""
    try:
        observed = observed_steps(experiment, run, model.hardware)
    except UsageError as error:
        return str(error)
    predicted_us = model.predict_us(observed.work, observed.deployment)
    return ModelledRun(
        step_s=float(observed.duration_us.mean()) / US_PER_S,
        predicted_s=float(np.mean(predicted_us)) / US_PER_S,
        work=mean_work(observed.work, len(observed.duration_us)),
        deployment=observed.deployment,
    )


NO_DEFAULTS: Final = TableDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSources:
    """Steps of every run that could be used, and the reason for each that could not."""

    observed: tuple[ObservedSteps, ...]
    skipped: tuple[str, ...] = ()


def read_sources(
    paths: Sequence[Path], defaults: TableDefaults = NO_DEFAULTS, *, allow_suspect: bool = False
) -> StepSources:
    """The steps that ``paths`` name. Raises UsageError when a path is neither, or no run can be used."""
    observed: list[ObservedSteps] = []
    skipped: list[str] = []
    for path in paths:
        if is_step_table(path):
            observed += read_step_table(path, defaults)
        elif is_there(path / MANIFEST, within=path):
            experiment = load_experiment(path, allow_suspect=allow_suspect)
            hardware = None if defaults.hardware is None else hardware_for(defaults.hardware)
            for run in experiment.results.runs:
                saturated = (reason for load in run.loads if (reason := saturation(load)) is not None)
                reason = experiment.usability(run).excluded or next(saturated, None)
                try:
                    observed += [] if reason else [observed_steps(experiment, run, hardware)]
                except UsageError as error:
                    reason = str(error)
                skipped += [f"{run_label(experiment, run)}: {reason}"] if reason else []
        else:
            raise UsageError(
                f"{path}: neither a result directory nor a table of steps; name a directory that 'benchctl run' "
                "wrote, or a .csv or .jsonl file with one row a step (from a Parquet file, write a CSV file first)"
            )
    if not observed:
        raise UsageError("no run has steps that a model can use: " + "; ".join(skipped))
    return StepSources(observed=tuple(observed), skipped=tuple(skipped))


_MIN_REQUESTS: Final = 20
"""Fewer have neither a trend nor a tail."""


def saturation(run: LoadedRun) -> str | None:
    """The signs that a run was offered more than its server could serve; None for one with fewer than two.

    Two of these five make a run saturated, by the rule of the published calibration protocol. Its requests then say
    how the queue behaves, and a fit leaves its steps out: few logs count preemption and what is computed again.

    * more than 5 % of the requests failed
    * first-token times grow with the time of sending: a line with R^2 above 0.5
    * more preemptions than 15 % of the requests
    * the median of ``ttft`` in the last fifth of the requests is more than twice that in the first
    * P99 of ``e2el`` is more than ten times P50
    """
    signs = tuple(saturation_signs(run))
    return f"saturated: {', '.join(signs)}" if len(signs) >= 2 else None


def saturation_signs(run: LoadedRun) -> Iterator[str]:
    """Each sign that a run shows."""
    requests = measured(run.requests)
    if len(requests) < _MIN_REQUESTS:
        return
    completed = [request for request in requests if is_completed(request)]
    failed_frac = 1.0 - len(completed) / len(requests)
    if failed_frac > 0.05:
        yield f"{failed_frac:.0%} of the requests failed"
    preempted_frac = float(or_zero(run.columns, "preempted").sum()) / len(requests)
    if preempted_frac > 0.15:
        yield f"{preempted_frac:.2g} preemptions a request"
    times = [(answer.sent_ns, answer.ttft_ns, answer.e2el_ns) for answer in chunks_of(completed).answers]
    rows = np.array([row for row in times if None not in row], dtype=np.float64)
    if len(rows) < _MIN_REQUESTS:
        return
    sent, ttft, e2el = rows[np.argsort(rows[:, 0], kind="stable")].T
    correlation = float(np.corrcoef(sent, ttft)[0, 1]) if np.ptp(sent) and np.ptp(ttft) else 0.0
    if correlation > 0 and correlation**2 > 0.5:
        yield "first tokens come later and later"
    fifth = len(rows) // 5
    growth = float(np.median(ttft[-fifth:]) / max(np.median(ttft[:fifth]), 1.0))
    if growth > 2.0:
        yield f"the last fifth waits {growth:.3g} times as long for its first token"
    tail = float(np.quantile(e2el, 0.99) / max(np.median(e2el), 1.0))
    if tail > 10.0:
        yield f"P99 of the latency is {tail:.3g} times its median"
