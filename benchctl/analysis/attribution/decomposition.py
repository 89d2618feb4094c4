"""Decomposition of the difference between two sides: the wall time as a product, the step as sums; and in words the
parts that carry the difference, as far as they are significant.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from benchctl.analysis.attribution.breakdown import CLOCK_NOTE, STEP, RunTimeBreakdown, runs_at_level
from benchctl.analysis.attribution.estimate import (
    MIN_DIFFERENCE,
    Factor,
    PairDesign,
    Part,
    SourcedModel,
    Split,
    WallSplit,
    estimate_differences,
    estimate_levels,
    logarithmic_mean,
    split_by_model,
)
from benchctl.analysis.attribution.work import OF_BASE, OF_VALUE
from benchctl.analysis.statistics.estimate import RatioEstimate, SideRatio
from benchctl.analysis.statistics.intervals import StudentT
from benchctl.records.record import StopMode
from benchctl.units import (
    MS_PER_S,
    change_of_ratio,
    count_of,
    percentage,
    s_from_ns,
    signed_three_digits,
)

NO_MODEL: Final = "no step-time model is named"
TIME_PER_STEP: Final = "time per step"
METRIC_OF: Final = {"output tokens": "output_tokens", "steps": "num_steps", TIME_PER_STEP: "step_ms"}
"""The metric that is the same quantity as a factor, so that both have one value."""
MEANING: Final = {
    "steps": "number of steps",
    TIME_PER_STEP: "Σ step time / number of steps",
    "remainder": "wall time / Σ step time: time without a step, such as queueing, the network, the client; below "
    "1 if steps overlap",
    "output tokens": "output tokens of completed requests",
    "steps per token": "number of steps / output tokens: the inverse of the tokens that the batch gains in one "
    "step",
    "passes": "sequences summed over the steps: the fewer, the more tokens a sequence gains in one step",
    "passes per token": "sequences summed over the steps / output tokens: the inverse of the tokens that a "
    "sequence gains in one step, prompts included",
    "steps per pass": "number of steps / sequences summed over them: the inverse of the mean batch size",
    "wall time per token": "wall time / output tokens, the inverse of output_throughput; not tpot_ms, which is a "
    "request's own",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Two sides of one cell. Parts without the necessary records are None, or the reason where one is told."""

    num_blocks: int
    """Of the smaller side."""
    wall: WallSplit | None
    """None if the client's times do not count."""
    step: Part | None
    """The mean step."""
    sections: Split | None
    """The mean step by its sections: leaves in the order of the tree, ``x (unnamed)`` the remainder of x."""
    work: Split | str
    """The mean step by the least times of the models' FLOPs and bytes, and what these leave."""
    model: Split | str
    """The mean step by what a fitted step-time model says of its work, and what it leaves."""


def decompose(
    a: Sequence[RunTimeBreakdown],
    b: Sequence[RunTimeBreakdown],
    of_steps: PairDesign,
    stop: StopMode,
    ratios: Mapping[str, SideRatio],
    model: SourcedModel | str = NO_MODEL,
) -> Decomposition | None:
    """The decomposition of B against A; None if neither wall times nor steps are known on both sides.

    If paired, both sequences have the same blocks in the same order. Wall times have the design of their ratio;
    ``ratios`` are those of the comparison, by metric.
    """
    wall, mean_step = ratios.get("wall_s"), ratios.get("step_ms")
    has_steps = bool(a and b) and all(run.has_steps for run in (*a, *b))
    if wall is None and not has_steps:
        return None
    wall_split = None if wall is None else split_wall(a, b, stop, ratios)
    step = sections = None
    explained: Split | str = "the steps of a side are not known"
    if has_steps:
        if mean_step is not None:
            a, b = runs_at_level(a, mean_step.a), runs_at_level(b, mean_step.b)
        rows_a, rows_b = ([{STEP: run.mean_step_s} for run in side] for side in (a, b))
        (step,) = estimate_levels(rows_a, rows_b, of_steps)
        sections = split_sections(a, b, of_steps)
        explained = _explain(model, a, b, of_steps)
    return Decomposition(
        num_blocks=min(len(a), len(b)) if wall is None else wall.estimate.num_blocks,
        wall=wall_split,
        step=step,
        sections=sections,
        work=split_work(a, b, of_steps),
        model=explained,
    )


def split_wall(
    a: Sequence[RunTimeBreakdown],
    b: Sequence[RunTimeBreakdown],
    stop: StopMode,
    ratios: Mapping[str, SideRatio],
) -> WallSplit:
    """Factors of the wall time, as far as every run that has one has the records for them; positive, if any.

    ``ratios`` are those of the comparison, by metric: the whole and the factors of ``METRIC_OF`` are theirs, as far
    as they are over the same blocks.
    """
    wall = ratios["wall_s"]
    if wall.estimate.is_paired:  # the blocks of the ratio
        timed = [(x, y) for x, y in zip(a, b, strict=True) if x.wall_s and y.wall_s]
        a, b = [x for x, _ in timed], [y for _, y in timed]
    else:
        a, b = [run for run in a if run.wall_s], [run for run in b if run.wall_s]
    runs = (*a, *b)
    has_steps, has_tokens = all(run.has_steps for run in runs), all(run.output_tokens for run in runs)
    use_tokens = has_tokens and (stop != "forced" or not has_steps)
    use_passes = any(run.is_speculative for run in runs) and all(run.num_passes for run in runs)

    def logs(run: RunTimeBreakdown) -> dict[str, float]:
        wall_s, steps, tokens = run.wall_s or 0.0, float(run.num_steps), float(run.output_tokens or 0)
        factors: dict[str, float] = {"output tokens": tokens} if use_tokens else {}
        each, per_token = (tokens, " per token") if use_tokens else (1.0, "")
        if has_steps and use_passes:
            factors |= {f"passes{per_token}": run.num_passes / each, "steps per pass": steps / run.num_passes}
        elif has_steps:
            factors[f"steps{per_token}"] = steps / each
        if has_steps:
            factors |= {TIME_PER_STEP: run.mean_step_s, "remainder": wall_s / run.step_s}
        elif use_tokens:
            factors["wall time per token"] = wall_s / tokens
        return {name: math.log(factor) for name, factor in factors.items()}

    own = estimate_differences([logs(run) for run in a], [logs(run) for run in b], PairDesign.of(wall))
    estimates = _as_compared(wall, own, ratios)
    per_log_s, parts = logarithmic_mean(wall.a, wall.b), []
    for name, factor in estimates.items():
        low, high = (end * per_log_s for end in factor.log_interval) if factor.log_interval else (None, None)
        added_s = factor.log_ratio * per_log_s
        parts.append(Factor(name=name, added_s=added_s, ci_low_s=low, ci_high_s=high, estimate=factor))
    whole = Factor(name="wall time", added_s=wall.b - wall.a, a_s=wall.a, b_s=wall.b, estimate=wall.estimate)
    return WallSplit(whole=whole, parts=tuple(parts))


def _as_compared(
    wall: SideRatio, estimates: Mapping[str, RatioEstimate], ratios: Mapping[str, SideRatio]
) -> dict[str, RatioEstimate]:
    """The factors with the ratios compared over the blocks of ``wall``; the last one is what these leave of it.

    What moves it from its own value has no expectation, and its size as standard error, which adds to its own. The
    interval then holds its own value, too.
    """
    exact, blocks = dict(estimates), (wall.design.blocks, wall.estimate.num_blocks)
    for name in estimates:
        ratio = ratios.get(METRIC_OF.get(name, ""))
        if ratio is not None and (ratio.design.blocks, ratio.estimate.num_blocks) == blocks:
            exact[name] = ratio.estimate
    if not exact:
        return {}
    name, rest = exact.popitem()
    centre = wall.estimate.log_ratio - math.fsum(part.log_ratio for part in exact.values())
    uncertainty, moved = rest.uncertainty, centre - rest.log_ratio
    if uncertainty is not None and abs(moved) > MIN_DIFFERENCE:
        error = math.hypot(uncertainty.standard_error, moved)
        uncertainty = StudentT(centre, error, uncertainty.degrees_of_freedom)
    return {**exact, name: replace(rest, log_ratio=centre, uncertainty=uncertainty)}


def split_sections(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> Split | None:
    """The mean step by its sections; None if no step of either side has one."""
    runs, rows = (*a, *b), []
    breakdowns = [run.breakdown for run in runs if run.breakdown is not None]
    divided = {section.name for each in breakdowns for section in each.tree if not section.is_leaf}
    if len(breakdowns) < len(runs) or not divided:
        return None
    for run, breakdown in zip(runs, breakdowns, strict=True):
        leaves = {}
        for name, mean_ns in breakdown.leaf_means_ns.items():  # a section that is divided in any run is so in all
            leaf = f"{name} (unnamed)" if name in divided else name
            leaves[leaf] = s_from_ns(mean_ns) * run.step_scale
        rows.append({STEP: sum(leaves.values()), **leaves})
    whole, *sections = estimate_levels(rows[: len(a)], rows[len(a) :], design)
    clocks = sorted({clock for each in breakdowns for clock in each.clocks})
    return Split(
        whole=whole,
        parts=tuple(sections),
        origin="; ".join(CLOCK_NOTE[clock] for clock in clocks),
        unplaced=tuple(sorted({name for each in breakdowns for name in each.unplaced})),
    )


def _all_or_reason(values: Iterable[T | str]) -> list[T] | str:
    """All values, or the first reason that stands in place of one."""
    complete: list[T] = []
    for value in values:
        if isinstance(value, str):
            return value
        complete.append(value)
    return complete


def split_work(a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign) -> Split | str:
    """The mean step by the floor of each model, and the rest; or the reason why a floor is unknown.

    The draft model is left out where neither side has one of known shape, sampling (what guidance reads and writes
    of logits) where neither is guided.
    """
    floors = _all_or_reason(run.floor for run in (*a, *b))
    if isinstance(floors, str):
        return floors
    always = {OF_BASE, OF_VALUE}
    names = [name for name in floors[0].parts if name in always or any(each.parts[name] for each in floors)]
    rows = []
    for run, floor in zip((*a, *b), floors, strict=True):
        step_s, floor_s = run.mean_step_s, floor.total_s
        parts = {f"{name} FLOPs and bytes": floor.parts[name] for name in names}
        rows.append({STEP: step_s, "floor": floor_s, **parts, "rest": step_s - floor_s})
    whole, floor_of_step, *split = estimate_levels(rows[: len(a)], rows[len(a) :], design)
    devices = " and ".join(sorted({floor.hardware for floor in floors}))
    return Split(whole=whole, parts=tuple(split), origin=devices, predicted=floor_of_step)


def _explain(
    model: SourcedModel | str, a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> Split | str:
    """The difference of the mean steps by the model, or the reason why it says nothing."""
    if isinstance(model, str):
        return model
    modelled = _all_or_reason(run.modelled for run in (*a, *b))
    if isinstance(modelled, str):
        return modelled
    runs = [replace(run, step_s=of.mean_step_s) for run, of in zip(modelled, (*a, *b), strict=True)]
    return split_by_model(model, runs[: len(a)], runs[len(a) :], design)


_CARRIES: Final = 0.5
"""Least share that carries the whole; factors cancel if the whole is less than this part of their sum."""
_MOST: Final = 1.2
"""A larger share of a whole is not meaningful: other parts have the opposite sign."""
_WORTH_A_WORD: Final = 0.1
"""Part of the largest below which a factor is omitted from a list."""
_SAME: Final = 0.02
"""Work that differs by a smaller fraction is the same work."""


def factor_text(estimate: RatioEstimate) -> str:
    """``x1.550 [1.54, 1.56]``; without the interval for one block, or without scatter."""
    low, high = estimate.ci_low, estimate.ci_high
    if low is None or high is None or math.isclose(low, high, rel_tol=1e-6):
        return f"x{estimate.ratio:.3f}"
    return f"x{estimate.ratio:.3f} [{low:.3f}, {high:.3f}]"


Levels: TypeAlias = Mapping[str, tuple[float, float]]
"""Values of both sides by metric, where both are known."""


def sentence(decomposition: Decomposition, levels: Levels = MappingProxyType({})) -> str:
    """The cause of the difference of the wall times, as far as the intervals show it."""
    wall = decomposition.wall
    if wall is None:
        causes = [f"a step takes {added_text(part)}"] if (part := decomposition.step) else []
        causes += [*_section(decomposition), *_by_models(decomposition)]
        return "; ".join(["the wall time is unknown, because the client's times do not count", *causes])
    total = wall.whole.estimate
    whole = f"wall time {change_of_ratio(total.ratio)}"
    if not wall.parts:
        return f"{whole}; neither steps nor tokens are known to explain it"
    if total.log_interval is None:
        blocks = count_of(total.num_blocks, "block") if total.is_paired else "too few runs"
        return f"{whole}: {blocks} cannot tell a cause from chance"
    clear = sorted((part for part in wall.parts if part.is_significant), key=lambda part: -abs(part.added_s))
    if not clear:
        return f"{whole}: no cause can be told from chance"
    text = f"{whole}: {_carried(clear, wall.whole, levels)}"
    if any(factor.name == TIME_PER_STEP for factor in clear):
        return "; ".join([text, *_section(decomposition), *_by_models(decomposition)])
    return text


def _carried(factors: Sequence[Factor], wall: Factor, levels: Levels) -> str:
    """The factors worth a word, the largest first, and whether chance could be the whole or the rest."""
    least_s = _WORTH_A_WORD * abs(factors[0].added_s)
    worth = [factor for factor in factors if abs(factor.added_s) >= least_s]
    text = " and ".join(_in_words(factor, levels) for factor in worth)
    if not wall.is_significant:
        return f"{text}; the whole cannot be told from chance"
    is_part = abs(sum(factor.added_s for factor in worth)) < _CARRIES * abs(wall.added_s)
    return f"{text}; the cause of the rest cannot be told from chance" if is_part else text


def _in_words(factor: Factor, levels: Levels) -> str:
    """A factor on both sides; where its levels are not known, its change."""
    steps, step_ms, tokens = (levels.get(METRIC_OF[name]) for name in ("steps", TIME_PER_STEP, "output tokens"))
    batch, gain = levels.get("mean_batch_size"), levels.get("tokens_per_step")
    if factor.name == "steps" and steps is not None:
        served = None if batch is None else (steps[1] * batch[1]) / (steps[0] * batch[0])
        because = ""
        if batch is not None and served is not None and abs(served - 1) < _SAME:
            because = f", because a batch holds {batch[1]:.3g} instead of {batch[0]:.3g} sequences"
        return f"{steps[0]:,.0f} to {steps[1]:,.0f} steps{because}"
    if factor.name == "steps per pass" and batch is not None:
        return f"a batch holds {batch[1]:.3g} instead of {batch[0]:.3g} sequences"
    if factor.name in {"passes", "passes per token"} and gain is not None:
        return f"a sequence gains {gain[1]:.3g} tokens in a step instead of {gain[0]:.3g}"
    if factor.name == TIME_PER_STEP and step_ms is not None:
        return f"a step takes {step_ms[1]:.3g} ms instead of {step_ms[0]:.3g} ms"
    if factor.name == "output tokens" and tokens is not None:
        return f"{tokens[0]:,.0f} to {tokens[1]:,.0f} output tokens"
    if factor.name == "remainder":
        return f"{added_text(factor)} outside of steps (queueing, network, client)"
    return f"{factor.name} {change_of_ratio(factor.estimate.ratio)}"


def _section(decomposition: Decomposition) -> Iterator[str]:
    """The section that carries most of the step's difference; those of opposite signs with their times."""
    split = decomposition.sections
    if split is None or not split.largest.is_significant:
        return
    largest, share = split.largest, split.largest.share_of(split.whole)
    if share is not None and 0 < share <= _MOST:
        yield f"{share:.0%} of the step's difference is {largest.name}"
        return
    least_s = _CARRIES * abs(largest.added_s)
    pulling = [part for part in split.parts if part.is_significant and abs(part.added_s) >= least_s]
    pulling.sort(key=lambda part: -abs(part.added_s))
    yield f"per step {', '.join(f'{part.name} {added_text(part)}' for part in pulling)}"


def _by_models(decomposition: Decomposition) -> Iterator[str]:
    """The part that a step-time model explains where that is worth a word, else what different work explains."""
    model, work = decomposition.model, decomposition.work
    share = None if isinstance(model, str) else model.explained_frac
    if isinstance(model, Split) and model.predicted and share is not None and not 0 <= share < _WORTH_A_WORD:
        predicted_s = model.predicted.added_s
        largest = max(model.parts[:-1], key=lambda part: part.added_s * predicted_s)
        carrier = f", most by {largest.name}" if largest.is_significant else ""
        if 0 <= share <= _MOST:
            yield f"a step-time model explains {share:.0%} of it by its work{carrier}"
        else:
            yield f"for its work a step-time model predicts {added_text(model.predicted)} per step"
    elif isinstance(work, Split) and work.predicted and (share := work.explained_frac) is not None:
        floor_s = work.predicted.a_s
        if floor_s and abs(work.predicted.added_s) < _SAME * floor_s:
            return
        if 1 - _MOST <= share <= 1:
            yield f"its FLOPs and bytes explain {share:.0%} of it (roofline model)"
        else:  # the floors add more than the difference
            yield f"FLOPs and bytes alone would add {added_text(work.predicted)} (roofline model)"


def source_text(model: Split) -> str:
    """Name of a step-time model, and how far its predictions have been off."""
    text = f"step-time model {model.origin}"
    if model.mape_frac is None:
        return text
    return f"{text}, {percentage(model.mape_frac, 2)} off on steps left out of its fit"


def added_text(part: Part, like: Part | None = None) -> str:
    """``+58.2 ms [+57.0, +59.4]``; without the interval for one block, or without scatter.

    In the unit that suits ``like``, if given.
    """
    unit, factor = unit_of(like or part)
    text = f"{signed_three_digits(part.added_s * factor)} {unit}"
    low, high = part.ci_low_s, part.ci_high_s
    if low is None or high is None or math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-12):
        return text
    return f"{text} [{signed_three_digits(low * factor)}, {signed_three_digits(high * factor)}]"


def unit_of(part: Part) -> tuple[str, float]:
    """The unit that suits a part, and its number per second."""
    largest = max(map(abs, part.numbers))
    return ("s", 1.0) if largest >= 1 else ("ms", float(MS_PER_S))
