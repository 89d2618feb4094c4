"""Measured steps with their predictions, and the errors of any part of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.steptime.fitting.design import Design, Indices, design_of
from benchctl.steptime.fitting.least_squares import Flags, Floats
from benchctl.steptime.model import StepTimeModel, check_features
from benchctl.steptime.work import ObservedSteps

LEVEL: Final = 0.90
"""Nominal level of the intervals whose coverage is counted."""


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
    """Predictions of all steps that count, for whatever deployment."""
    design = _design(model, observed)
    low, high = model.row_intervals_us(design.matrix, LEVEL)
    return Predictions(
        runs=design.runs,
        run_of=design.run_of,
        measured_us=design.measured_us,
        predicted_us=_predicted(model, design),
        low_us=low,
        high_us=high,
    )


def _design(model: StepTimeModel, observed: Sequence[ObservedSteps]) -> Design:
    """The steps in the columns of the model. Raises UsageError for a feature that it has no coefficient of."""
    design = design_of(observed, model.columns, [coefficient.name for coefficient in model.coefficients])
    num_columns = len(model.coefficients)
    others = {name: design.matrix[:, i] for i, name in enumerate(design.names) if i >= num_columns}
    check_features(others, {})
    return replace(design, names=design.names[:num_columns], matrix=design.matrix[:, :num_columns])


def _predicted(model: StepTimeModel, design: Design) -> Floats:
    values = model.values
    predicted_us: Floats = design.matrix @ np.array([values[name] for name in design.names])
    return np.maximum(predicted_us, 0.0)


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
