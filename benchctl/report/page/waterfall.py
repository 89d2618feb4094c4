"""The waterfall: from the time of the baseline to that of the other side, step by step, adding up exactly.

Four kinds: the steps of a ladder of controls, the factors of the wall time, the sections of a step, and the work of
a step by a step-time model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.text import factor_text, floor_line, sentence, source_text, wall_line
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.compare.words import speed_line
from benchctl.analysis.experiment.ladder import Ladder
from benchctl.formats import capitalized, minus, page_number, signed_page_number
from benchctl.report.page.words import svg_length
from benchctl.units import MS_PER_S

_THINNEST_BAR: Final = 0.002
_ROUNDING: Final = 1e-9
"""Share of the whole below which a part is what rounding left."""
_NO_WIDTH: Final = 1e-6
"""An interval narrower than this share of its ends is rounding."""
_WORTH_A_BAR_FRAC: Final = 0.01
"""Parts that add less than this share of the largest are shown together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One step: what it adds to the one before, in the unit of the waterfall."""

    label: str
    added: float
    meaning: str
    half_width: float | None = None
    """Half of the 95 % interval of ``added``, where it is known."""
    is_clear: bool = True
    """It is told apart from zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Invariant: ``start`` and all that ``falls`` add make ``end``."""

    title: str
    unit: str
    start_label: str
    start: float
    falls: tuple[Fall, ...]
    end_label: str
    end: float
    sentence: str


def from_decomposition(cell: CellComparison) -> Waterfall | None:
    """The wall time by its factors, each with what it adds; None where they are unknown."""
    decomposition = cell.decomposition
    if decomposition is None or decomposition.wall is None or not decomposition.wall.factors:
        return None
    wall = decomposition.wall
    lines = (sentence(decomposition), wall_line(decomposition), speed_line(cell))
    return Waterfall(
        title=f"{cell.label}: wall time",
        unit="s",
        start_label=cell.a_label,
        start=wall.a_s,
        falls=tuple(
            Fall(
                label=factor.name,
                added=factor.added_s,
                half_width=factor.added_half_s,
                is_clear=factor.is_significant,
                meaning=f"{factor.meaning}; it changes by {factor_text(factor.estimate)}. Its share of the seconds "
                "is its share of the logarithm of the ratio",
            )
            for factor in wall.factors
        ),
        end_label=cell.b_label,
        end=wall.b_s,
        sentence=f"{capitalized('. '.join(filter(None, lines)))}.",
    )


def from_sections(cell: CellComparison) -> Waterfall | None:
    """The mean step by its sections, the smallest as one bar; None where no section is known."""
    split = None if cell.decomposition is None else cell.decomposition.sections
    if split is None or split.whole.a_s is None or len(split.sections) < 2:
        return None
    lines = (f"sections of a step: {split.clock_note}", cell.decomposition and floor_line(cell.decomposition))
    return Waterfall(
        title=f"{cell.label}: mean step",
        unit="ms",
        start_label=cell.a_label,
        start=split.whole.a_s * MS_PER_S,
        falls=_parts_of_step(split.sections, "time per step in"),
        end_label=cell.b_label,
        end=(split.whole.a_s + split.whole.added_s) * MS_PER_S,
        sentence=f"{'. '.join(capitalized(line) for line in lines if line)}.",
    )


def from_model(cell: CellComparison) -> Waterfall | None:
    """The mean step by what a step-time model says about its work, and the rest; None without a model."""
    split = None if cell.decomposition is None else cell.decomposition.model
    if split is None or isinstance(split, str) or split.whole.a_s is None:
        return None
    return Waterfall(
        title=f"{cell.label}: mean step by its work",
        unit="ms",
        start_label=cell.a_label,
        start=split.whole.a_s * MS_PER_S,
        falls=_parts_of_step((*split.shown_factors, split.rest), "time per step by"),
        end_label=cell.b_label,
        end=(split.whole.a_s + split.whole.added_s) * MS_PER_S,
        sentence=f"By the {source_text(split.source)}.",
    )


def _parts_of_step(parts: Sequence[Contribution], what: str) -> tuple[Fall, ...]:
    """A fall for each part of the mean step, the smallest as one."""
    worth = _WORTH_A_BAR_FRAC * max(abs(part.added_s) for part in parts)
    falls = [_part(part, what) for part in parts if abs(part.added_s) >= worth]
    if small := [part for part in parts if abs(part.added_s) < worth]:
        names = ", ".join(part.name for part in small)
        added = sum(part.added_s for part in small) * MS_PER_S
        falls.append(Fall(label="all others", added=added, meaning=f"together: {names}", is_clear=False))
    return tuple(falls)


def _part(part: Contribution, what: str) -> Fall:
    low, high = part.ci_low_s, part.ci_high_s
    has_width = low is not None and high is not None and not math.isclose(low, high, rel_tol=_NO_WIDTH)
    return Fall(
        label=part.name,
        added=part.added_s * MS_PER_S,
        half_width=(high - low) / 2 * MS_PER_S if has_width and low is not None and high is not None else None,
        meaning=f"{what} {part.name}: mean over blocks of b - a, with its 95% interval",
        is_clear=part.is_significant,
    )


def from_ladder(ladder: Ladder, start: float | None, quantity: str, unit: str) -> Waterfall | None:
    """The prices of a ladder on top of ``start``, the mean of its lowest step; None where they are unknown."""
    whole = ladder.whole.differences.get(quantity)
    priced = [(price, price.differences.get(quantity)) for price in ladder.prices]
    if whole is None or start is None or any(difference is None for _, difference in priced):
        return None
    falls = tuple(
        Fall(
            label=price.what,
            added=difference.mean,
            half_width=difference.half_width,
            is_clear=difference.half_width is not None and abs(difference.mean) > difference.half_width,
            meaning=f"mean over {difference.num_blocks} blocks: {quantity} of {price.upper} minus that of "
            f"{price.lower}",
        )
        for price, difference in priced
        if difference is not None
    )
    largest = max(falls, key=lambda fall: abs(fall.added))
    share = f", {largest.added / whole.mean:.0%} of the difference" if whole.mean else ""
    return Waterfall(
        title=ladder.label,
        unit=unit,
        start_label=ladder.whole.lower,
        start=start,
        falls=falls,
        end_label=ladder.whole.upper,
        end=start + whole.mean,
        sentence=f"The largest part is {largest.label}: {signed_page_number(largest.added)} {unit}{share}.",
    )


def waterfall_values(waterfall: Waterfall) -> dict[str, Any]:
    """The bars of a waterfall from top to bottom, with positions as SVG lengths."""
    scale = _scale(waterfall)
    rows = [_total(waterfall.start_label, waterfall.start, waterfall.unit, scale)]
    level = waterfall.start
    for fall in waterfall.falls:
        rows.append(_step(fall, level, waterfall.unit, scale))
        level += fall.added
    rows.append(_total(waterfall.end_label, waterfall.end, waterfall.unit, scale))
    return {"title": waterfall.title, "rows": rows, "sentence": waterfall.sentence}


def _scale(waterfall: Waterfall) -> Callable[[float], float]:
    """Share of the width of a level: from zero to the highest level, with room for intervals."""
    levels = list(_levels(waterfall))
    low, high = min(0.0, *levels), max(levels) * 1.02 or 1.0
    return lambda value: min(1.0, max(0.0, (value - low) / (high - low)))


def _levels(waterfall: Waterfall) -> Iterator[float]:
    level = waterfall.start
    yield level
    for fall in waterfall.falls:
        level += fall.added
        yield level
        if fall.half_width is not None:
            yield from (level - fall.half_width, level + fall.half_width)
    yield waterfall.end


def _total(label: str, value: float, unit: str, scale: Callable[[float], float]) -> dict[str, Any]:
    return {
        "label": label,
        "is_total": True,
        "text": f"{page_number(value)} {unit}",
        "x": svg_length(scale(0)),
        "width": svg_length(scale(value) - scale(0)),
        "class": "total",
        "interval": None,
    }


def _step(fall: Fall, level: float, unit: str, scale: Callable[[float], float]) -> dict[str, Any]:
    after, half = level + fall.added, fall.half_width
    first, last = sorted((scale(level), scale(after)))
    return {
        "label": fall.label,
        "is_total": False,
        "text": _amount(fall, unit) if abs(fall.added) > _ROUNDING * abs(level) else f"+0 {unit}",
        "meaning": fall.meaning,
        "x": svg_length(first),
        "width": svg_length(max(last - first, _THINNEST_BAR)),
        "class": f"{'more' if fall.added > 0 else 'less'}{'' if fall.is_clear else ' is-untold'}",
        "interval": None if half is None else [svg_length(scale(after + sign * half)) for sign in (-1, 1)],
    }


def _amount(fall: Fall, unit: str) -> str:
    """``+57.6 ± 1.7 ms`` with the decimals that the interval supports; without one, four digits."""
    if not fall.half_width:
        return f"{signed_page_number(fall.added)} {unit}"
    decimals = max(0, 1 - math.floor(math.log10(fall.half_width)))
    return minus(f"{fall.added:+.{decimals}f} ± {fall.half_width:.{decimals}f} {unit}")
