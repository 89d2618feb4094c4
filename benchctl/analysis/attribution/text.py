"""A decomposition in words: the factors that carry the difference, as far as they are significant."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from benchctl.analysis.attribution.decomposition import TIME_PER_STEP, Decomposition
from benchctl.analysis.attribution.estimate import Factor, Part, Split
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.units import MS_PER_S, change_of_ratio, percentage, signed_three_digits

_CARRIES: Final = 0.5
"""Least share that carries the whole; factors cancel if the whole is less than this part of their sum."""
_MOST: Final = 1.2
"""A larger share of a whole is not meaningful: other parts have the opposite sign."""
_WORTH_A_WORD: Final = 0.1
"""Part of the largest below which a factor is omitted from a list."""

_NO_WALL: Final = "the wall time is unknown, because the client's times do not count"


def factor_text(estimate: RatioEstimate) -> str:
    """``x1.550 [1.54, 1.56]``; without the interval for one block, or without scatter."""
    low, high = estimate.ci_low, estimate.ci_high
    if low is None or high is None or math.isclose(low, high, rel_tol=1e-6):
        return f"x{estimate.ratio:.3f}"
    return f"x{estimate.ratio:.3f} [{low:.3f}, {high:.3f}]"


def wall_line(decomposition: Decomposition) -> str:
    """``wall x1.550 [..] = steps x1.000 * time per step x1.550 [..] * remainder x1.000``."""
    wall = decomposition.wall
    if wall is None:
        return _NO_WALL
    factors = " * ".join(f"{factor.name} {factor_text(factor.estimate)}" for factor in wall.parts)
    return f"wall {factor_text(wall.whole.estimate)}{' = ' if factors else ''}{factors}"


def sentence(decomposition: Decomposition) -> str:
    """The factor that carries the difference, as far as the intervals show it."""
    wall = decomposition.wall
    if wall is None:
        step = [f"a step takes {added_text(part)}"] if (part := decomposition.step) else []
        return "; ".join([_NO_WALL, *step, *_section(decomposition), *_by_models(decomposition)])
    total = wall.whole.estimate
    whole = change_of_ratio(total.ratio)
    if not wall.parts:
        return f"the wall time changes by {whole}; neither steps nor tokens are known to explain it"
    if total.log_interval is None:
        blocks = "in one block" if total.is_paired else "over too few runs for an interval"
        return f"the wall time changes by {whole} {blocks}, which tells no factor from 1"
    clear = sorted((part for part in wall.parts if part.is_significant), key=lambda part: -abs(part.added_s))
    if not clear:
        return f"no factor can be told from 1 ({whole} in all)"
    text = _carried(clear, wall.whole, whole)
    if any(factor.name == TIME_PER_STEP for factor in clear):
        return "; ".join([": ".join([text, *_section(decomposition)]), *_by_models(decomposition)])
    return text


def _carried(factors: Sequence[Factor], wall: Factor, whole: str) -> str:
    """One factor that carries the whole, several that add up to it, or a part that is not significant."""
    (name, share), *others = [(factor.name, factor.share_of(wall)) for factor in factors]
    sizes = [abs(factor.added_s) for factor in factors]
    worth = [factor for factor, size in zip(factors, sizes, strict=True) if size >= _WORTH_A_WORD * sizes[0]]
    listed = " and ".join(f"{factor.name} {change_of_ratio(factor.estimate.ratio)}" for factor in worth)
    cancels = abs(wall.added_s) < _CARRIES * sum(sizes)
    if others and (cancels or (share is not None and not 0 < share <= _MOST)):
        return f"{listed} make {whole}{', which cannot be told from 0' if share is None else ''}"
    if share is None:
        return f"{listed} can be told from 1, {whole} in all cannot"
    if share < _CARRIES:
        return f"{listed} can be told from 1; what carries the rest of the {whole} cannot"
    parts = [f", {other} {_percent(part)}" for other, part in others if part and abs(part) >= _WORTH_A_WORD]
    return f"{name} carries {_percent(share)} of the {whole}{''.join(parts)}"


def _section(decomposition: Decomposition) -> Iterator[str]:
    """The section that carries most of the step's difference; those of opposite signs with their times."""
    split = decomposition.sections
    if split is None or not split.largest.is_significant:
        return
    largest, share = split.largest, split.largest.share_of(split.whole)
    if share is not None and 0 < share <= _MOST:
        factors = () if decomposition.wall is None else decomposition.wall.parts
        whole = "it" if sum(factor.is_significant for factor in factors) == 1 else "the step's difference"
        yield f"{_percent(share)} of {whole} {largest.name}"
        return
    least_s = _CARRIES * abs(largest.added_s)
    pulling = [part for part in split.parts if part.is_significant and abs(part.added_s) >= least_s]
    pulling.sort(key=lambda part: -abs(part.added_s))
    yield f"per step {', '.join(f'{part.name} {added_text(part)}' for part in pulling)}"


def _by_models(decomposition: Decomposition) -> Iterator[str]:
    """The part that a step-time model explains where that is worth a word, else the roofline's."""
    model, work = decomposition.model, decomposition.work
    share = None if isinstance(model, str) else model.explained_frac
    if isinstance(model, Split) and model.predicted and share is not None and not 0 <= share < _WORTH_A_WORD:
        predicted_s = model.predicted.added_s
        largest = max(model.parts[:-1], key=lambda part: part.added_s * predicted_s)
        carrier = f", most by {largest.name}" if largest.is_significant else ""
        if 0 <= share <= _MOST:
            part = _percent(share)
            yield f"a step-time model explains {part} of the step's difference by its work{carrier}"
        else:
            yield f"for its work a step-time model predicts {added_text(model.predicted)} per step"
    elif isinstance(work, Split) and work.predicted and (share := work.explained_frac) is not None:
        if 1 - _MOST <= share <= 1:
            part = _percent(share)
            yield f"the roofline floor of its FLOPs and bytes explains {part} of the step's difference"
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


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
