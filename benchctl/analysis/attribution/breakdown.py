"""Sections of a step as a tree whose parts add up, and the time of one run as two sides compare it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.analysis.attribution.estimate import ModelledRun
from benchctl.analysis.attribution.work import Floor, deployment_of, floor_of
from benchctl.analysis.metrics.speculation import drafter_of
from benchctl.costs.hardware import Hardware
from benchctl.errors import UsageError
from benchctl.profile.model import VariantSettings
from benchctl.records.columns import StepColumns, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import SECTION_PARENT, Clock
from benchctl.units import s_from_ns

STEP: Final = "step"
SAMPLER: Final = "sampler_total"
"""Replaces the step if a log times the sampler alone."""

_MANY_STEPS: Final = 10_000_000
_ROUNDING_NS: Final = 1_000
"""Of totals over this many steps: far below the time of a step, and above the rounding of some hundred runs."""

CLOCK_NOTE: Final[dict[Clock, str]] = {
    "host": "host time, so a section may include waiting for queued device work; no section is GPU time",
    "device": "device time",
    "virtual": "virtual time of the simulator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Time of one section over ``num_steps`` steps, ``num_records`` of which have it.

    Invariant: ``total_ns`` is the sum over ``children``, when there are any; the last child is then the
    remainder (``is_unnamed``), which is negative only if the log contradicts itself.
    """

    name: str
    total_ns: int
    num_records: int
    num_steps: int
    children: tuple["Section", ...] = ()
    is_unnamed: bool = False

    @property
    def mean_ns(self) -> float:
        """Time per step: total / number of all steps. Adds up."""
        return self.total_ns / self.num_steps

    @property
    def record_mean_ns(self) -> float | None:
        """Mean over the steps that have the section: total / number of records. Does not add up."""
        return self.total_ns / self.num_records if self.num_records else None

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Section"]]:
        """This section and all below it with their depth, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def leaves(self) -> Iterator["Section"]:
        """The sections without children; their totals add up to this one."""
        return (section for _, section in self.walk() if not section.children)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The sections of a set of steps. ``unplaced`` are sections with unknown parents, outside the tree."""

    step: Section
    """The whole: the step, or its sampler if nothing else is timed."""
    unplaced: tuple[Section, ...]
    clocks: tuple[Clock, ...]
    covers_steps: bool = True
    """``step`` is the whole step and not its sampler alone."""

    @property
    def clock_note(self) -> str:
        """Meaning of the times, in words."""
        return "; ".join(CLOCK_NOTE[clock] for clock in self.clocks)

    @property
    def sections(self) -> dict[str, Section]:
        """Every section by name, in the tree and unplaced."""
        return {section.name: section for section in (*(each for _, each in self.step.walk()), *self.unplaced)}

    def leaf_means_ns(self) -> dict[str, float]:
        """Time per step of each leaf; the values add up to the mean step."""
        return {leaf.name: leaf.mean_ns for leaf in self.step.leaves()}


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
    return _breakdown(
        {name: exact_sum(time_ns) for name, time_ns in times_ns.items()} | {STEP: exact_sum(steps.dur_ns)},
        {name: int(has.sum()) for name, has in has_section.items()} | {STEP: len(steps)},
        steps.clocks,
        covers_steps=covers_steps,
    )


def mean_breakdown(runs: Iterable[tuple[Breakdown | None, float]]) -> Breakdown | None:
    """The breakdown of the mean run, with equal weights and each run's times scaled. None without steps.

    Totals are scaled to one large number of steps, so means over steps become means over runs; rounding to whole
    nanoseconds changes a mean by less than a millionth.
    """
    timed = [(breakdown, scale) for breakdown, scale in runs if breakdown is not None]
    total_ns, num_records = Counter[str](), Counter[str]()
    for breakdown, scale in timed:
        factor = _MANY_STEPS / breakdown.step.num_steps
        for name, section in breakdown.sections.items():
            if not section.is_unnamed:
                total_ns[name] += round(section.total_ns * scale * factor)
                num_records[name] += round(section.num_records * factor)
    if not timed:
        return None
    num_records[STEP] = _MANY_STEPS * len(timed)
    clocks = sorted({clock for breakdown, _ in timed for clock in breakdown.clocks})
    covers_steps = all(breakdown.covers_steps for breakdown, _ in timed)
    return _breakdown(total_ns, num_records, tuple(clocks), covers_steps=covers_steps, rounding_ns=_ROUNDING_NS)


def _breakdown(
    total_ns: Mapping[str, int],
    num_records: Mapping[str, int],
    clocks: tuple[Clock, ...],
    *,
    covers_steps: bool,
    rounding_ns: int = 0,
) -> Breakdown:
    """The tree of these totals; a remainder of up to ``rounding_ns`` per section counts as 0."""

    def section(name: str) -> Section:
        leaf = Section(
            name=name, total_ns=total_ns[name], num_records=num_records[name], num_steps=num_records[STEP]
        )
        above = None if name == STEP else name
        children = [
            section(child) for child, parent in SECTION_PARENT.items() if parent == above and child in total_ns
        ]
        if not children:
            return leaf
        named_ns = sum(child.total_ns for child in children)
        rest_ns = leaf.total_ns - named_ns
        rest_ns = 0 if abs(rest_ns) <= rounding_ns * len(children) else rest_ns
        unnamed = replace(leaf, name=f"{name} (unnamed)", total_ns=rest_ns, is_unnamed=True)
        return replace(leaf, total_ns=named_ns + rest_ns, children=(*children, unnamed))

    unplaced = sorted(name for name in total_ns if name != STEP and name not in SECTION_PARENT)
    return Breakdown(
        step=section(STEP if covers_steps or SAMPLER not in num_records else SAMPLER),
        unplaced=tuple(section(name) for name in unplaced),
        clocks=clocks,
        covers_steps=covers_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeBreakdown:
    """One run without its warm-up, in seconds of the engine's clock; None without the necessary records."""

    wall_s: float | None
    output_tokens: int | None
    num_steps: int
    step_s: float
    """Of all steps; 0 where only their samplers are timed."""
    num_passes: float
    """Sequences, summed over the steps."""
    breakdown: Breakdown | None
    floor: Floor | str
    """Least time per step for its FLOPs and bytes, or the reason why it is unknown."""
    modelled: ModelledRun | str = "no step-time model was applied"
    """What a step-time model predicts for its steps, or the reason why it predicts nothing."""
    is_guided: bool = False
    """A value model scored candidates in some of its steps."""
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
    return RunTimeBreakdown(
        wall_s=metrics["wall_s"],
        output_tokens=None if tokens is None else int(tokens),
        num_steps=len(columns),
        step_s=s_from_ns(int(columns.dur_ns.sum())) if covers_steps else 0.0,
        num_passes=float(exact_sum(columns.num_seqs)),
        breakdown=break_down(columns, covers_steps=covers_steps),
        floor=floor,
        is_guided=bool((columns.known_values("guided_rows") > 0).any()),
        is_speculative=bool(metrics["draft_tokens"]),
    )
