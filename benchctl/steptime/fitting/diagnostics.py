"""Diagnostics of a design: collinearity, and the coefficients that the data cannot determine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.fitting.design import Design
from benchctl.steptime.fitting.least_squares import Flags, Floats, Rows, open_directions, singular_values

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
