"""The wall time as a product, its difference as a sum, and the mean step by its sections."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Final

from benchctl.analysis.attribution.breakdown import CLOCK_NOTE, STEP, RunTimeBreakdown, Section
from benchctl.analysis.attribution.estimate import (
    MIN_DIFFERENCE,
    Contribution,
    PairDesign,
    estimate_levels,
    estimate_terms,
    excludes_zero,
)
from benchctl.analysis.statistics.estimate import RatioEstimate, SideRatio
from benchctl.analysis.statistics.intervals import StudentT
from benchctl.records.record import StopMode
from benchctl.units import s_from_ns

STEPS: Final = "steps"
TIME_PER_STEP: Final = "time per step"
REMAINDER: Final = "remainder"
TOKENS: Final = "output tokens"
STEPS_EACH: Final = "steps per token"
PASSES: Final = "passes"
PASSES_EACH: Final = "passes per token"
BATCHING: Final = "steps per pass"
TIME_EACH: Final = "wall time per token"

METRIC_OF: Final = {TOKENS: "output_tokens", STEPS: "num_steps", TIME_PER_STEP: "step_ms"}
"""The metric that is the same quantity as a factor, so that both have one value."""

MEANING: Final = {
    STEPS: "number of steps",
    TIME_PER_STEP: "Σ step time / number of steps",
    REMAINDER: "wall time / Σ step time: time without a step, such as queueing, the network, the client; below 1 "
    "if steps overlap",
    TOKENS: "output tokens of completed requests",
    STEPS_EACH: "number of steps / output tokens: the inverse of the tokens that the batch gains in one step",
    PASSES: "sequences summed over the steps: the fewer, the more tokens a sequence gains in one step",
    PASSES_EACH: "sequences summed over the steps / output tokens: the inverse of the tokens that a sequence gains "
    "in one step, prompts included",
    BATCHING: "number of steps / sequences summed over them: the inverse of the mean batch size",
    TIME_EACH: "wall time / output tokens, the inverse of output_throughput; not tpot_ms, which is a request's own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of the ratio of wall times, B over A.

    ``added_s`` is its share of the difference of the wall times: (b - a) ln f / ln(b / a), which does not depend on
    the order of the factors.
    """

    name: str
    estimate: RatioEstimate
    per_log_s: float
    """(b - a) / ln(b / a) of the wall times: seconds per unit of logarithm."""

    @property
    def added_s(self) -> float:
        return self.log_ratio * self.per_log_s

    @property
    def ratio(self) -> float:
        return self.estimate.ratio

    @property
    def log_ratio(self) -> float:
        return self.estimate.log_ratio

    @property
    def added_half_s(self) -> float | None:
        """Half the interval of ``added_s`` for a known difference of the wall times; None for one block."""
        half = self.estimate.half_width
        return None if half is None else half * self.per_log_s

    @property
    def is_significant(self) -> bool:
        """It differs significantly from 1."""
        return excludes_zero(self.estimate.log_interval, self.log_ratio)

    @property
    def meaning(self) -> str:
        return MEANING[self.name]

    def share_of(self, total: RatioEstimate) -> float | None:
        """Share of the logarithm of the whole ratio; None if its interval includes 1."""
        is_changed = excludes_zero(total.log_interval, total.log_ratio)
        return self.log_ratio / total.log_ratio if is_changed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WallSplit:
    """Invariants: the factors multiply to ``total.ratio`` and add up to b_s - a_s; b_s / a_s is ``total.ratio``.

    ``a_s`` and ``b_s`` are the centres over the blocks, at equal positions if adjusted for the order.
    """

    a_s: float
    b_s: float
    total: RatioEstimate
    factors: tuple[Factor, ...]


def split_wall(
    a: Sequence[RunTimeBreakdown],
    b: Sequence[RunTimeBreakdown],
    design: PairDesign,
    stop: StopMode,
    ratios: Mapping[str, SideRatio] = MappingProxyType({}),
) -> WallSplit:
    """Factors of the wall time; all runs of both sides have one, and positive factors if any.

    The factors are those that every run has the records for. ``ratios`` are those of the comparison, by metric: the
    whole and the factors of ``METRIC_OF`` are theirs, as far as they are over the same blocks.
    """
    wall = ratios.get("wall_s")
    if wall is not None:
        design = replace(design, evidence=wall.evidence)
    runs = (*a, *b)
    has_steps, has_tokens = all(run.has_steps for run in runs), all(run.output_tokens for run in runs)
    use_tokens = has_tokens and (stop != "forced" or not has_steps)
    use_passes = any(run.is_speculative for run in runs) and all(run.num_passes for run in runs)

    def factors_in(run: RunTimeBreakdown) -> dict[str, float]:
        return _factors(run, has_steps=has_steps, use_tokens=use_tokens, use_passes=use_passes)

    def logs(x: RunTimeBreakdown, y: RunTimeBreakdown) -> list[float]:
        before, after = ((_wall_s(run), *factors_in(run).values()) for run in (x, y))
        return [math.log(b_value) - math.log(a_value) for a_value, b_value in zip(before, after, strict=True)]

    names = list(factors_in(runs[0]))
    total, *parts = estimate_terms(a, b, logs, design)
    middle = (fmean(math.log(_wall_s(run)) for run in a) + fmean(math.log(_wall_s(run)) for run in b)) / 2
    a_s, b_s = (math.exp(middle + sign * total.log_ratio / 2) for sign in (-1, 1))
    if wall is not None:
        same_blocks = {
            name: ratio.estimate
            for name, ratio in ratios.items()
            if (ratio.design.blocks, ratio.estimate.num_blocks) == (wall.design.blocks, wall.estimate.num_blocks)
        }
        total, a_s, b_s = wall.estimate, wall.a, wall.b
        parts = _as_compared(total, names, parts, same_blocks)
    per_log = logarithmic_mean(a_s, b_s)
    return WallSplit(
        a_s=a_s,
        b_s=b_s,
        total=total,
        factors=tuple(
            Factor(name=name, estimate=part, per_log_s=per_log) for name, part in zip(names, parts, strict=True)
        ),
    )


def _as_compared(
    total: RatioEstimate,
    names: Sequence[str],
    parts: Sequence[RatioEstimate],
    compared: Mapping[str, RatioEstimate],
) -> list[RatioEstimate]:
    """The factors with the ratios that were ``compared``; the last one is what these leave of ``total``.

    What moves it from its own value has no expectation, and its size as standard error, which adds to its own. The
    interval then holds its own value, too.
    """
    if not parts:
        return []
    *others, rest = parts
    exact = [compared.get(METRIC_OF.get(name, ""), part) for name, part in zip(names[:-1], others, strict=True)]
    centre = total.log_ratio - math.fsum(factor.log_ratio for factor in exact)
    uncertainty, moved = rest.uncertainty, centre - rest.log_ratio
    if uncertainty is not None and abs(moved) > MIN_DIFFERENCE:
        error = math.hypot(uncertainty.standard_error, moved)
        uncertainty = StudentT(centre, error, uncertainty.degrees_of_freedom)
    return [*exact, replace(rest, log_ratio=centre, uncertainty=uncertainty)]


def logarithmic_mean(a: float, b: float) -> float:
    """(b - a) / ln(b / a); a if both are equal."""
    log = math.log(b) - math.log(a)
    return a * (math.expm1(log) / log) if log else a


def _wall_s(run: RunTimeBreakdown) -> float:
    assert run.wall_s is not None  # noqa: S101 - only runs with a wall time are split
    return run.wall_s


def _factors(run: RunTimeBreakdown, *, has_steps: bool, use_tokens: bool, use_passes: bool) -> dict[str, float]:
    steps, tokens = float(run.num_steps), float(run.output_tokens or 0)
    if not has_steps:
        return {TOKENS: tokens, TIME_EACH: _wall_s(run) / tokens} if use_tokens else {}
    counts = {TOKENS: tokens, STEPS_EACH: steps / tokens} if use_tokens else {STEPS: steps}
    if use_passes:
        passes = {TOKENS: tokens, PASSES_EACH: run.num_passes / tokens} if use_tokens else {PASSES: run.num_passes}
        counts = {**passes, BATCHING: steps / run.num_passes}
    return {**counts, TIME_PER_STEP: run.step_s / run.num_steps, REMAINDER: _wall_s(run) / run.step_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSplit:
    """Invariant: ``sections`` add up to ``whole``, the difference of the mean step time.

    Sections are leaves, in the order of the tree; ``x (unnamed)`` is the unnamed remainder of x.
    """

    whole: Contribution
    sections: tuple[Contribution, ...]
    clock_note: str
    unplaced: tuple[str, ...]
    """Sections outside the tree, because their parents are unknown."""

    @property
    def largest(self) -> Contribution:
        return max(self.sections, key=lambda section: abs(section.added_s))


def split_sections(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> SectionSplit | None:
    """Split by sections; None if no step of either side has one."""
    breakdowns = [run.breakdown for run in (*a, *b) if run.breakdown is not None]
    inner = {section.name for run in breakdowns for _, section in run.step.walk() if section.children}
    if len(breakdowns) < len(a) + len(b) or not inner:
        return None
    largest = sorted(breakdowns, key=lambda run: -sum(1 for _ in run.step.walk()))
    # a section that is divided in any tree is divided in all
    names = list(dict.fromkeys(_leaf_name(leaf, inner) for run in largest for leaf in run.step.leaves()))

    def values(run: RunTimeBreakdown) -> list[float]:
        leaves = leaf_times_s(run, inner)
        return [sum(leaves.values()), *(leaves.get(name, 0.0) for name in names)]

    whole, *sections = estimate_levels([STEP, *names], a, b, values, design)
    clocks = sorted({clock for run in breakdowns for clock in run.clocks})
    return SectionSplit(
        whole=whole,
        sections=tuple(sections),
        clock_note="; ".join(CLOCK_NOTE[clock] for clock in clocks),
        unplaced=tuple(sorted({section.name for run in breakdowns for section in run.unplaced})),
    )


def _leaf_name(leaf: Section, inner: set[str]) -> str:
    return f"{leaf.name} (unnamed)" if leaf.name in inner else leaf.name


def leaf_times_s(run: RunTimeBreakdown, inner: set[str]) -> dict[str, float]:
    """Time per step of each leaf; ``inner`` are the sections with children in any run."""
    if run.breakdown is None:
        return {}
    leaves = run.breakdown.step.leaves()
    return {_leaf_name(leaf, inner): s_from_ns(leaf.mean_ns) * run.step_scale for leaf in leaves}
