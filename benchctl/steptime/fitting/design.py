"""The design of a fit: a row of features for each step that counts, and the groups that its rows belong to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.steptime.features import features
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.step_counts import EXTENTS, extents_of
from benchctl.steptime.structure import ExpertsRead, Structure
from benchctl.steptime.work import Deployment, ObservedSteps, Quantity, StepWork

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
