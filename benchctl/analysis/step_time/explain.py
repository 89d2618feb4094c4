"""The step-time model that explains measured runs: the one that is named, or one fitted to the baseline's steps.

A fit to the baseline says what its own batches, contexts and prompts cost. What the other side does beyond that,
such as scoring candidates, is not in it and stays in the rest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchctl.analysis.attribution.mean_work import mean_work
from benchctl.analysis.attribution.step_time_model import ModelledRun, ModelSource, SourcedModel
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.step_time.observed import observed_steps
from benchctl.costs.hardware import hardware_for, hardware_or_none
from benchctl.errors import UsageError
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.fitting.fit import FitOptions, fit_model
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model
from benchctl.units import US_PER_S

BASELINE_FIT: Final = "fitted to the baseline's own steps"
_DRAWS: Final = 2
"""Of the bootstrap, whose intervals nothing here uses; the fewest that give any."""


def explaining_model(
    experiments: Sequence[Experiment], baseline_runs: Sequence[LoadedRun], named: Path | None
) -> SourcedModel | str:
    """The named model, else that of the baseline's profile, else one fitted to the baseline; or why there is none.

    ``experiments`` are those of both sides, the baseline's first. Raises UsageError for a named model that is
    damaged or of other hardware; one that the profile names and that is not there is only a reason.
    """
    if named is not None:
        return named_model(experiments, named)
    baseline = experiments[0]
    of_profile = None if baseline.profile_or_none is None else baseline.profile_or_none.step_time_model
    if of_profile is None:
        return baseline_model(baseline, baseline_runs)
    try:
        return named_model(experiments, Path(of_profile))
    except UsageError as error:
        return f"the step-time model of the profile cannot be used: {error}"


def named_model(experiments: Sequence[Experiment], path: Path) -> SourcedModel:
    """The model of a file. Raises UsageError for one of other hardware than that of the experiments.

    A machine without a GPU is what the model says it is. Features have the peaks that the model was fitted with,
    whatever those of the directory.
    """
    model = read_model(path)
    source, hardware = source_of(model, str(path)), hardware_for(model.hardware)
    for experiment in experiments:
        device = experiment.hardware
        if device is not None and device.device != hardware.device:
            raise UsageError(
                f"{path}: a step-time model of {model.hardware}, and {experiment.source} is of {device.device}; "
                f"name a model of {device.device}, or carry this one over with 'benchctl steptime calibrate'"
            )
    return SourcedModel(predict_us=model.extrapolate_us, source=source, hardware=hardware)


def source_of(model: StepTimeModel, name: str) -> ModelSource:
    """Name of a model and its error on steps that its fit did not see, the first of those that it states."""
    held_out = model.provenance.held_out
    return ModelSource(name=name, mape_frac=held_out[0].mape_frac if held_out else None)


def baseline_model(baseline: Experiment, runs: Sequence[LoadedRun]) -> SourcedModel | str:
    """A model of the baseline's steps, where these vary enough to determine one; else the reason.

    On a machine without a GPU the peaks are those of the profile: coefficients absorb how far they are off.
    """
    hardware = baseline.hardware_of(runs[0].record) if runs else baseline.hardware
    if hardware is None and baseline.profile_or_none is not None:
        hardware = hardware_or_none(baseline.profile_or_none.hardware)
    if hardware is None:
        return "the profile names no hardware whose peaks a step-time model could use"
    steps = [observed_steps(baseline, run, hardware) for run in {run.record.run_id: run for run in runs}.values()]
    if reasons := [reason for reason in steps if isinstance(reason, str)]:
        return reasons[0]
    try:
        model = fit_model([each for each in steps if not isinstance(each, str)], FitOptions(num_draws=_DRAWS))
    except UsageError as error:
        return f"the baseline's steps determine no step-time model: {error}"
    return SourcedModel(predict_us=model.extrapolate_us, source=ModelSource(name=BASELINE_FIT), hardware=hardware)


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
