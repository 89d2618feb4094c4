"""A step-time model that explains measured runs: the one that is named, or one fitted to the baseline's own steps.

A fit to the baseline alone says what its batches, contexts and prompts cost. What the other side does beyond that,
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
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.errors import UsageError
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model
from benchctl.units import US_PER_S

BASELINE_FIT: Final = "fitted to the baseline's own steps"


def named_model(experiments: Sequence[Experiment], path: Path) -> SourcedModel:
    """The model of a file. Raises UsageError for one of other hardware than that of the experiments."""
    model = read_model(path)
    for experiment in experiments:
        device = experiment.hardware
        if device is not None and device.name != model.hardware:
            raise UsageError(
                f"{path}: a model of {model.hardware}, and {experiment.path} was measured on {device.name}; name a "
                f"model of {device.name}, or scale this one with 'benchctl steptime calibrate'"
            )
    return SourcedModel(predict_us=model.predict_us, source=source_of(model, str(path)))


def source_of(model: StepTimeModel, name: str) -> ModelSource:
    """Name of a model and its error on steps that its fit did not see, the first of those that it states."""
    held_out = model.provenance.held_out
    return ModelSource(name=name, mape_frac=held_out[0].mape_frac if held_out else None)


def modelled_run(experiment: Experiment, run: LoadedRun, model: SourcedModel) -> ModelledRun | str:
    """What the model predicts for the steps of a run, or the reason why it predicts nothing."""
    observed = observed_steps(experiment, run, _stand_in(experiment))
    if isinstance(observed, str):
        return observed
    predicted_us = model.predict_us(observed.work, observed.deployment)
    return ModelledRun(
        step_s=float(observed.duration_us.mean()) / US_PER_S,
        predicted_s=float(np.mean(predicted_us)) / US_PER_S,
        work=mean_work(observed.work, len(observed.duration_us)),
        deployment=observed.deployment,
    )


def _stand_in(experiment: Experiment) -> Hardware | None:
    """The device of the profile, for a machine without a GPU: a fit absorbs how far its peaks are off."""
    if experiment.hardware is not None or experiment.profile_or_none is None:
        return experiment.hardware
    return hardware_or_none(experiment.profile_or_none.hardware)
