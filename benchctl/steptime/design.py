"""The design of a fit, least squares on relative error, and what the data cannot determine.

    minimise  mean over steps of (x . c / y - 1)^2  +  ridge * sum over columns of ((c - anchor) / spread)^2

Dividing by y makes every step count alike, whether it takes 1 ms or 1 s. Spreads make the ridge mean the same for a
factor and for microseconds per layer. The published fit skipped both, so its ridge had no effect whatever its
weight.

Rows are first reduced to triangles (QR), one for each block of steps: bootstrap samples are then fits to a few
hundred rows, and a fit to 100,000 steps with intervals takes seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.steptime.features import features
from benchctl.steptime.work import (
    Deployment,
    ExpertsRead,
    Flags,
    Floats,
    ObservedSteps,
    Quantity,
    StepWork,
    Structure,
    extents_of,
    stacked,
)

Indices: TypeAlias = npt.NDArray[np.intp]
Constraint: TypeAlias = Literal["non-negative", "none"]
ColumnsOf: TypeAlias = Callable[[StepWork, Deployment], Mapping[str, Quantity]]
"""Features of steps by name."""

TIE_BREAK: Final = 1e-10
"""Least ridge: it decides directions that the data leave open, and is taken out of all others again."""
_RANK: Final = 1e-7
"""A singular value below this share of the largest belongs to a direction that the data leave open."""
_STILL: Final = 1e-9
"""A feature that varies less than this, as a fraction of its mean within each deployment, is constant in it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Design:
    """Features of many steps.

    ``matrix`` has shape (steps, features), in microseconds at peak or counts; ``extents`` has those of each step
    (``extents_of``), and ``run_of`` is its index into ``runs``. Steps of a run are in the order of its log.
    """

    names: tuple[str, ...]
    matrix: Floats
    measured_us: Floats
    extents: Floats
    run_of: Indices
    runs: tuple[ObservedSteps, ...]
    """Without the steps that are left out."""

    @property
    def num_steps(self) -> int:
        return len(self.measured_us)

    def blocks_of(self, rows: Indices, num_blocks: int) -> list[Indices]:
        """``rows`` as about ``num_blocks`` stretches of consecutive steps, none of which spans two runs."""
        blocks: list[Indices] = []
        for run in np.unique(self.run_of[rows]):
            of_run = rows[self.run_of[rows] == run]
            share = max(1, min(len(of_run), round(num_blocks * len(of_run) / len(rows))))
            blocks += np.array_split(of_run, share)
        return blocks


def group_label(run: ObservedSteps, by: str) -> str:
    """The group of a run: ``run``, ``model`` or ``tensor-parallel``."""
    return {"run": run.run, "model": run.deployment.shape.name}.get(by, f"TP{run.deployment.tensor_parallel}")


def fitted_design(
    observed: Sequence[ObservedSteps], structure: Structure, experts_read: ExpertsRead, names: Sequence[str] = ()
) -> Design:
    """The design of a fit, with at least the features ``names``. Raises UsageError when no step counts."""
    return design_of(observed, lambda work, deployment: features(work, deployment, structure, experts_read), names)


def design_of(observed: Sequence[ObservedSteps], columns_of: ColumnsOf, names: Sequence[str] = ()) -> Design:
    """The features of all steps that count; one that a run does not have is 0 in it.

    The columns are ``names``, then any others in the order of their appearance. Raises UsageError without steps.
    """
    usable = (select_steps(run, np.flatnonzero(~run.is_saturated)) for run in observed)
    runs = tuple(run for run in usable if len(run.duration_us))
    if not runs:
        reasons = sorted({reason for run in observed for reason in run.left_out})
        raise UsageError(
            f"no step is left to fit: all {sum(len(run.duration_us) for run in observed)} are left out "
            f"({', '.join(reasons) or 'there are none'}); add a run below saturation"
        )
    columns = [columns_of(run.work, run.deployment) for run in runs]
    names = tuple(dict.fromkeys([*names, *(name for row in columns for name in row)]))
    lengths = [len(run.duration_us) for run in runs]
    matrices = [
        stacked([row.get(name, 0.0) for name in names], length)
        for row, length in zip(columns, lengths, strict=True)
    ]
    return Design(
        names=names,
        matrix=np.vstack(matrices),
        measured_us=np.concatenate([run.duration_us for run in runs]),
        extents=np.vstack([extents_of(run.work, len(run.duration_us)) for run in runs]),
        run_of=np.repeat(np.arange(len(runs)), lengths),
        runs=runs,
    )


def select_steps(observed: ObservedSteps, steps: Indices) -> ObservedSteps:
    """The same run with these steps only."""
    columns = {name: getattr(observed.work, name) for name in StepWork.__dataclass_fields__}
    work = StepWork(
        **{name: value[steps] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    )
    return replace(
        observed, work=work, duration_us=observed.duration_us[steps], is_saturated=observed.is_saturated[steps]
    )


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
    def columns(self) -> Floats:
        """The scaled design over the root of the number of steps, reduced."""
        return np.asarray(self.triangles.reshape(-1, self.triangles.shape[2])[:, :-1] / np.sqrt(self.counts.sum()))


def relative_rows(design: Floats, measured_us: Floats, blocks: Sequence[Indices]) -> Rows:
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
    weights = np.ones(len(rows.counts)) if weights is None else weights
    weighted = (rows.triangles * np.sqrt(weights)[:, None, None]).reshape(-1, rows.triangles.shape[2])
    reduced = _triangle(weighted) / np.sqrt(np.sum(weights * rows.counts))
    matrix, target = reduced[:, :-1], reduced[:, -1]
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
    if pull.strength <= TIE_BREAK and free.any():
        # The exact minimum over the free columns differs only where the data decide.
        exact = scaled.copy()
        exact[free] += np.linalg.pinv(matrix[:, free], rcond=_RANK) @ (target - matrix @ scaled)
        scaled = scaled if constraint != "none" and (exact < 0).any() else exact
    return np.asarray(scaled / rows.scale, dtype=np.float64)


def open_directions(rows: Rows) -> list[Floats]:
    """Directions of the scaled coefficients that change nothing the data show, columns of zeros included."""
    _, values, vectors = np.linalg.svd(rows.columns, full_matrices=False)
    return [vectors[i] for i in range(len(values)) if values[i] <= _RANK * values[0]]


def condition_number(rows: Rows) -> float:
    """Largest over smallest singular value of the scaled design, without directions that the data leave open."""
    values = np.linalg.svd(rows.columns, compute_uv=False)
    return float(values[0] / values[values > _RANK * values[0]][-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDiagnosis:
    """One feature of a design.

    ``share_frac`` is its part of the step time at coefficient 1, root mean square; ``vif`` the variance inflation 1
    / (1 - R^2) of its scaled column on the others, without centring and infinite for a column that the others add
    up to.
    """

    name: str
    share_frac: float
    vif: float
    is_constant: bool
    is_identified: bool


def diagnose_columns(design: Design, rows: Rows) -> tuple[ColumnDiagnosis, ...]:
    """Every feature in the order of the design."""
    identified, constant = identified_columns(rows), constant_columns(design)
    shares = np.sqrt(np.mean((design.matrix / design.measured_us[:, None]) ** 2, axis=0))
    return tuple(
        ColumnDiagnosis(
            name=name,
            share_frac=float(shares[i]),
            vif=_variance_inflation(rows.columns, i),
            is_constant=bool(constant[i]),
            is_identified=bool(identified[i]),
        )
        for i, name in enumerate(design.names)
    )


def _variance_inflation(columns: Floats, index: int) -> float:
    """The square of a column over that of its part that no other column has."""
    column, others = columns[:, index], np.delete(columns, index, axis=1)
    rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
    remaining = float(rest @ rest)
    return float(column @ column) / remaining if remaining > 1e-13 else float("inf")


def identified_columns(rows: Rows) -> Flags:
    """False for each column that takes part in a direction that the data leave open."""
    identified = np.ones(len(rows.scale), dtype=np.bool_)
    for direction in open_directions(rows):
        identified &= ~_is_part_of(direction)
    return identified


def _is_part_of(direction: Floats) -> Flags:
    # A column belongs to an open direction if it has this share of the largest entry of it
    return np.asarray(np.abs(direction) >= 0.05 * np.abs(direction).max())


def constant_columns(design: Design) -> Flags:
    """True for each feature that has one value in all steps of each deployment."""
    constant = np.ones(len(design.names), dtype=np.bool_)
    for i in range(len(design.runs)):
        values = design.matrix[design.run_of == i]
        constant &= np.ptp(values, axis=0) <= _STILL * np.maximum(np.abs(values).max(axis=0), 1e-30)
    return constant


def check_design(design: Design, rows: Rows) -> None:
    """Raises UsageError when features that vary cannot be told apart.

    Features that are constant in each deployment, such as weights and layers of one model, are left to typical
    values: any split of them predicts that deployment equally well. Varying ones that always move together give
    coefficients that are wrong for every other batch.
    """
    constant = constant_columns(design)
    for direction in open_directions(rows):
        is_part = _is_part_of(direction)
        names = [name for name, part in zip(design.names, is_part, strict=True) if part]
        if len(names) > 1 and not constant[is_part].all():
            raise UsageError(
                f"{', '.join(names[:-1])} and {names[-1]} always move together in these steps, so their "
                f"coefficients cannot be told apart; add a run, {_remedy(names)}, or pull them to typical values "
                "with --ridge"
            )
    if constant.all():
        raise UsageError(
            "every step does the same work: one batch size at one context determines no coefficient; "
            f"add a run, {_remedy(design.names)}"
        )


def _remedy(names: Sequence[str]) -> str:
    """The run that separates these features: the coordinate that they do not share."""
    if {"prefill", "compute"} & set(names):
        return "with prompts of other lengths"
    if {"decode", "memory"} & set(names):
        return "with contexts of another length at the same concurrency"
    return "at another concurrency"
