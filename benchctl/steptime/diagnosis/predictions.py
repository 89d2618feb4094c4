"""Measured steps with their predictions, and the errors of any part of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchctl.steptime.fitting.design import Indices, design_of
from benchctl.steptime.fitting.least_squares import Flags, Floats
from benchctl.steptime.model import StepTimeModel, check_features
from benchctl.steptime.work import ObservedSteps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Measured steps of several runs with a prediction and an interval for each."""

    runs: tuple[ObservedSteps, ...]
    run_of: Indices
    measured_us: Floats
    predicted_us: Floats
    low_us: Floats
    high_us: Floats

    @property
    def errors(self) -> Floats:
        """predicted / measured - 1 of each step."""
        return self.predicted_us / self.measured_us - 1.0

    @property
    def is_covered(self) -> Flags:
        return np.asarray((self.low_us <= self.measured_us) & (self.measured_us <= self.high_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of some steps: fractions of the measured time; ``p90_frac`` is that of the magnitude of errors."""

    label: str
    num_steps: int
    mape_frac: float
    bias_frac: float
    p90_frac: float
    coverage_frac: float


def predict_runs(model: StepTimeModel, observed: Sequence[ObservedSteps]) -> Predictions:
    """Predictions of all steps that count, for whatever deployment.

    Raises UsageError for a feature that the model has no coefficient of.
    """
    names = [coefficient.name for coefficient in model.coefficients]
    design = design_of(observed, model.columns, names)
    check_features(dict(zip(design.names, design.matrix.T, strict=True)), model.values)
    predicted, low, high = model.row_intervals_us(design.matrix[:, : len(names)], design.extents)
    return Predictions(
        runs=design.runs,
        run_of=design.run_of,
        measured_us=design.measured_us,
        predicted_us=predicted,
        low_us=low,
        high_us=high,
    )


def join_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Several sets of predictions as one."""
    offsets = np.cumsum([0, *(len(part.runs) for part in parts[:-1])])

    def joined(column: Callable[[Predictions], Floats]) -> Floats:
        return np.concatenate([column(part) for part in parts])

    return Predictions(
        runs=tuple(run for part in parts for run in part.runs),
        run_of=np.concatenate([part.run_of + offset for part, offset in zip(parts, offsets, strict=True)]),
        measured_us=joined(lambda part: part.measured_us),
        predicted_us=joined(lambda part: part.predicted_us),
        low_us=joined(lambda part: part.low_us),
        high_us=joined(lambda part: part.high_us),
    )


def accuracy_of(predictions: Predictions, steps: Indices, label: str) -> Accuracy:
    """Errors of these steps."""
    errors = predictions.errors[steps]
    magnitudes = np.abs(errors)
    return Accuracy(
        label=label,
        num_steps=len(steps),
        mape_frac=float(magnitudes.mean()),
        bias_frac=float(errors.mean()),
        p90_frac=float(np.quantile(magnitudes, 0.9)),
        coverage_frac=float(predictions.is_covered[steps].mean()),
    )
