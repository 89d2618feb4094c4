"""Errors of a step-time model on steps that its fit did not see.

Whole runs or whole models are left out, never single steps: the step after one that was fitted is nearly the same
step. Each group is predicted by a fit to all the others, intervals included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import UsageError
from benchctl.steptime.diagnosis.predictions import (
    Accuracy,
    Predictions,
    accuracy_of,
    join_predictions,
    predict_runs,
)
from benchctl.steptime.fitting.design import fitted_design, group_label
from benchctl.steptime.fitting.fit import FitOptions, fit_model
from benchctl.steptime.model import HeldOutError, StepTimeModel
from benchctl.steptime.structure import Structure
from benchctl.steptime.work import ObservedSteps

HoldOut: TypeAlias = Literal["run", "model", "tensor-parallel"]
COMPARED: Final[tuple[Structure, ...]] = ("original", "roofline")
"""Structures printed beside the one that is judged."""
_MAX_FOLDS: Final = 20
"""Fits of a hold-out at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One structure judged on groups that it was not fitted to, or one model on any."""

    structure: Structure
    by: HoldOut
    whole: Accuracy
    groups: tuple[Accuracy, ...]
    predictions: Predictions
    is_held_out: bool = True

    def summary(self) -> HeldOutError:
        """The line that the provenance of a model keeps."""
        return HeldOutError(
            by=self.by,
            num_groups=len(self.groups),
            num_steps=self.whole.num_steps,
            mape_frac=round(self.whole.mape_frac, 6),
            bias_frac=round(self.whole.bias_frac, 6),
            coverage_frac=round(self.whole.coverage_frac, 6),
        )


def hold_out(observed: Sequence[ObservedSteps], options: FitOptions, by: HoldOut = "run") -> Evaluation:
    """Leave each group out in turn; of many groups, a twentieth at a time.

    Raises UsageError with fewer than two groups, which leave nothing to fit to.
    """
    labels = [group_label(run, by) for run in observed]
    groups = list(dict.fromkeys(labels))
    if len(groups) < 2:
        raise UsageError(
            f"only one {by} ({groups[0] if groups else 'none'}): leaving it out leaves nothing to fit to; "
            f"add steps of another {by}"
        )
    names = fitted_design(observed, options.structure, options.experts_read).names
    parts = []
    for fold in range(min(len(groups), _MAX_FOLDS)):
        left_out = set(groups[fold::_MAX_FOLDS])
        others = [run for run, label in zip(observed, labels, strict=True) if label not in left_out]
        these = [run for run, label in zip(observed, labels, strict=True) if label in left_out]
        parts.append(predict_runs(fit_model(others, options, names=names), these))
    return _judged(join_predictions(parts), options.structure, by)


def judge(model: StepTimeModel, observed: Sequence[ObservedSteps], by: HoldOut = "run") -> Evaluation:
    """Errors of one model on these steps, of whatever deployment on its device.

    Features have the peaks that the model was fitted with, whatever was measured of that device since.
    """
    observed = [_at_peaks_of(model, run) for run in observed]
    for run in observed:
        if run.deployment.hardware.name != model.hardware:
            model.check_deployment(run.deployment)
    return _judged(predict_runs(model, observed), model.structure, by, is_held_out=False)


def _at_peaks_of(model: StepTimeModel, run: ObservedSteps) -> ObservedSteps:
    """A run on the model's device with the peaks of the model; any other run as it is."""
    hardware = hardware_or_none(model.hardware)
    if hardware is None or run.deployment.hardware.device != hardware.device:
        return run
    return replace(run, deployment=replace(run.deployment, hardware=hardware))


def _judged(predictions: Predictions, structure: Structure, by: HoldOut, *, is_held_out: bool = True) -> Evaluation:
    labels = np.array([group_label(run, by) for run in predictions.runs])[predictions.run_of]
    return Evaluation(
        structure=structure,
        by=by,
        whole=accuracy_of(predictions, np.arange(len(predictions.measured_us)), "all"),
        groups=tuple(
            accuracy_of(predictions, np.flatnonzero(labels == group), group)
            for group in dict.fromkeys(labels.tolist())
        ),
        predictions=predictions,
        is_held_out=is_held_out,
    )


def compare_structures(
    observed: Sequence[ObservedSteps], options: FitOptions, by: HoldOut = "run"
) -> tuple[Evaluation, ...]:
    """The structure of ``options``, then the published form and the analytic roofline on the same groups.

    The published form is fitted as published: non-negative, without a pull to typical values.
    """
    others = [structure for structure in COMPARED if structure != options.structure]
    plain = replace(options, ridge=0.0, constraint="non-negative")
    judged = hold_out(observed, options, by)
    return judged, *(hold_out(observed, replace(plain, structure=structure), by) for structure in others)
