"""Decomposition of the difference between two sides: the wall time as a product, the step as sums."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Final

from benchctl.analysis.attribution.breakdown import STEP, RunTimeBreakdown
from benchctl.analysis.attribution.estimate import (
    Contribution,
    PairDesign,
    StepFloor,
    WorkSplit,
    estimate_levels,
    select_known_runs,
)
from benchctl.analysis.attribution.splits import SectionSplit, WallSplit, split_sections, split_wall
from benchctl.analysis.attribution.step_time_model import ModelledRun, ModelSplit, SourcedModel, split_by_model
from benchctl.analysis.attribution.work import Floor
from benchctl.analysis.statistics.estimate import RatioEstimate, SideRatio
from benchctl.records.record import StopMode
from benchctl.units import MS_PER_S

NO_MODEL: Final = "no step-time model is named"
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Two sides of one cell. Parts without the necessary records are None."""

    label: str
    num_blocks: int
    """Of the smaller side."""
    wall: WallSplit | None
    """None if the client's times do not count."""
    step: Contribution | None
    """The mean step."""
    sections: SectionSplit | None
    work: WorkSplit | str
    """The reason where it is unknown, as of ``model``."""
    model: ModelSplit | str
    is_guided: bool = False
    """A value model scored candidates on a side."""

    @property
    def floor(self) -> StepFloor | str | None:
        """The ratio of the floors of both steps, or the reason why it is unknown; None where no side is guided."""
        if not self.is_guided:
            return None
        return self.work if isinstance(self.work, str) else self.work.floor


def decompose(
    label: str,
    a: Sequence[RunTimeBreakdown],
    b: Sequence[RunTimeBreakdown],
    design: PairDesign,
    stop: StopMode,
    ratios: Mapping[str, SideRatio] = MappingProxyType({}),
    model: SourcedModel | str = NO_MODEL,
) -> Decomposition | None:
    """The decomposition of B against A; None if neither wall times nor steps are known on both sides.

    If paired, both sequences have the same blocks in the same order. ``ratios`` are those of the comparison,
    by metric.
    """
    timed_a, timed_b, timed = select_known_runs(
        a, b, design.of_times("wall"), lambda run: bool(run.wall_s and run.wall_s > 0)
    )
    has_wall = bool(timed_a and timed_b)
    has_steps = bool(a and b) and all(run.has_steps for run in (*a, *b))
    if not has_wall and not has_steps:
        return None
    of_steps, step = design.of_times("step"), ratios.get("step_ms")
    if has_steps:
        a, b = steps_at_level(a, b, step)
    mean_step = None
    if has_steps:
        (mean_step,) = estimate_levels((STEP,), a, b, lambda run: (run.step_s / run.num_steps,), of_steps)
    return Decomposition(
        label=label,
        num_blocks=min(len(timed_a), len(timed_b)) if has_wall else min(len(a), len(b)),
        wall=split_wall(timed_a, timed_b, timed, stop, ratios) if has_wall else None,
        step=mean_step,
        sections=split_sections(a, b, of_steps) if has_steps else None,
        work=split_work(a, b, of_steps, step),
        model=_explain(model, a, b, of_steps) if has_steps else "the steps of a side are not known",
        is_guided=any(run.is_guided for run in (*a, *b)),
    )


def steps_at_level(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], step: SideRatio | None
) -> tuple[list[RunTimeBreakdown], list[RunTimeBreakdown]]:
    """Both sides with step times scaled so that their arithmetic mean is the ``step_ms`` of the comparison.

    Parts then add up to the step that the comparison shows, which is a geometric centre.
    """
    sides = [list(a), list(b)]
    for i, level_ms in enumerate(() if step is None else (step.a, step.b)):
        scale = level_ms / MS_PER_S / fmean(run.step_s / run.num_steps for run in sides[i])
        if not math.isclose(scale, 1.0, rel_tol=_ROUNDING):
            sides[i] = [run.scaled(step=scale) for run in sides[i]]
    return sides[0], sides[1]


def split_work(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign, step: SideRatio | None
) -> WorkSplit | str:
    """The difference of mean step times, by model: more FLOPs and bytes, and the rest; or why a floor is unknown.

    ``step`` is the ratio of the comparison, for its interval.
    """
    a_steps: list[tuple[float, Floor]] = []
    b_steps: list[tuple[float, Floor]] = []
    for floored, side in ((a_steps, a), (b_steps, b)):
        for run in side:
            if isinstance(run.floor, str):
                return run.floor
            floored.append((run.step_s / run.num_steps, run.floor))

    def values(run: tuple[float, Floor]) -> tuple[float, ...]:
        step_s, floor = run
        return step_s, floor.base_s, floor.value_s, floor.sampling_s, floor.draft_s, step_s - floor.total_s

    models = ("base model's", "value model's", "sampling's", "draft model's")
    names = ("step", *(f"{model} FLOPs and bytes" for model in models), "rest")
    whole, base, value, sampling, draft, rest = estimate_levels(names, a_steps, b_steps, values, design)
    floors = [floor for _, floor in (*a_steps, *b_steps)]
    hardware = " and ".join(sorted({floor.hardware for floor in floors}))
    is_guided = any(floor.value_s or floor.sampling_s for floor in floors)
    has_drafts = any(floor.draft_s for floor in floors)
    return WorkSplit(
        whole=whole,
        models=(base, value, *((sampling,) if is_guided else ()), *((draft,) if has_drafts else ())),
        rest=rest,
        hardware=hardware,
        floor=_step_floor(a_steps, b_steps, None if step is None else step.estimate, hardware)
        if is_guided
        else None,
    )


_CAUSES: Final = {
    "weights": "weights_s",
    "prefixes": "prefixes_s",
    "arithmetic": "compute_s",
    "sampling": "sampling_s",
}


def _step_floor(
    a: Sequence[tuple[float, Floor]], b: Sequence[tuple[float, Floor]], step: RatioEstimate | None, hardware: str
) -> StepFloor:
    def means(attribute: str) -> tuple[float, ...]:
        return tuple(fmean(getattr(floor, attribute) for _, floor in side) for side in (a, b))

    (floor_a, floor_b), (step_a, step_b) = (
        means("total_s"),
        (fmean(step_s for step_s, _ in side) for side in (a, b)),
    )
    of_causes = {name: means(attribute) for name, attribute in _CAUSES.items()}
    causes = {name: (mean_b - mean_a) / floor_a for name, (mean_a, mean_b) in of_causes.items()}
    ratio = floor_b / floor_a
    return StepFloor(
        ratio=ratio,
        causes={**causes, "other work": ratio - 1 - sum(causes.values())},
        measured=step_b / step_a if step is None else step.ratio,
        interval=None
        if step is None or step.ci_low is None or step.ci_high is None
        else (step.ci_low, step.ci_high),
        a_times_floor=step_a / floor_a,
        added_s=step_b - step_a,
        floor_added_s=floor_b - floor_a,
        hardware=hardware,
    )


def _explain(
    model: SourcedModel | str, a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> ModelSplit | str:
    """The difference of the mean steps by the model, or the reason why it says nothing."""
    if isinstance(model, str):
        return model
    sides: list[list[ModelledRun]] = [[], []]
    for modelled, side in zip(sides, (a, b), strict=True):
        for run in side:
            if isinstance(run.modelled, str):
                return run.modelled
            modelled.append(replace(run.modelled, step_s=run.step_s / run.num_steps))
    return split_by_model(model, sides[0], sides[1], design)
