"""The steps of a measured run as input of a step-time model.

Work comes from ``steps.jsonl``, shapes and devices from the profile, hardware from the manifest or the
simulated server. Steps of the warm-up are not in the columns; saturated ones are marked.
"""

from collections.abc import Iterator

import numpy as np

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.profile.model import VariantSettings
from benchctl.records.columns.step_columns import Floats, StepColumns
from benchctl.records.integrity.digests import digest_of
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.step_counts import CACHE_FULL_FRAC, Flags, count_step_work, first_reasons
from benchctl.steptime.work import Deployment, ObservedSteps, Origin, StepWork
from benchctl.units import NS_PER_US

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
        value_model = _value_model(settings)
        value_shape = None if value_model is None else shape_for(value_model).as_value_model()
    except UsageError as error:
        return f"the shape of a model is unknown: {error}"
    return Deployment(
        shape=shape,
        hardware=device,
        tensor_parallel=getattr(settings.server, "tensor_parallel_size", 1),
        value_shape=value_shape,
    )


def _value_model(settings: VariantSettings) -> str | None:
    return settings.server.guides_with if settings.guidance is not None else None


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
    drafts = _or_zero(columns, "draft_tokens")
    num_decodes = np.minimum(decode - drafts, np.where(prefill > 0, num_seqs - 1.0, num_seqs))
    return count_step_work(
        num_prefills=num_seqs - num_decodes,
        prefill_tokens=prefill,
        num_decodes=num_decodes,
        decode_tokens=decode,
        context_after=context,
        output_tokens=columns.optional("output_tokens"),
        draft_tokens=drafts,
        accepted_tokens=_or_zero(columns, "accepted_tokens"),
        guided={name: _or_zero(columns, name) for name in _GUIDED},
    )


def _or_zero(columns: StepColumns, name: str) -> Floats:
    values = columns.optional(name)
    return np.zeros(len(columns)) if values is None else np.nan_to_num(values)


def _reasons(run: LoadedRun, columns: StepColumns) -> Iterator[tuple[str, Flags]]:
    yield "empty batch", columns.num_seqs <= 0
    yield "time not positive", columns.dur_ns <= 0
    yield "preemption", _or_zero(columns, "preempted") > 0
    blocks = run.record.effective_config.get("num_kv_blocks")
    if isinstance(blocks, int) and blocks > 0:
        reason = f"key-value memory above {CACHE_FULL_FRAC:.0%}"
        yield reason, _or_zero(columns, "kv_used_blocks") > CACHE_FULL_FRAC * blocks


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
