"""Sections of a step as a tree whose parts add up, and the time of one run as two sides compare it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.analysis.attribution.step_time_model import ModelledRun
from benchctl.analysis.attribution.work import Floor, WorkModel, floor_of
from benchctl.records.columns.columns import Flags, Integers, StepColumns, exact_sum
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
    def num_steps(self) -> int:
        return self.step.num_steps

    @property
    def clock_note(self) -> str:
        """Meaning of the times, in words."""
        return "; ".join(CLOCK_NOTE[clock] for clock in self.clocks)

    def section(self, name: str) -> Section | None:
        """The section called ``name``, in the tree or unplaced."""
        matches = (section for _, section in self.step.walk() if section.name == name)
        return next(matches, None) or next((s for s in self.unplaced if s.name == name), None)

    def leaf_means_ns(self) -> dict[str, float]:
        """Time per step of each leaf; the values add up to the mean step."""
        return {leaf.name: leaf.mean_ns for leaf in self.step.leaves()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTally:
    """Totals of the step itself (``STEP``) and of each section, and the number of steps that have it.

    A parent that a step omits although it has children counts as their sum.
    """

    total_ns: Mapping[str, int]
    num_records: Mapping[str, int]
    clocks: tuple[Clock, ...]
    covers_steps: bool = True
    """The total of ``STEP`` is that of whole steps, not of their samplers alone."""


def tally_steps(steps: StepColumns, *, covers_steps: bool = True) -> StepTally:
    """The tally of the steps of one run; ``covers_steps`` is that of its record."""
    sections = _with_parents(steps)
    return StepTally(
        total_ns={name: exact_sum(time) for name, (time, _) in sections.items()} | {STEP: exact_sum(steps.dur_ns)},
        num_records={name: int(has.sum()) for name, (_, has) in sections.items()} | {STEP: len(steps)},
        clocks=steps.clocks,
        covers_steps=covers_steps,
    )


def break_down(tallies: Iterable[StepTally], rounding_ns: int = 0) -> Breakdown | None:
    """The breakdown of the steps of several runs, or of their samplers. None without steps.

    A remainder of up to ``rounding_ns`` per section counts as 0.
    """
    totals: Counter[str] = Counter()
    records: Counter[str] = Counter()
    clocks: set[Clock] = set()
    covers_steps = True
    for tally in tallies:
        totals.update(tally.total_ns)
        records.update(tally.num_records)
        clocks.update(tally.clocks)
        covers_steps = covers_steps and tally.covers_steps
    if not records[STEP]:
        return None
    unplaced = sorted(name for name in totals if name != STEP and name not in SECTION_PARENT)
    return Breakdown(
        step=_section(STEP if covers_steps or SAMPLER not in records else SAMPLER, totals, records, rounding_ns),
        unplaced=tuple(_leaf(name, totals, records) for name in unplaced),
        clocks=tuple(sorted(clocks)),
        covers_steps=covers_steps,
    )


def mean_breakdown(runs: Iterable[tuple[StepTally, float]]) -> Breakdown | None:
    """The breakdown of the mean run, with equal weights and scaled times. None without steps.

    Tallies are scaled to one large number of steps, so means over steps become means over runs; rounding to whole
    nanoseconds changes a mean by less than a millionth.
    """
    scaled = []
    for tally, scale in runs:
        if num_steps := tally.num_records[STEP]:
            factor = _MANY_STEPS / num_steps
            total_ns = {name: round(time_ns * scale * factor) for name, time_ns in tally.total_ns.items()}
            num_records = {name: round(count * factor) for name, count in tally.num_records.items()}
            scaled.append(replace(tally, total_ns=total_ns, num_records=num_records))
    return break_down(scaled, rounding_ns=_ROUNDING_NS)


def _depth(name: str) -> int:
    parent = SECTION_PARENT[name]
    return 0 if parent is None else 1 + _depth(parent)


_DEEPEST_FIRST: Final = tuple(sorted(SECTION_PARENT, key=_depth, reverse=True))


def _with_parents(steps: StepColumns) -> dict[str, tuple[Integers, Flags]]:
    """Time of each section and the steps that have it; an absent parent is the sum of its children."""
    has_section = steps.has_section
    complete = {name: (times_ns, has_section[name]) for name, times_ns in steps.section_ns.items()}
    nothing = (np.zeros(len(steps), dtype=np.int64), np.zeros(len(steps), dtype=np.bool_))
    for name in _DEEPEST_FIRST:
        parent = SECTION_PARENT[name]
        if name in complete and parent is not None:
            time_ns, is_known = complete.get(parent, nothing)
            child_ns, has_child = complete[name]
            is_absent = ~has_section.get(parent, nothing[1])
            complete[parent] = (time_ns + child_ns * is_absent, is_known | has_child)
    return complete


def _section(name: str, totals: Counter[str], records: Counter[str], rounding_ns: int) -> Section:
    parent = None if name == STEP else name
    children = [
        _section(child, totals, records, rounding_ns)
        for child, above in SECTION_PARENT.items()
        if above == parent and child in records
    ]
    leaf = _leaf(name, totals, records)
    if not children:
        return leaf
    named_ns = sum(child.total_ns for child in children)
    rest_ns = leaf.total_ns - named_ns
    rest_ns = 0 if abs(rest_ns) <= rounding_ns * len(children) else rest_ns
    unnamed = replace(leaf, name=f"{name} (unnamed)", total_ns=rest_ns, is_unnamed=True)
    return replace(leaf, total_ns=named_ns + rest_ns, children=(*children, unnamed))


def _leaf(name: str, totals: Counter[str], records: Counter[str]) -> Section:
    return Section(name=name, total_ns=totals[name], num_records=records[name], num_steps=records[STEP])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeBreakdown:
    """One run without its warm-up, in seconds of the engine's clock; None without the necessary records."""

    wall_s: float | None
    output_tokens: int | None
    num_steps: int
    step_s: float
    num_passes: float
    """Sequences, summed over the steps."""
    breakdown: Breakdown | None
    floor: Floor | str
    """Least time per step for its FLOPs and bytes, or the reason why it is unknown."""
    modelled: ModelledRun | str = "no step-time model was applied"
    """What a step-time model predicts for its steps, or the reason why it predicts nothing."""
    covers_steps: bool = True
    """``step_s`` is the time of whole steps."""
    is_guided: bool = False
    """A value model scored candidates in some of its steps."""
    is_speculative: bool = False
    """Its steps verified draft tokens."""
    step_scale: float = 1.0
    """Factor of the step times for the run's position in its block; 1 if unadjusted. All times but ``breakdown``
    and ``floor`` are scaled already."""

    @property
    def has_steps(self) -> bool:
        return self.num_steps > 0 and self.step_s > 0 and self.covers_steps

    def scaled(self, *, wall: float = 1.0, step: float = 1.0) -> "RunTimeBreakdown":
        """The run with its times multiplied, as for the middle of its block; counts are unchanged."""
        return replace(
            self,
            wall_s=None if self.wall_s is None else self.wall_s * wall,
            step_s=self.step_s * step,
            step_scale=self.step_scale * step,
        )


def break_down_run_time(
    run: LoadedRun, metrics: Mapping[str, float | None], work: WorkModel | str
) -> RunTimeBreakdown:
    """The breakdown of a run with its ``metrics``; ``work`` is its work model, or the reason why it is unknown."""
    columns, covers_steps = run.columns, run.record.times_whole_steps
    tokens = metrics["output_tokens"]
    floor: Floor | str
    if isinstance(work, str):
        floor = work
    elif covers_steps:
        floor = floor_of(columns, work)
    else:
        floor = "the step log times the sampler alone, not the steps that a floor is compared with"
    return RunTimeBreakdown(
        wall_s=metrics["wall_s"],
        output_tokens=None if tokens is None else int(tokens),
        num_steps=len(columns),
        step_s=s_from_ns(int(columns.dur_ns.sum())),
        num_passes=float(exact_sum(columns.num_seqs)),
        breakdown=break_down([tally_steps(columns, covers_steps=covers_steps)]),
        floor=floor,
        covers_steps=covers_steps,
        is_guided=bool((columns.known_values("guided_rows") > 0).any()),
        is_speculative=bool(metrics["draft_tokens"]),
    )
