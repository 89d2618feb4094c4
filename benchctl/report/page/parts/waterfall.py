"""The waterfall: from what the baseline takes to what the other side takes, step by step, adding up exactly.

Three kinds: the steps of a ladder of controls, the factors of the wall time, and the sections of a step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.text import factor_text, sentence, wall_line
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.ladder import Ladder
from benchctl.formats import capitalized, minus, minus_in_numbers, page_number, signed_page_number
from benchctl.report.page.html import Html, el
from benchctl.report.page.parts.terms import with_term
from benchctl.units import MS_PER_S

_ROW_PX: Final = 24
_BAR_PX: Final = 14
_WORTH_A_BAR_FRAC: Final = 0.01
"""Sections that add less than this share of the largest are shown together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One step: what it adds to the one before, in the unit of the waterfall."""

    label: str
    added: float
    meaning: str
    half_width: float | None = None
    """Half of the 95 % interval of ``added``, where it is known."""
    is_told: bool = True
    """It can be told from nothing."""


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
    found = cell.decomposition
    if found is None or found.wall is None or not found.wall.factors:
        return None
    wall, said = found.wall, sentence(found)
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
                is_told=factor.is_told,
                meaning=f"{factor.meaning}; it changes by {factor_text(factor.estimate)}. Its share of the seconds "
                "is its share of the logarithm of the ratio",
            )
            for factor in wall.factors
        ),
        end_label=cell.b_label,
        end=wall.b_s,
        sentence=f"{capitalized(said)}. {wall_line(found)}.",
    )


def from_sections(cell: CellComparison) -> Waterfall | None:
    """The mean step by its sections, the smallest as one bar; None where no section is known."""
    split = None if cell.decomposition is None else cell.decomposition.sections
    if split is None or split.whole.a_s is None or len(split.sections) < 2:
        return None
    worth = _WORTH_A_BAR_FRAC * max(abs(section.added_s) for section in split.sections)
    falls = [_section(section) for section in split.sections if abs(section.added_s) >= worth]
    small = [section for section in split.sections if abs(section.added_s) < worth]
    if small:
        names = ", ".join(section.name for section in small)
        added = sum(section.added_s for section in small) * MS_PER_S
        falls.append(Fall(label="all others", added=added, meaning=f"together: {names}", is_told=False))
    return Waterfall(
        title=f"{cell.label}: mean step",
        unit="ms",
        start_label=cell.a_label,
        start=split.whole.a_s * MS_PER_S,
        falls=tuple(falls),
        end_label=cell.b_label,
        end=(split.whole.a_s + split.whole.added_s) * MS_PER_S,
        sentence=f"Sections of a step: {split.clock_note}.",
    )


def _section(section: Contribution) -> Fall:
    low, high = section.ci_low_s, section.ci_high_s
    return Fall(
        label=section.name,
        added=section.added_s * MS_PER_S,
        half_width=None if low is None or high is None else (high - low) / 2 * MS_PER_S,
        meaning=f"time per step in {section.name}: mean over blocks of b - a, with its 95% interval",
        is_told=section.is_told,
    )


def from_ladder(ladder: Ladder, start: float | None, quantity: str, unit: str) -> Waterfall | None:
    """The prices of a ladder on top of ``start``, the mean of its lowest step; None where they are unknown."""
    whole = ladder.whole.differences.get(quantity)
    priced = [(price, price.differences.get(quantity)) for price in ladder.prices]
    if whole is None or start is None or any(found is None for _, found in priced):
        return None
    falls = tuple(
        Fall(
            label=price.what,
            added=found.mean,
            half_width=found.half_width,
            is_told=found.half_width is not None and abs(found.mean) > found.half_width,
            meaning=f"mean over {found.num_blocks} blocks: {quantity} of {price.upper} minus that of {price.lower}",
        )
        for price, found in priced
        if found is not None
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


def drawn(waterfall: Waterfall) -> Html:
    """The waterfall as rows of bars; its sentence below."""
    low, high = _span(waterfall)
    rows = [_total(waterfall.start_label, waterfall.start, waterfall.unit, low, high)]
    level = waterfall.start
    for fall in waterfall.falls:
        rows.append(_step(fall, level, waterfall, low, high))
        level += fall.added
    rows.append(_total(waterfall.end_label, waterfall.end, waterfall.unit, low, high))
    return el(
        "figure",
        el("h4", waterfall.title),
        el("div", *rows, class_="falls"),
        el("figcaption", minus_in_numbers(waterfall.sentence)),
        class_="waterfall",
    )


def _span(waterfall: Waterfall) -> tuple[float, float]:
    """From zero to the highest level, with room for intervals."""
    levels = list(_levels(waterfall))
    return min(0.0, *levels), max(levels) * 1.02 or 1.0


def _levels(waterfall: Waterfall) -> Iterator[float]:
    level = waterfall.start
    yield level
    for fall in waterfall.falls:
        level += fall.added
        yield level
        if fall.half_width is not None:
            yield from (level - fall.half_width, level + fall.half_width)
    yield waterfall.end


def _total(label: str, value: float, unit: str, low: float, high: float) -> Html:
    left, width = _at(0, low, high), _at(value, low, high)
    bar = el("rect", x=_percent(left), width=_percent(width - left), y=_top(), height=_BAR_PX, class_="total")
    return _row(label, [bar], el("b", f"{page_number(value)} {unit}"), class_="fall-row is-total")


def _step(fall: Fall, level: float, waterfall: Waterfall, low: float, high: float) -> Html:
    after = level + fall.added
    first, last = sorted((_at(level, low, high), _at(after, low, high)))
    kind = f"{'more' if fall.added > 0 else 'less'}{'' if fall.is_told else ' is-untold'}"
    middle = _ROW_PX / 2
    parts = [
        el(
            "rect",
            x=_percent(first),
            width=_percent(max(last - first, 0.002)),
            y=_top(),
            height=_BAR_PX,
            class_=kind,
        )
    ]
    if fall.half_width is not None:
        ends = (_percent(_at(after + sign * fall.half_width, low, high)) for sign in (-1, 1))
        parts.append(el("line", x1=next(ends), x2=next(ends), y1=middle, y2=middle, class_="interval"))
    return _row(fall.label, parts, with_term(_said(fall, waterfall.unit), fall.meaning), class_="fall-row")


def _said(fall: Fall, unit: str) -> str:
    """``+57.6 ± 1.7 ms``: as many decimals as the interval has to say; without one, four digits."""
    if not fall.half_width:
        return f"{signed_page_number(fall.added)} {unit}"
    decimals = max(0, 1 - math.floor(math.log10(fall.half_width)))
    return minus(f"{fall.added:+.{decimals}f} ± {fall.half_width:.{decimals}f} {unit}")


def _row(label: str, parts: Sequence[Html], value: Html, *, class_: str) -> Html:
    strip = el("svg", *parts, class_="strip", width="100%", height=_ROW_PX, aria_hidden="true")
    return el("div", el("span", label), strip, el("span", value, class_="num"), class_=class_)


def _at(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _percent(place: float) -> str:
    return f"{place * 100:.3f}%"


def _top() -> float:
    return (_ROW_PX - _BAR_PX) / 2
