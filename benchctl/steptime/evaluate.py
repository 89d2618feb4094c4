"""Errors of a step-time model on steps that its fit did not see.

Whole runs or whole models are left out, never single steps: the step after one that was fitted is nearly the same
step. Each group is predicted by a fit to all the others, intervals included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import UsageError
from benchctl.steptime.design import Indices, design_of, fitted_design, group_label
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import HeldOutError, StepTimeModel, check_features
from benchctl.steptime.work import Flags, Floats, ObservedSteps, Structure, stacked

HoldOut: TypeAlias = Literal["run", "model", "tensor-parallel"]
Words: TypeAlias = npt.NDArray[np.str_]

_MAX_FOLDS: Final = 20
"""Fits of a hold-out at most."""
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


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

    def accuracy(self, is_counted: Flags, label: str) -> "Accuracy":
        """Errors of these steps."""
        errors = self.errors[is_counted]
        magnitudes = np.abs(errors)
        return Accuracy(
            label=label,
            num_steps=len(errors),
            mape_frac=float(magnitudes.mean()),
            bias_frac=float(errors.mean()),
            p90_frac=float(np.quantile(magnitudes, 0.9)),
            coverage_frac=float(self.is_covered[is_counted].mean()),
        )

    def by_label(self, labels: Words, names: Sequence[str]) -> tuple["Accuracy", ...]:
        """Errors for each of the labels that some step has, in the order of ``names``."""
        return tuple(self.accuracy(labels == name, name) for name in names if (labels == name).any())


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


def buckets(predictions: Predictions) -> dict[str, tuple[Accuracy, ...]]:
    """Errors by model, tensor-parallel size, phase, batch and mean context of a row."""
    columns = np.vstack(
        [stacked((run.work.num_seqs, run.work.context), len(run.duration_us)) for run in predictions.runs]
    )
    context = columns[:, 1] / np.maximum(columns[:, 0], 1.0)
    phases = np.concatenate([phases_of(run) for run in predictions.runs])

    def by_group(by: HoldOut) -> tuple[Accuracy, ...]:
        labels = _group_labels(predictions, by)
        return predictions.by_label(labels, sorted(set(labels.tolist())))

    return {
        "model": by_group("model"),
        "tensor parallel": by_group("tensor-parallel"),
        "phase": predictions.by_label(phases, ("decode", "mixed", "prefill")),
        "batch": predictions.by_label(bin_labels(columns[:, 0], _BATCHES), bin_names(_BATCHES)),
        "context": predictions.by_label(bin_labels(context, _CONTEXTS), bin_names(_CONTEXTS)),
    }


def phases_of(run: ObservedSteps) -> Words:
    """``prefill``, ``decode`` or ``mixed`` for each step."""
    prefill, decode = (stacked((run.work.prefill_tokens, run.work.decode_tokens), len(run.duration_us)) > 0).T
    return np.where(prefill & decode, "mixed", np.where(prefill, "prefill", "decode"))


def bin_names(edges: Sequence[int]) -> tuple[str, ...]:
    """The bins from one edge up to the next, and those below and above all."""
    return (f"< {edges[0]}", *(f"{a} to {b - 1}" for a, b in pairwise(edges)), f">= {edges[-1]}")


def bin_labels(values: Floats, edges: Sequence[int]) -> Words:
    """The bin of each value."""
    return np.array(bin_names(edges))[np.searchsorted(edges, values, side="right")]


def _group_labels(predictions: Predictions, by: HoldOut) -> Words:
    """The group of each step."""
    return np.array([group_label(run, by) for run in predictions.runs])[predictions.run_of]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One structure judged on groups that it was not fitted to, or one model on any."""

    structure: Structure
    by: HoldOut
    whole: Accuracy
    groups: tuple[Accuracy, ...]
    predictions: Predictions
    is_held_out: bool = True

    @classmethod
    def of(
        cls, predictions: Predictions, structure: Structure, by: HoldOut, *, is_held_out: bool = True
    ) -> "Evaluation":
        """The errors of all steps, and of each group."""
        labels = _group_labels(predictions, by)
        return cls(
            structure=structure,
            by=by,
            whole=predictions.accuracy(np.ones(len(labels), dtype=np.bool_), "all"),
            groups=predictions.by_label(labels, tuple(dict.fromkeys(labels.tolist()))),
            predictions=predictions,
            is_held_out=is_held_out,
        )

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
    parts: list[Predictions] = []
    for fold in range(min(len(groups), _MAX_FOLDS)):
        left_out = set(groups[fold::_MAX_FOLDS])
        others = [run for run, label in zip(observed, labels, strict=True) if label not in left_out]
        these = [run for run, label in zip(observed, labels, strict=True) if label in left_out]
        parts.append(predict_runs(fit_model(others, options, names=names), these))
    offsets = np.cumsum([0, *(len(part.runs) for part in parts[:-1])])
    joined = Predictions(
        runs=tuple(run for part in parts for run in part.runs),
        run_of=np.concatenate([part.run_of + offset for part, offset in zip(parts, offsets, strict=True)]),
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("measured_us", "predicted_us", "low_us", "high_us")
        },
    )
    return Evaluation.of(joined, options.structure, by)


def judge(model: StepTimeModel, observed: Sequence[ObservedSteps], by: HoldOut = "run") -> Evaluation:
    """Errors of one model on these steps, of whatever deployment on its device.

    Features have the peaks that the model was fitted with, whatever was measured of that device since.
    """
    hardware = hardware_or_none(model.hardware)
    runs = []
    for run in observed:
        deployment = run.deployment
        if hardware is not None and deployment.hardware.device == hardware.device:
            deployment = replace(deployment, hardware=hardware)
        if deployment.hardware.name != model.hardware:
            model.check_deployment(deployment)
        runs.append(replace(run, deployment=deployment))
    return Evaluation.of(predict_runs(model, runs), model.structure, by, is_held_out=False)


def compare_structures(
    observed: Sequence[ObservedSteps], options: FitOptions, by: HoldOut = "run"
) -> tuple[Evaluation, ...]:
    """The structure of ``options``, then the published form and the analytic roofline on the same groups.

    The published form is fitted as published: non-negative, without a pull to typical values.
    """
    plain = replace(options, ridge=0.0, constraint="non-negative")
    # Structures printed beside the one that is judged
    others = [
        replace(plain, structure=structure)
        for structure in ("original", "roofline")
        if structure != options.structure
    ]
    return tuple(hold_out(observed, each, by) for each in (options, *others))
