"""Values for the SVG of the page: the waterfall that adds up exactly, the forest plot, and rows of charts as
columns.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.attribution.decomposition import MEANING
from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.text import factor_text, floor_line, sentence, source_text, wall_line
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import change_text, speed_line
from benchctl.analysis.experiment.ladder import Ladder
from benchctl.analysis.statistics.intervals import Interval
from benchctl.formats import capitalized, minus, page_number, signed_page_number
from benchctl.report.charts.forest import BETTER, LogScale, forest_of
from benchctl.report.page.words import change_term, metric_term, svg_length
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
                meaning=f"{MEANING[factor.name]}; it changes by {factor_text(factor.estimate)}. Its share of the "
                "seconds is its share of the logarithm of the ratio",
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
    if split is None or split.whole.a_s is None or len(split.parts) < 2:
        return None
    lines = (f"sections of a step: {split.origin}", cell.decomposition and floor_line(cell.decomposition))
    return Waterfall(
        title=f"{cell.label}: mean step",
        unit="ms",
        start_label=cell.a_label,
        start=split.whole.a_s * MS_PER_S,
        falls=_parts_of_step(split.parts, "time per step in"),
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
        falls=_parts_of_step(split.shown_parts, "time per step by"),
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


MOST_LABEL_CH: Final = 26
"""Characters of the names of cells that have room beside the plot; longer ones are broken."""


def forest_values(comparison: Comparison) -> dict[str, Any] | None:
    """The plot of one comparison; None where no deciding metric has a ratio."""
    plot = forest_of(comparison)
    if plot is None:
        return None
    groups = [
        {
            "name": name,
            "meaning": metric_term(rows[0][1].metric),
            "words": f"{rows[0][1].metric.unit}, {BETTER[rows[0][1].metric.direction]}",
            "rows": [_forest_row(label, metric, plot.scale) for label, metric in rows],
        }
        for name, rows in plot.groups.items()
    ]
    return {
        "groups": groups,
        "ticks": _ticks(plot.scale),
        "no_change": svg_length(plot.scale.at(0)),
        "bands": plot.bands,
        "label_ch": min(MOST_LABEL_CH, max(len(label) for rows in plot.groups.values() for label, _ in rows)),
    }


def _ticks(scale: LogScale) -> list[dict[str, str]]:
    ticks = [(scale.at(log_ratio), label) for log_ratio, label in scale.ticks()]
    return [
        {"x": svg_length(at), "anchor": "start" if at < 0.04 else "end" if at > 0.96 else "middle", "label": label}
        for at, label in ticks
    ]


def _forest_row(label: str, metric: MetricComparison, scale: LogScale) -> dict[str, Any]:
    estimate, change = metric.estimate, change_text(metric)
    margins = [(scale.at(-margin), scale.at(margin)) for margin in metric.margins.log_bands]
    return {
        "label": label,
        "verdict": metric.verdict,
        "change": change,
        "meaning": change_term(metric),
        "spoken": f"{metric.metric.name} in {label}: {change}, {metric.verdict}",
        "bands": [{"x": svg_length(low), "width": svg_length(high - low)} for low, high in margins],
        "interval": _ends_of(None if estimate is None else estimate.log_interval, scale),
        "ratio": None if estimate is None else svg_length(scale.at(estimate.log_ratio)),
    }


def _ends_of(log_interval: Interval | None, scale: LogScale) -> dict[str, Any] | None:
    """Both ends, with an arrow where the scale does not hold one."""
    if log_interval is None:
        return None
    low, high = log_interval
    ends = [
        {"x": svg_length(scale.at(end)), "is_cut": not scale.holds(end), "turn": turn}
        for end, turn in ((low, 180), (high, 0))
    ]
    return {"low": ends[0]["x"], "high": ends[1]["x"], "ends": ends}


_CODES: Final = (("u1", 2**8), ("u2", 2**16), ("i4", 2**31))


def packed(datasets: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Every data set by its columns."""
    result = {}
    for name, rows in datasets.items():
        columns = dict.fromkeys(column for row in rows for column in row)
        result[name] = {column: _column([row.get(column) for row in rows]) for column in columns}
    return result


def unpacked(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows again."""
    lists = {name: _values(column) for name, column in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _column(values: Sequence[Any]) -> dict[str, Any]:
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        if all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
            return _array(np.array(values), max(values, default=0))
        return _array(np.array([np.nan if value is None else value for value in values], dtype=np.float32), None)
    distinct = list({(type(value), value): value for value in values}.values())
    numbers = {(type(value), value): i for i, value in enumerate(distinct)}
    codes = np.array([numbers[type(value), value] for value in values])
    return {"values": distinct, **_array(codes, len(distinct))}


def _array(array: NDArray[Any], most: int | None) -> dict[str, str]:
    dtype = "f4" if most is None else next(code for code, end in _CODES if most < end)
    return {"dtype": dtype, "bdata": base64.b64encode(array.astype(f"<{dtype}").tobytes()).decode()}


def _values(column: Mapping[str, Any]) -> list[Any]:
    numbers = np.frombuffer(base64.b64decode(column["bdata"]), dtype=f"<{column['dtype']}").tolist()
    if "values" in column:
        return [column["values"][code] for code in numbers]
    return [None if number != number else number for number in numbers]  # noqa: PLR0124 - NaN
