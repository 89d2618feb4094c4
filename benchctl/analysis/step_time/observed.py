"""The steps of measured runs as input of a step-time model, and the model that explains them.

Steps by name: result directories, and tables of steps as CSV or JSON Lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchctl.analysis.attribution.step_time_model import ModelledRun, SourcedModel, mean_work
from benchctl.analysis.attribution.work import or_zero
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.metrics.latency import e2el_ns, is_completed, measured, ttft_ns
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.readers.files import MANIFEST
from benchctl.interop.readers.step_table import TableDefaults, is_step_table, read_step_table
from benchctl.records.columns import Floats, StepColumns
from benchctl.records.integrity import digest_of
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.steptime.model_file import read_model
from benchctl.steptime.step_counts import CACHE_FULL_FRAC, Flags, count_step_work, first_reasons
from benchctl.steptime.work import Deployment, ObservedSteps, Origin, StepWork
from benchctl.units import NS_PER_US, US_PER_S
from benchctl.untrusted.files import is_there

_GUIDED = ("guided_rows", "candidates", "value_prefill_tokens", "value_extend_tokens")
_COUNTS = ("num_prefill_tokens", "num_decode_tokens", "context_tokens")


def observed_steps(experiment: Experiment, run: LoadedRun, hardware: Hardware | None = None) -> ObservedSteps | str:
    """The steps of the load of a run, or the reason why a model cannot use them.

    ``hardware`` stands for the device of a machine that has no name for it, or for the peaks of the one it has.
    """
    columns = run.columns  # once: those of a long log are made on each access
    if not len(columns):
        return "there is no step log"
    if not run.record.times_whole_steps:
        return "the step log times the sampler alone"
    deployment = deployment_of(experiment, run, hardware)
    if isinstance(deployment, str):
        return deployment
    work = work_of(columns)
    if isinstance(work, str):
        return work
    is_out, left_out = first_reasons(dict(_reasons(run, columns)))
    settings = experiment.settings(run.record)
    return ObservedSteps(
        run=run_label(experiment, run),
        model=settings.model if settings is not None else deployment.shape.name,
        deployment=deployment,
        work=work,
        duration_us=columns.dur_ns / NS_PER_US,
        is_saturated=is_out,
        left_out=left_out,
        origin=_origin(experiment, run),
    )


def run_label(experiment: Experiment, run: LoadedRun) -> str:
    """Profile, directory and run: no two runs have the same, also where both were named by ``latest``."""
    return f"{experiment.results.manifest.profile}/{experiment.path.resolve().name}/{run.record.run_id}"


def deployment_of(experiment: Experiment, run: LoadedRun, hardware: Hardware | None = None) -> Deployment | str:
    """Model and devices of a run, or the reason why they are unknown."""
    settings = experiment.settings(run.record)
    if settings is None:
        return "the profile does not name the models"
    own = experiment.hardware_of(run.record)
    is_assumed = any(warning.code == "hardware-unknown" for warning in experiment.warnings)
    if own is not None and hardware is not None and hardware.device != own.device and not is_assumed:
        return f"it ran on {own.device}, and {hardware.device} is named for it: leave out --hardware"
    device = hardware or own
    if device is None:
        return "the peaks of the device are unknown; --hardware NAME gives them"
    try:
        shape = shape_for(settings.model)
        value_model = settings.server.guides_with if settings.guidance is not None else None
        value_shape = None if value_model is None else shape_for(value_model).as_value_model()
    except UsageError as error:
        return f"the shape of a model is unknown: {error}"
    return Deployment(
        shape=shape,
        hardware=device,
        tensor_parallel=getattr(settings.server, "tensor_parallel_size", 1),
        value_shape=value_shape,
    )


def work_of(columns: StepColumns) -> StepWork | str:
    """The work of each step, or the reason why it is unknown."""
    counts = []
    for name in _COUNTS:
        values = columns.optional(name)
        if values is None or np.isnan(values).any():
            return f"the step log does not count {name} in every step"
        counts.append(values)
    prefill, decode, context = counts
    num_seqs = columns.num_seqs.astype(np.float64)
    drafts = or_zero(columns, "draft_tokens")
    num_decodes = np.minimum(decode - drafts, np.where(prefill > 0, num_seqs - 1.0, num_seqs))
    return count_step_work(
        num_prefills=num_seqs - num_decodes,
        prefill_tokens=prefill,
        num_decodes=num_decodes,
        decode_tokens=decode,
        context_after=context,
        output_tokens=columns.optional("output_tokens"),
        draft_tokens=drafts,
        accepted_tokens=or_zero(columns, "accepted_tokens"),
        guided={name: or_zero(columns, name) for name in _GUIDED},
    )


def _reasons(run: LoadedRun, columns: StepColumns) -> Iterator[tuple[str, Flags]]:
    yield "empty batch", columns.num_seqs <= 0
    yield "time not positive", columns.dur_ns <= 0
    yield "preemption", or_zero(columns, "preempted") > 0
    blocks = run.record.effective_config.get("num_kv_blocks")
    if isinstance(blocks, int) and blocks > 0:
        reason = f"key-value memory above {CACHE_FULL_FRAC:.0%}"
        yield reason, or_zero(columns, "kv_used_blocks") > CACHE_FULL_FRAC * blocks


def _origin(experiment: Experiment, run: LoadedRun) -> Origin:
    digest = run.record.files.get("steps.jsonl")
    path = experiment.path / "runs" / run.record.run_id / "steps.jsonl"
    sha256 = (digest or digest_of(path, within=experiment.path)).sha256
    return Origin(
        path=str(path),
        sha256=sha256,
        engine=run.record.engine or experiment.results.manifest.engine,
        engine_version=run.record.engine_version,
        clock=run.record.clock,
    )


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
    return SourcedModel(
        name=str(path),
        predict_us=model.extrapolate_us,
        hardware=hardware,
        mape_frac=held_out[0].mape_frac if held_out else None,
    )


def modelled_run(experiment: Experiment, run: LoadedRun, model: SourcedModel) -> ModelledRun | str:
    """A run with its steps as the model predicts them, or the reason why it predicts nothing."""
    observed = observed_steps(experiment, run, model.hardware)
    if isinstance(observed, str):
        return observed
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
            for run in experiment.results.runs:
                steps = _fitting_steps(experiment, run, defaults)
                if isinstance(steps, str):
                    skipped.append(f"{run_label(experiment, run)}: {steps}")
                else:
                    observed.append(steps)
        else:
            raise UsageError(
                f"{path}: neither a result directory nor a table of steps; name a directory that 'benchctl run' "
                "wrote, or a .csv or .jsonl file with one row a step (from a Parquet file, write a CSV file first)"
            )
    if not observed:
        raise UsageError("no run has steps that a model can use: " + "; ".join(skipped))
    return StepSources(observed=tuple(observed), skipped=tuple(skipped))


def _fitting_steps(experiment: Experiment, run: LoadedRun, defaults: TableDefaults) -> ObservedSteps | str:
    """The steps of a run that counts and is not saturated, or the reason why a model cannot use them."""
    usability = experiment.usability(run)
    if not usability.is_usable:
        return f"{usability.excluded}"
    hardware = None if defaults.hardware is None else hardware_for(defaults.hardware)
    return saturation(run) or observed_steps(experiment, run, hardware)


NUM_SIGNS: Final = 2
_MIN_REQUESTS: Final = 20
"""Fewer have neither a trend nor a tail."""
_MAX_FAILED_FRAC: Final = 0.05
_MIN_R_SQUARED: Final = 0.5
_MAX_PREEMPTED_FRAC: Final = 0.15
_MAX_GROWTH: Final = 2.0
_MAX_TAIL: Final = 10.0


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
    return f"saturated: {', '.join(signs)}" if len(signs) >= NUM_SIGNS else None


def saturation_signs(run: LoadedRun) -> Iterator[str]:
    """Each sign that a run shows."""
    requests = measured(run.requests)
    if len(requests) < _MIN_REQUESTS:
        return
    completed = [request for request in requests if is_completed(request)]
    failed_frac = 1.0 - len(completed) / len(requests)
    if failed_frac > _MAX_FAILED_FRAC:
        yield f"{failed_frac:.0%} of the requests failed"
    preempted = run.columns.optional("preempted")
    preempted_frac = 0.0 if preempted is None else float(np.nansum(preempted)) / len(requests)
    if preempted_frac > _MAX_PREEMPTED_FRAC:
        yield f"{preempted_frac:.2g} preemptions a request"
    if len(completed) >= _MIN_REQUESTS:
        yield from _trends(completed)


def _trends(completed: list[RequestRecord]) -> Iterator[str]:
    times = [(request.sent_ns, ttft_ns(request), e2el_ns(request)) for request in completed]
    rows = np.array([row for row in times if None not in row], dtype=np.float64)
    if len(rows) < _MIN_REQUESTS:
        return
    sent, ttft, e2el = rows[np.argsort(rows[:, 0], kind="stable")].T
    if _r_squared_of_growth(sent, ttft) > _MIN_R_SQUARED:
        yield "first tokens come later and later"
    fifth = len(rows) // 5
    growth = float(np.median(ttft[-fifth:]) / max(np.median(ttft[:fifth]), 1.0))
    if growth > _MAX_GROWTH:
        yield f"the last fifth waits {growth:.3g} times as long for its first token"
    tail = float(np.quantile(e2el, 0.99) / max(np.median(e2el), 1.0))
    if tail > _MAX_TAIL:
        yield f"P99 of the latency is {tail:.3g} times its median"


def _r_squared_of_growth(x: Floats, y: Floats) -> float:
    """R^2 of the line through the points if it rises, else 0."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    correlation = float(np.corrcoef(x, y)[0, 1])
    return correlation**2 if correlation > 0 else 0.0
