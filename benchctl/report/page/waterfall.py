"""The waterfall: from what the baseline takes to what the other side takes, step by step, adding up exactly.

The steps are those of a ladder of controls where one was measured; else the three factors of the wall time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.comparison import CellComparison
from benchctl.analysis.comparison_text import split_sentence
from benchctl.analysis.ladder import Ladder
from benchctl.report.page.html import Html, el
from benchctl.report.page.terms import with_term
from benchctl.report.page.words import minus, number

_ROW_PX: Final = 24
_BAR_PX: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One step: what it adds to the one before, in the unit of the waterfall."""

    label: str
    added: float
    meaning: str
    half_width: float | None = None
    """Half of the 95 % interval of ``added``, where it is known."""


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


def from_split(cell: CellComparison) -> Waterfall | None:
    """The wall time as steps x time per step x remainder; None where one of them is unknown.

    Factors multiply; to add them up, each takes its share of the logarithm: (b - a) * ln(factor) / ln(b / a),
    which is exact and does not depend on their order.
    """
    split = cell.wall_split
    wall = next((metric for metric in cell.metrics if metric.metric.name == "wall_s"), None)
    if split is None or wall is None or not wall.a or not wall.b:
        return None
    per_log = (wall.b - wall.a) / math.log(wall.b / wall.a) if wall.a != wall.b else wall.a
    names = {"num_steps": "number of steps", "step_ms": "time per step", "remainder": "time outside steps"}
    return Waterfall(
        title=cell.label,
        unit="s",
        start_label=cell.a_label,
        start=wall.a,
        falls=tuple(
            Fall(
                label=label,
                added=per_log * math.log(split[name]),
                meaning=f"{name} changes by a factor of {split[name]:.4g}; its share of the logarithm of the wall "
                "time's ratio, in seconds",
            )
            for name, label in names.items()
        ),
        end_label=cell.b_label,
        end=wall.b,
        sentence=split_sentence(cell) or "",
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
        sentence=f"The largest part is {largest.label}: {_signed(largest.added)} {unit}{share}.",
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
        el("figcaption", minus(waterfall.sentence)),
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
    return _row(label, [bar], el("b", f"{number(value)} {unit}"), class_="fall-row is-total")


def _step(fall: Fall, level: float, waterfall: Waterfall, low: float, high: float) -> Html:
    after = level + fall.added
    first, last = sorted((_at(level, low, high), _at(after, low, high)))
    kind = "more" if fall.added > 0 else "less"
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
    said = f"{_signed(fall.added)} {waterfall.unit}"
    if fall.half_width is not None:
        said += f" ± {fall.half_width:.2g}"
    return _row(fall.label, parts, with_term(said, fall.meaning), class_="fall-row")


def _row(label: str, parts: Sequence[Html], value: Html, *, class_: str) -> Html:
    strip = el("svg", *parts, class_="strip", width="100%", height=_ROW_PX, aria_hidden="true")
    return el("div", el("span", label), strip, el("span", value, class_="num"), class_=class_)


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else minus('-0').removesuffix('0')}{number(abs(value))}"


def _at(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _percent(place: float) -> str:
    return f"{place * 100:.3f}%"


def _top() -> float:
    return (_ROW_PX - _BAR_PX) / 2
