"""A fitted step-time model and its file, readable JSON with its format, version and provenance.

    step time = sum over features of coefficient times feature, at least 0     (all in microseconds)

The interval of a prediction has three parts. The bootstrap draws of the coefficients say how far another set of
runs would move the prediction; ``scatter`` says how far a single step of such a batch lies from it. As logarithms
both are about symmetric, and independent, so their half-widths add in squares. Outside of the range of the fit the
interval grows with the distance, as much as predictions of larger steps from smaller ones were found to need.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.features import COUNTS, feature_names, features, greater
from benchctl.steptime.work import (
    EXTENTS,
    Coefficient,
    Deployment,
    ExpertsRead,
    Floats,
    Quantity,
    StepWork,
    Structure,
    distances,
    extents_of,
    stacked,
)
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, decoding_problem, read_json
from benchctl.untrusted.text import visible_value

LEVEL: Final = 0.90
"""Level of the intervals of coefficients and predictions."""
FORMAT: Final = "benchctl-step-time-model"
VERSION: Final = 1
_MOST: Final = 1e100
"""Numbers of a file are at most so large: sums of them have a value."""
UNSCALED: Final = frozenset({"all_reduce"}) | COUNTS
"""Features that another device's arithmetic and memory leave as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file or result directory that a model was fitted to; ``sha256`` is that of the file or of its step logs."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """Errors on groups that the fit did not see, each predicted by a fit to all the others.

    ``bias_frac`` is the mean of predicted / measured - 1, ``mape_frac`` that of its magnitude; ``coverage_frac`` is
    the share of steps inside the nominal 90 % interval.
    """

    by: str
    num_groups: int
    num_steps: int
    mape_frac: float
    bias_frac: float
    coverage_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a model. ``steps_left_out`` counts steps by the reason why the fit did not use them."""

    data: tuple[DataFile, ...] = ()
    runs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    num_steps: int = 0
    steps_left_out: tuple[tuple[str, int], ...] = ()
    engine: str | None = None
    engine_version: str | None = None
    clock: str | None = None
    fitted_on: str | None = None
    benchctl_version: str = ""
    held_out: tuple[HeldOutError, ...] = ()
    calibrated_from: str | None = None
    """Hardware of the model whose coefficients were scaled to this one's."""
    most_query_tokens: int | None = None
    """Largest number of query tokens of a decoding row that the coefficients were fitted to: 1 without drafts,
    K + 1 with K of them, 0 without decoding rows. None in files that do not record it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Coefficients of one structure for one kind of device.

    ``draws`` holds the coefficients of each bootstrap sample, in the order of ``coefficients``. ``scatter`` has,
    for each fifth of the steps by their sequences, the most sequences and the ends of the interval of log(measured
    / predicted), of steps left out of the fit where there were groups to leave out. ``fitted_range`` has the least
    and the most of each of ``EXTENTS`` in the steps of the fit. One without data has no scatter and every range.
    """

    structure: Structure
    coefficients: tuple[Coefficient, ...]
    hardware: str
    tensor_parallel: tuple[int, ...]
    experts_read: ExpertsRead = "uniform"
    compute_scale: float = 1.0
    """Factor on times bound by arithmetic; other than 1 in a model that was carried to another device."""
    memory_scale: float = 1.0
    draws: tuple[tuple[float, ...], ...] = ()
    scatter: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),)
    fitted_range: tuple[tuple[float, ...], ...] = ((0.0,) * len(EXTENTS), (1e100,) * len(EXTENTS))
    growth: float = 0.0
    """Half-width that an interval gains, as a logarithm, for each e-fold outside of ``fitted_range``."""
    provenance: Provenance = Provenance()

    @property
    def values(self) -> dict[str, float]:
        """Coefficients by the name of their feature."""
        return {coefficient.name: coefficient.value for coefficient in self.coefficients}

    def with_draw(self, index: int) -> "StepTimeModel":
        """The model with the coefficients of one bootstrap draw: a whole run priced by it is one draw of that run.

        An index beyond the last draw starts over; a model without draws returns itself.
        """
        if not self.draws:
            return self
        pairs = zip(self.coefficients, self.draws[index % len(self.draws)], strict=True)
        return replace(self, coefficients=tuple(replace(each, value=value) for each, value in pairs))

    def check_deployment(self, deployment: Deployment) -> None:
        """Raises UsageError for a device or a tensor-parallel size that the model was not fitted to."""
        if deployment.hardware.name != self.hardware:
            raise UsageError(
                f"the step-time model is of {self.hardware} and the deployment of {deployment.hardware.name}; "
                "'benchctl steptime calibrate' carries it to other hardware with a few steps measured there"
            )
        if deployment.tensor_parallel not in self.tensor_parallel:
            sizes = ", ".join(map(str, self.tensor_parallel))
            raise UsageError(
                f"the step-time model is fitted to tensor-parallel sizes {sizes} and the deployment has "
                f"{deployment.tensor_parallel}; add a run with that size, or 'benchctl steptime calibrate' with "
                "a few of its steps"
            )

    def columns(self, work: StepWork, deployment: Deployment) -> dict[str, Quantity]:
        """The features of the structure, which the coefficients multiply.

        A model that was carried to another device takes them at peaks that give the times of that device.
        """
        columns = features(work, deployment, self.structure, self.experts_read)
        if self.compute_scale == self.memory_scale == 1.0:
            return columns
        device = deployment.hardware
        slowed = replace(
            device,
            peak_flops_per_s=device.peak_flops_per_s / self.compute_scale,
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s / self.memory_scale,
        )
        scaled = features(work, replace(deployment, hardware=slowed), self.structure, self.experts_read)
        return {name: columns[name] if name in UNSCALED else column for name, column in scaled.items()}

    def predict_us(self, work: StepWork, deployment: Deployment) -> Quantity:
        """Step time in microseconds.

        Raises UsageError as ``check_deployment`` does, and for steps with a feature that the model has no
        coefficient of.
        """
        self.check_deployment(deployment)
        columns = self.columns(work, deployment)
        check_features(columns, self.values)
        return self._priced(columns)

    def extrapolate_us(self, work: StepWork, deployment: Deployment) -> Quantity:
        """As ``predict_us`` for whatever deployment and steps; a feature without a coefficient adds nothing."""
        return self._priced(self.columns(work, deployment))

    def _priced(self, columns: Mapping[str, Quantity]) -> Quantity:
        total: Quantity = 0.0
        for each in self.coefficients:
            total = total + each.value * columns.get(each.name, 0.0)
        return greater(total, 0.0)

    def interval_us(self, work: StepWork, deployment: Deployment) -> tuple[Floats, Floats]:
        """Bounds between which the time of a single step lies with probability ``LEVEL``, for each step."""
        self.check_deployment(deployment)
        columns = self.columns(work, deployment)
        rows = stacked([columns.get(each.name, 0.0) for each in self.coefficients])
        return self.row_intervals_us(rows, extents_of(work))[1:]

    def row_intervals_us(self, rows: Floats, extents: Floats) -> tuple[Floats, Floats, Floats]:
        """Predictions and their bounds for rows of features of shape (steps, coefficients)."""
        centre = np.maximum(rows @ np.array([each.value for each in self.coefficients]), 0.0)
        variance = np.zeros(len(rows))
        if len(self.draws) > 1:
            covariance = np.atleast_2d(np.cov(np.array(self.draws), rowvar=False))
            variance = np.einsum("ij,jk,ik->i", rows, covariance, rows) / np.maximum(centre, 1e-9) ** 2
        # Half the width of an interval of ``LEVEL`` in standard deviations
        bound = 1.644854 * np.sqrt(np.maximum(variance, 0.0))
        low, high = scatter_at(self.scatter, extents[:, 0])
        grown = self.growth * distances(extents, self.fitted_range).max(axis=1)
        return (
            centre,
            centre * np.exp(-np.hypot(bound, low) - grown),
            centre * np.exp(np.hypot(bound, high) + grown),
        )


def scatter_at(scatter: Sequence[tuple[float, float, float]], num_seqs: Floats) -> tuple[Floats, Floats]:
    """Half-widths downwards and upwards, as logarithms, of steps with so many sequences."""
    most, low, high = np.array(scatter).T
    fifth = np.minimum(np.searchsorted(most, num_seqs), len(most) - 1)
    return np.maximum(-low[fifth], 0.0), np.maximum(high[fifth], 0.0)


def check_features(columns: Mapping[str, Quantity], values: Mapping[str, float]) -> None:
    """Raises UsageError for a feature without a coefficient that is not 0."""
    for name in columns.keys() - values.keys():
        if np.any(columns[name]):
            raise UsageError(
                f"the step-time model has no coefficient of {name}, which these steps have: it was fitted to steps "
                "without; add a run that has it, and fit again"
            )


def write_model(path: Path, model: StepTimeModel) -> None:
    """Write the file whole; the same model gives the same bytes."""
    path.write_text(model_text(model), encoding="utf-8")


def model_text(model: StepTimeModel) -> str:
    """The JSON of a model, with each bootstrap draw on one line."""
    document = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(model)}
    rows = [json.dumps(row) for row in document.pop("draws")]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    body = "[" + ",".join(f"\n  {row}" for row in rows) + ("\n ]" if rows else "]")
    return f'{head},\n "draws": {body}\n}}\n'


def read_model(path: Path) -> StepTimeModel:
    """The model of a file. Raises UsageError for a file that is not one, is newer or is damaged."""
    try:
        document = read_json(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; 'benchctl steptime fit -o FILE' writes a step-time model") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path}: not a step-time model; name a file of 'benchctl steptime fit -o'")
    version = document.get("version")
    if version != VERSION:
        raise UsageError(
            f"{path}: version {visible_value(version)} of the format is unknown to this benchctl, which reads "
            f"{VERSION}; fit the model again, or use the benchctl that wrote it"
        )
    fields = {key: value for key, value in document.items() if key not in {"format", "version"}}
    unknown_keys = sorted(set(fields) - set(StepTimeModel.__dataclass_fields__))
    if unknown_keys:
        raise UsageError(
            f"{path}: key {visible_value(unknown_keys[0])} is unknown; remove it, or fit the model again"
        )
    try:
        model = msgspec.convert(fields, StepTimeModel)
    except DECODING_ERRORS as error:
        raise UsageError(f"{path}: damaged ({decoding_problem(error)}); fit the model again") from error
    _check_numbers(path, fields)
    unknown_names = sorted(set(model.values) - set(feature_names(model.structure, is_guided=True)))
    if unknown_names:
        raise UsageError(
            f"{path}: a coefficient of {visible_value(unknown_names[0])}, which this benchctl does not compute; "
            "fit the model again"
        )
    width = len(model.coefficients)
    if any(len(draw) != width for draw in model.draws):
        raise UsageError(f"{path}: a row of draws has not {width} values, one for each coefficient; fit it again")
    return model


def _check_numbers(path: Path, fields: object) -> None:
    """Raise UsageError for a number without a value, or one so large that sums of it have none."""
    if isinstance(fields, dict | list):
        for part in fields.values() if isinstance(fields, dict) else fields:
            _check_numbers(path, part)
    elif isinstance(fields, float) and not abs(fields) <= _MOST:
        raise UsageError(f"{path}: damaged (a number is {fields}); fit the model again")
