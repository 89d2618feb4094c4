"""Least squares on relative error: design rows divided by the measured time, target 1.

    minimise  mean over steps of (x . c / y - 1)^2  +  ridge * sum over columns of ((c - anchor) / spread)^2

Dividing by y makes every step count alike, whether it takes 1 ms or 1 s. Spreads make the ridge mean the same for a
factor and for microseconds per layer. The published fit skipped both, so its ridge had no effect whatever its
weight.

Rows are first reduced to triangles (QR), one for each block of steps: bootstrap samples are then fits to a few
hundred rows, and a fit to 100,000 steps with intervals takes seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Constraint: TypeAlias = Literal["non-negative", "none"]

TIE_BREAK: Final = 1e-10
"""Least ridge: it decides directions that the data leave open, and is taken out of all others again."""
_RANK: Final = 1e-7
"""A singular value below this share of the largest belongs to a direction that the data leave open."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Scaled rows of a design as one triangle for each block of steps.

    ``triangles`` has shape (blocks, k, columns + 1), the target as last column; ``counts`` the steps of each block
    and ``scale`` the rms of each column before scaling, 1 for a column of zeros.
    """

    triangles: Floats
    counts: Floats
    scale: Floats
    relative: Floats
    """Every row over its measured time, neither scaled nor reduced."""

    @property
    def num_blocks(self) -> int:
        return len(self.counts)


def relative_rows(design: Floats, measured_us: Floats, blocks: Sequence[npt.NDArray[np.intp]]) -> Rows:
    """The rows of ``design`` (steps, columns) that ``blocks`` index, divided by the measured time."""
    relative = design / measured_us[:, None]
    chosen = relative[np.concatenate(blocks)]
    rms = np.sqrt(np.mean(chosen**2, axis=0))
    scale = np.where(rms > 0, rms, 1.0)
    rows = np.column_stack([relative / scale, np.ones(len(design))])
    return Rows(
        triangles=np.stack([_triangle(rows[block]) for block in blocks]),
        counts=np.array([len(block) for block in blocks], dtype=np.float64),
        scale=scale,
        relative=chosen,
    )


def _triangle(rows: Floats) -> Floats:
    width = rows.shape[1]
    padded = rows if len(rows) >= width else np.vstack([rows, np.zeros((width - len(rows), width))])
    return np.asarray(np.linalg.qr(padded, mode="r"), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pull:
    """The values that a ridge pulls to, one a column: ``strength`` times the squared distance in spreads."""

    values: Floats
    spreads: Floats
    strength: float = 0.0


def solve(rows: Rows, pull: Pull, *, constraint: Constraint, weights: Floats | None = None) -> Floats:
    """Coefficients of the unscaled columns; ``weights`` says how often each block counts, once by default."""
    weights = np.ones(rows.num_blocks) if weights is None else weights
    stacked = (rows.triangles * np.sqrt(weights)[:, None, None]).reshape(-1, rows.triangles.shape[2])
    stacked = _triangle(stacked) / np.sqrt(np.sum(weights * rows.counts))
    matrix, target = stacked[:, :-1], stacked[:, -1]
    pulls = np.sqrt(max(pull.strength, TIE_BREAK)) / (pull.spreads * rows.scale)
    ridged = np.vstack([matrix, np.diag(pulls)])
    ridged_target = np.concatenate([target, pulls * pull.values * rows.scale])
    if constraint == "none":
        scaled = np.linalg.lstsq(ridged, ridged_target, rcond=None)[0]
        free = np.ones(len(scaled), dtype=bool)
    else:
        from scipy.optimize import nnls  # noqa: PLC0415 - 0.1 s, which what fits nothing does without

        scaled = nnls(ridged, ridged_target, maxiter=100 * len(pulls))[0]
        free = scaled > 0
    if pull.strength <= TIE_BREAK:
        scaled = _without_tie_break(matrix, target, scaled, free, keeps_sign=constraint != "none")
    return np.asarray(scaled / rows.scale, dtype=np.float64)


def _without_tie_break(matrix: Floats, target: Floats, scaled: Floats, free: Flags, *, keeps_sign: bool) -> Floats:
    """The exact minimum over the free columns that differs from ``scaled`` only where the data decide."""
    if not free.any():
        return scaled
    step = np.linalg.pinv(matrix[:, free], rcond=_RANK) @ (target - matrix @ scaled)
    exact = scaled.copy()
    exact[free] += step
    return scaled if keeps_sign and (exact < 0).any() else exact


def singular_values(rows: Rows) -> tuple[Floats, Floats]:
    """Singular values of the scaled design over the root of the number of steps, and the right vectors as rows."""
    stacked = rows.triangles.reshape(-1, rows.triangles.shape[2])[:, :-1] / np.sqrt(rows.counts.sum())
    _, values, vectors = np.linalg.svd(stacked, full_matrices=False)
    return values, vectors


def open_directions(rows: Rows) -> list[Floats]:
    """Directions of the scaled coefficients that change nothing the data show, columns of zeros included."""
    values, vectors = singular_values(rows)
    return [vectors[i] for i in range(len(values)) if values[i] <= _RANK * values[0]]
