"""Sections of a step as a tree whose parts add up, and the time of one run as two sides compare it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from benchctl.analysis.attribution.estimate import ModelledRun
from benchctl.analysis.attribution.work import Floor, deployment_of, floor_of
from benchctl.analysis.metrics.run import drafter_of
from benchctl.costs.hardware import Hardware
from benchctl.errors import UsageError
from benchctl.profile.model import VariantSettings
from benchctl.records.columns import StepColumns, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import SECTION_PARENT, Clock
from benchctl.units import MS_PER_S, s_from_ns

STEP: Final = "step"
SAMPLER: Final = "sampler_total"
"""Replaces the step if a log times the sampler alone."""

_ROUNDING: Final = 1e-12
"""Share of a section below which the time that its parts leave is 0."""

CLOCK_NOTE: Final[dict[Clock, str]] = {
    "host": "host time, so a section may include waiting for queued device work; no section is GPU time",
    "device": "device time",
    "virtual": "virtual time of the simulator",
}


class Section(NamedTuple):
    """A section in the tree; ``depth`` is 0 for the whole."""

    name: str
    depth: int
    mean_ns: float
    """Time per step, over all steps. That of a parent is the sum of its children; the last child is what the others
    leave, ``x (unnamed)``, and negative only if the log contradicts itself."""
    step_frac: float
    """Share of the steps that have it; 1 of what others leave."""
    is_leaf: bool

    @property
    def record_mean_ns(self) -> float | None:
        """Mean over the steps that have the section. Does not add up."""
        return self.mean_ns / self.step_frac if self.step_frac else None


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The sections of a set of steps, by name; ``STEP`` is the step itself."""

    total_ns: Mapping[str, float]
    """Time in all of ``num_steps`` steps."""
    num_steps: int
    step_frac: Mapping[str, float]
    """Share of the steps that have the section."""
    clocks: tuple[Clock, ...]
    covers_steps: bool = True
    """Whole steps are timed and not their samplers alone."""

    @property
    def clock_note(self) -> str:
        """Meaning of the times, in words."""
        return "; ".join(CLOCK_NOTE[clock] for clock in self.clocks)

    @cached_property
    def tree(self) -> tuple[Section, ...]:
        """Every section, parents first: below the step, or below its sampler if nothing else is timed."""
        return tuple(self._walk(STEP if self.covers_steps or SAMPLER not in self.total_ns else SAMPLER, 0))

    def _walk(self, name: str, depth: int) -> Iterator[Section]:
        total_ns, above = self.total_ns[name], None if name == STEP else name
        children = [child for child, parent in SECTION_PARENT.items() if parent == above and child in self.total_ns]
        yield Section(name, depth, total_ns / self.num_steps, self.step_frac[name], is_leaf=not children)
        if children:
            for child in children:
                yield from self._walk(child, depth + 1)
            rest_ns = total_ns - sum(self.total_ns[child] for child in children)
            rest_ns = 0.0 if abs(rest_ns) <= _ROUNDING * total_ns else rest_ns
            yield Section(f"{name} (unnamed)", depth + 1, rest_ns / self.num_steps, 1.0, is_leaf=True)

    @property
    def leaf_means_ns(self) -> dict[str, float]:
        """Time per step of each section without children; the values add up to the whole."""
        return {section.name: section.mean_ns for section in self.tree if section.is_leaf}

    @property
    def unplaced(self) -> list[str]:
        """Sections outside the tree, because their parents are unknown."""
        return sorted(name for name in self.total_ns if name != STEP and name not in SECTION_PARENT)


def break_down(steps: StepColumns, *, covers_steps: bool = True) -> Breakdown | None:
    """The breakdown of the steps of one run, None without steps; ``covers_steps`` is that of its record.

    A parent that a step omits although it has children counts as their sum.
    """
    if not len(steps):
        return None
    times_ns, logged = steps.section_ns, steps.has_section
    has_section, nowhere = dict(logged), np.zeros(len(steps), dtype=np.bool_)
    for name, parent in reversed(SECTION_PARENT.items()):  # children before their parents
        if parent is not None and name in times_ns:
            is_logged = logged.get(parent, nowhere)
            times_ns[parent] = times_ns.get(parent, 0) + times_ns[name] * ~is_logged
            has_section[parent] = has_section.get(parent, is_logged) | has_section[name]
    return Breakdown(
        total_ns={name: exact_sum(time_ns) for name, time_ns in times_ns.items()} | {STEP: exact_sum(steps.dur_ns)},
        num_steps=len(steps),
        step_frac={name: float(has.mean()) for name, has in has_section.items()} | {STEP: 1.0},
        clocks=steps.clocks,
        covers_steps=covers_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeBreakdown:
    """One run without its warm-up, in seconds of the engine's clock; None without the necessary records."""

    wall_s: float | None
    output_tokens: int | None
    num_steps: float
    step_s: float
    """Of all steps; 0 where only their samplers are timed."""
    num_passes: float
    """Sequences, summed over the steps."""
    breakdown: Breakdown | None
    floor: Floor | str
    """Least time per step for its FLOPs and bytes, or the reason why it is unknown."""
    modelled: ModelledRun | str = "no step-time model was applied"
    """What a step-time model predicts for its steps, or the reason why it predicts nothing."""
    is_speculative: bool = False
    """Its steps verified draft tokens."""
    step_scale: float = 1.0
    """Factor of the step times for the run's position in its block; 1 if unadjusted. All times but ``breakdown``
    and ``floor`` are scaled already."""

    @property
    def has_steps(self) -> bool:
        return self.num_steps > 0 and self.step_s > 0

    @property
    def mean_step_s(self) -> float:
        """Time per step of a run that has steps."""
        return self.step_s / self.num_steps

    def scaled(self, *, wall: float = 1.0, step: float = 1.0) -> "RunTimeBreakdown":
        """The run with its times multiplied, as for the middle of its block; counts are unchanged."""
        return replace(
            self,
            wall_s=None if self.wall_s is None else self.wall_s * wall,
            step_s=self.step_s * step,
            step_scale=self.step_scale * step,
        )


def mean_breakdown(runs: Sequence[RunTimeBreakdown]) -> Breakdown | None:
    """The sections of the mean run, with equal weights and the times of each as scaled. None without steps."""
    timed = [(run.breakdown, run.step_scale) for run in runs if run.breakdown is not None]
    if not timed:
        return None
    total_ns, num_having = defaultdict[str, float](float), defaultdict[str, float](float)
    for breakdown, scale in timed:
        for name, time_ns in breakdown.total_ns.items():
            total_ns[name] += time_ns * scale / breakdown.num_steps
            num_having[name] += breakdown.step_frac[name]
    return Breakdown(
        total_ns=total_ns,
        num_steps=len(timed),
        step_frac={name: number / len(timed) for name, number in num_having.items()},
        clocks=tuple(sorted({clock for breakdown, _ in timed for clock in breakdown.clocks})),
        covers_steps=all(breakdown.covers_steps for breakdown, _ in timed),
    )


def runs_at_level(runs: Sequence[RunTimeBreakdown], level_ms: float | None) -> list[RunTimeBreakdown]:
    """The runs of an arm with step times scaled so that their arithmetic mean is ``level_ms``; None scales nothing.

    Parts then add up to the step that a comparison shows, which is a geometric centre.
    """
    steps_s = [run.mean_step_s for run in runs if run.has_steps]
    scale = level_ms / MS_PER_S / fmean(steps_s) if level_ms and steps_s else 1.0
    return list(runs) if math.isclose(scale, 1.0, rel_tol=_ROUNDING) else [run.scaled(step=scale) for run in runs]


def break_down_run_time(
    run: LoadedRun,
    metrics: Mapping[str, float | None],
    settings: VariantSettings | None,
    hardware: Hardware | None,
) -> RunTimeBreakdown:
    """The breakdown of a run with its ``metrics``; settings and device are those of its arm, None where unknown."""
    columns, covers_steps = run.columns, run.record.times_whole_steps
    tokens, drafter = metrics["output_tokens"], None if settings is None else drafter_of(settings.server)
    floor: Floor | str = "the step log times the sampler alone, not the steps that a floor is compared with"
    try:
        deployment = deployment_of(settings, hardware)
        if covers_steps:
            floor = floor_of(columns, deployment, draft=None if drafter is None else drafter.shape)
    except UsageError as error:
        floor = str(error)
    # Of several loads: the steps of one, in the mean, and at their mean of logarithms
    share = (metrics["num_steps"] or 0) / max(len(columns), 1)
    of_one = RunTimeBreakdown(
        wall_s=metrics["wall_s"],
        output_tokens=None if tokens is None else int(tokens),
        num_steps=len(columns) * share,
        step_s=s_from_ns(int(columns.dur_ns.sum())) * share if covers_steps else 0.0,
        num_passes=exact_sum(columns.num_seqs) * share,
        breakdown=break_down(columns, covers_steps=covers_steps),
        floor=floor,
        is_speculative=bool(metrics["draft_tokens"]),
    )
    level_ms = metrics["step_ms"] if run.several and of_one.has_steps else None
    return of_one if level_ms is None else of_one.scaled(step=level_ms / MS_PER_S / of_one.mean_step_s)
