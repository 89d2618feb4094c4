"""The time of an operator from what it does, fitted to measured times.

    time = max(launch, sum of coefficients times columns)

Columns are times at the data sheet's peaks, in microseconds, and counts; coefficients are not negative. ``launch``
is the time of the host for an operator that is measured eagerly: a kernel that ends sooner is not seen. Errors are
relative and their magnitudes are minimised, so that a few stalled measurements do not move the fit.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from benchctl.errors import UsageError
from benchctl.steptime.design import Floats

_REWEIGHTINGS: Final = 30
_SMALLEST_ERROR: Final = 0.02
"""Relative errors below this count as squares."""
_SOFT_ERROR: Final = 0.05
_SMALLEST_COEFFICIENT: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Coefficients in the order of the columns; ``launch_us`` is 0 for operators inside a graph."""

    coefficients: tuple[float, ...]
    launch_us: float = 0.0

    def predict_us(self, columns: Floats) -> Floats:
        """Times of operators with these columns (operators, columns), in microseconds."""
        return np.asarray(np.maximum(self.launch_us, columns @ np.array(self.coefficients)), dtype=np.float64)


def fit_operator(columns: Floats, measured_us: Floats, *, has_launch: bool = False) -> OperatorTime:
    """The coefficients of operators with these columns, shape (operators, columns), and measured times.

    Raises UsageError for fewer operators than coefficients.
    """
    if len(measured_us) < columns.shape[1] + has_launch:
        raise UsageError(
            f"{len(measured_us)} measured operators do not determine {columns.shape[1] + has_launch} coefficients; "
            "measure more sizes"
        )
    linear = _least_magnitudes(columns, measured_us)
    if not has_launch:
        return OperatorTime(coefficients=tuple(map(float, linear)))
    return _with_launch(columns, measured_us, linear)


def mape_frac(predicted_us: Floats, measured_us: Floats) -> float:
    """Mean magnitude of predicted / measured - 1."""
    return float(np.mean(np.abs(predicted_us / measured_us - 1)))


def halves(keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """True for every other of the distinct rows of ``keys``, in sorted order: a half to fit to.

    All operators with one key are in the same half.
    """
    _, index = np.unique(np.asarray(keys), axis=0, return_inverse=True)
    return np.asarray(index.ravel() % 2 == 0)


def _least_magnitudes(columns: Floats, measured_us: Floats) -> Floats:
    """Non-negative coefficients with the least mean magnitude of relative errors, by reweighted squares."""
    relative, weights = columns / measured_us[:, None], np.ones(len(measured_us))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        coefficients, _ = nnls(relative * weights[:, None], weights)
        errors = np.abs(relative @ coefficients - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _SMALLEST_ERROR))
    return np.asarray(coefficients, dtype=np.float64)


def _with_launch(columns: Floats, measured_us: Floats, linear: Floats) -> OperatorTime:
    """The same with a least time, on logarithms from two beginnings."""
    launch_us = float(np.median(measured_us[measured_us <= np.quantile(measured_us, 0.4)]))

    def errors(logs: Floats) -> Floats:
        predicted = np.maximum(np.exp(logs[0]), columns @ np.exp(logs[1:]))
        return np.asarray(np.log(predicted / measured_us), dtype=np.float64)

    fits = []
    for first_share in (0.15, 0.6):
        beginning = np.maximum(linear, _SMALLEST_COEFFICIENT)
        beginning[0] *= first_share
        logs = np.log(np.concatenate([[launch_us], beginning]))
        fits.append(least_squares(errors, logs, loss="soft_l1", f_scale=_SOFT_ERROR, max_nfev=400))
    best = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    return OperatorTime(coefficients=tuple(map(float, best[1:])), launch_us=float(best[0]))
