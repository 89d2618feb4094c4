"""Errors of a step-time model on steps that its fit did not see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import UsageError
from benchctl.steptime.design import Flags, Floats, Indices, design_of, fitted_design, group_label
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import HeldOutError, StepTimeModel, check_features
from benchctl.steptime.work import ObservedSteps, Quantity, Structure


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


Words: TypeAlias = npt.NDArray[np.str_]

_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def buckets(predictions: Predictions) -> dict[str, tuple[Accuracy, ...]]:
    """Errors by model, tensor-parallel size, phase, batch and mean context of a row."""
    num_seqs = np.concatenate([_each(run, run.work.num_seqs) for run in predictions.runs])
    context = np.concatenate([_each(run, run.work.context) for run in predictions.runs])
    phase = np.concatenate([phases_of(run) for run in predictions.runs])
    models = np.array([run.deployment.shape.name for run in predictions.runs])[predictions.run_of]
    sizes = np.array([f"TP{run.deployment.tensor_parallel}" for run in predictions.runs])[predictions.run_of]
    return {
        "model": _by_label(predictions, models),
        "tensor parallel": _by_label(predictions, sizes),
        "phase": _by_label(predictions, phase),
        "batch": _by_label(predictions, bin_labels(num_seqs, _BATCHES)),
        "context": _by_label(predictions, bin_labels(context / np.maximum(num_seqs, 1.0), _CONTEXTS)),
    }


def phases_of(run: ObservedSteps) -> Words:
    """``prefill``, ``decode`` or ``mixed`` for each step."""
    prefill, decode = _each(run, run.work.prefill_tokens) > 0, _each(run, run.work.decode_tokens) > 0
    return np.where(prefill & decode, "mixed", np.where(prefill, "prefill", "decode"))


def bin_labels(values: Floats, edges: Sequence[int]) -> Words:
    """The bin of each value: from one edge up to the next."""
    labels = [
        f"< {edges[0]}",
        *(f"{a} to {b - 1}" for a, b in pairwise(edges)),
        f">= {edges[-1]}",
    ]
    return np.array(labels)[np.searchsorted(edges, values, side="right")]


def _by_label(predictions: Predictions, labels: Words) -> tuple[Accuracy, ...]:
    """Errors for each label, bins in the order of their values."""
    names = sorted(set(labels.tolist()), key=_bin_order)
    return tuple(accuracy_of(predictions, np.flatnonzero(labels == name), name) for name in names)


def _bin_order(label: str) -> tuple[float, str]:
    number = label.removeprefix(">= ").removeprefix("< ").split(" ")[0]
    is_number = number.isdigit()
    return (float(number) - 0.5 * label.startswith("<") if is_number else 0.0), label


def _each(run: ObservedSteps, quantity: Quantity) -> Floats:
    """A quantity with one value for each step."""
    return np.broadcast_to(np.asarray(quantity, dtype=np.float64), len(run.duration_us))


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
