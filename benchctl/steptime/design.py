"""The design of a fit, least squares on relative error, and what the data cannot determine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.steptime.features import features
from benchctl.steptime.step_counts import EXTENTS, extents_of
from benchctl.steptime.work import Deployment, ExpertsRead, ObservedSteps, Quantity, StepWork, Structure

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


Indices: TypeAlias = npt.NDArray[np.intp]
ColumnsOf: TypeAlias = Callable[[StepWork, Deployment], Mapping[str, Quantity]]
"""Features of steps by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Design:
    """Features of many steps.

    ``matrix`` has shape (steps, features), in microseconds at peak or counts; ``run_of`` is the index into ``runs``
    of each step. Steps of a run are in the order of its log.
    """

    names: tuple[str, ...]
    matrix: Floats
    measured_us: Floats
    run_of: Indices
    runs: tuple[ObservedSteps, ...]
    """Without the steps that are left out."""

    @property
    def num_steps(self) -> int:
        return len(self.measured_us)

    @property
    def extents(self) -> Floats:
        """The extents of each step, as ``extents_of`` has them."""
        return np.vstack(
            [np.broadcast_to(extents_of(run.work), (len(run.duration_us), len(EXTENTS))) for run in self.runs]
        )

    def groups_by(self, by: str) -> dict[str, Indices]:
        """Steps of each run, model or tensor-parallel size, in the order of their first appearance."""
        labels = [group_label(run, by) for run in self.runs]
        return {
            label: np.flatnonzero(np.isin(self.run_of, [i for i, other in enumerate(labels) if other == label]))
            for label in dict.fromkeys(labels)
        }

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
    if by == "run":
        return run.run
    if by == "model":
        return run.deployment.shape.name
    return f"TP{run.deployment.tensor_parallel}"


def fitted_design(
    observed: Sequence[ObservedSteps], structure: Structure, experts_read: ExpertsRead, names: Sequence[str] = ()
) -> Design:
    """The design of a fit, with at least the features ``names``. Raises UsageError when no step counts."""
    return design_of(observed, lambda work, deployment: features(work, deployment, structure, experts_read), names)


def design_of(observed: Sequence[ObservedSteps], columns_of: ColumnsOf, names: Sequence[str] = ()) -> Design:
    """The features of all steps that count; one that a run does not have is 0 in it.

    The columns are ``names``, then any others in the order of their appearance. Raises UsageError without steps.
    """
    runs = tuple(usable for run in observed if len((usable := usable_steps(run)).duration_us))
    if not runs:
        reasons = sorted({reason for run in observed for reason in run.left_out})
        raise UsageError(
            f"no step is left to fit: all {sum(len(run.duration_us) for run in observed)} are left out "
            f"({', '.join(reasons) or 'there are none'}); add a run below saturation"
        )
    columns = [columns_of(run.work, run.deployment) for run in runs]
    names = tuple(dict.fromkeys([*names, *(name for row in columns for name in row)]))
    return Design(
        names=names,
        matrix=np.vstack(
            [_matrix(row, names, len(run.duration_us)) for row, run in zip(columns, runs, strict=True)]
        ),
        measured_us=np.concatenate([run.duration_us for run in runs]),
        run_of=np.repeat(np.arange(len(runs)), [len(run.duration_us) for run in runs]),
        runs=runs,
    )


def _matrix(columns: Mapping[str, Quantity], names: Sequence[str], num_steps: int) -> Floats:
    return np.column_stack(
        [np.broadcast_to(np.asarray(columns.get(name, 0.0), dtype=np.float64), num_steps) for name in names]
    )


def usable_steps(observed: ObservedSteps) -> ObservedSteps:
    """The same run without the steps that a fit leaves out."""
    return select_steps(observed, np.flatnonzero(~observed.is_saturated))


def select_steps(observed: ObservedSteps, steps: Indices) -> ObservedSteps:
    """The same run with these steps only."""
    columns = {name: getattr(observed.work, name) for name in StepWork.__dataclass_fields__}
    work = StepWork(
        **{name: value[steps] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    )
    return replace(
        observed, work=work, duration_us=observed.duration_us[steps], is_saturated=observed.is_saturated[steps]
    )


_SHARE: Final = 0.05
"""A column belongs to an open direction if it has this share of the largest entry of it."""
_STILL: Final = 1e-9
"""A feature that varies less than this, as a fraction of its mean within each deployment, is constant in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDiagnosis:
    """One feature of a design.

    ``share_frac`` is its part of the step time at coefficient 1, root mean square; ``vif`` the variance inflation 1
    / (1 - R^2) of its scaled column on the others, infinite for a column that the others add up to.
    """

    name: str
    share_frac: float
    vif: float
    is_constant: bool
    is_identified: bool


def condition_number(rows: Rows) -> float:
    """Largest over smallest singular value of the scaled design, without directions that the data leave open."""
    values, _ = singular_values(rows)
    return float(values[0] / values[len(values) - len(open_directions(rows)) - 1])


def diagnose_columns(design: Design, rows: Rows) -> tuple[ColumnDiagnosis, ...]:
    """Every feature in the order of the design."""
    factors, identified, constant = variance_inflation(rows), identified_columns(rows), constant_columns(design)
    shares = np.sqrt(np.mean((design.matrix / design.measured_us[:, None]) ** 2, axis=0))
    return tuple(
        ColumnDiagnosis(
            name=name,
            share_frac=float(shares[i]),
            vif=float(factors[i]),
            is_constant=bool(constant[i]),
            is_identified=bool(identified[i]),
        )
        for i, name in enumerate(design.names)
    )


def variance_inflation(rows: Rows) -> Floats:
    """VIF of each scaled column, without centring: its square over that of its part that no other column has."""
    stacked = rows.triangles.reshape(-1, rows.triangles.shape[2])[:, :-1] / np.sqrt(rows.counts.sum())
    factors = np.empty(stacked.shape[1])
    for i in range(len(factors)):
        others = np.delete(stacked, i, axis=1)
        column = stacked[:, i]
        rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        remaining = float(rest @ rest)
        factors[i] = float(column @ column) / remaining if remaining > 1e-13 else np.inf
    return factors


def identified_columns(rows: Rows) -> Flags:
    """False for each column that takes part in a direction that the data leave open."""
    identified = np.ones(len(rows.scale), dtype=np.bool_)
    for direction in open_directions(rows):
        identified &= np.abs(direction) < _SHARE * np.abs(direction).max()
    return identified


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
        is_part = np.abs(direction) >= _SHARE * np.abs(direction).max()
        names = [name for name, part in zip(design.names, is_part, strict=True) if part]
        if len(names) > 1 and not constant[is_part].all():
            raise UsageError(_collinear(names))
    if constant.all():
        raise UsageError(
            "every step does the same work: one batch size at one context determines no coefficient; "
            f"add a run, {_remedy(design.names)}"
        )


def _collinear(names: Sequence[str]) -> str:
    return (
        f"{', '.join(names[:-1])} and {names[-1]} always move together in these steps, so their coefficients "
        f"cannot be told apart; add a run, {_remedy(names)}, or pull them to typical values with --ridge"
    )


def _remedy(names: Sequence[str]) -> str:
    """The run that separates these features: the coordinate that they do not share."""
    if any(name in {"prefill", "compute"} for name in names):
        return "with prompts of other lengths"
    if any(name in {"kv", "decode", "memory"} for name in names):
        return "with contexts of another length at the same concurrency"
    return "at another concurrency"
