"""The plots of a comparison: the forest plot, and waterfalls that add up exactly."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.decomposition import MEANING, factor_text, source_text
from benchctl.analysis.attribution.estimate import Part
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import change_text, speed_line
from benchctl.report.charts import figure
from benchctl.report.charts.figure import BLUE, GREEN, GREY, VERMILION, Row, Spec, layer
from benchctl.units import (
    MS_PER_S,
    capitalized,
    first_of,
    four_digits,
    minus,
    percentage,
    shortened,
    shortened_inside,
    signed_four_digits,
)

BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "none": "neither is better"}
_MARKS: Final = {
    "regression": (VERMILION, "triangle-up"),
    "improvement": (GREEN, "circle"),
    "equivalent": (BLUE, "square"),
}
"""Colour and shape: shapes tell verdicts apart where colours do not."""
_WORDS_PX: Final = 325
"""Room for change and verdict at the right of the intervals."""


def draw_forest(*comparisons: Comparison, chart_id: str = "forest", file: str = "") -> figure.Chart:
    """The forest plot of comparisons with one side: one row for each deciding metric in each cell, under the name
    of its metric.
    """
    groups: dict[str, list[tuple[str, MetricComparison]]] = {}
    for comparison in comparisons:
        for cell in comparison.cells:
            for metric in cell.deciding:
                label = cell.label if len(comparisons) == 1 else cell.b_label
                groups.setdefault(metric.metric.name, []).append((label, metric))
    metrics = [each for group in groups.values() for _, each in group]
    estimates = [each.estimate for each in metrics if each.estimate is not None]
    margin = max((each.margins.log_bands[0] for each in metrics if each.estimate is not None), default=0.0)
    ends = [end for estimate in estimates for end in estimate.log_interval or ()]
    ratios = [0.0, -margin, margin, *(estimate.log_ratio for estimate in estimates)]
    low, high = map(math.exp, figure.reach(ratios, ends, least=math.log(1.02)))
    rows: list[Row] = []
    bands: list[Row] = []
    for name, group in groups.items():
        of = group[0][1].metric
        rows.append({"y": len(rows), "label": f"{name} [{of.unit}], {BETTER[of.direction]}", "weight": "bold"})
        for label, each in group:
            bands += [{"y": len(rows), "low": math.exp(-b), "high": math.exp(b)} for b in each.margins.log_bands]
            rows.append(
                {"y": len(rows), "label": figure.wrapped(shortened_inside(label, 60)), **_row(each, low, high)}
            )
    others = first_of([shortened(each.b_name, 30) for each in comparisons], 4)
    names = f"{others} against {shortened(comparisons[0].a_name, 30)}"
    shaded = (
        "the margins of equivalence and of a change"
        if any(len(each.margins.log_bands) > 1 for each in metrics)
        else "the margin"
    )
    return figure.Chart(
        id=chart_id,
        file=file,
        is_simulated=any(each.is_simulated for each in comparisons),
        title=names,
        caption=(
            f"Change of {names}, with its {percentage(comparisons[0].rules.confidence)} interval, on a logarithmic "
            f"scale; shaded: {shaded}."
        ),
        spec=_forest_spec(rows, bands, low, high),
    )


def forest_plot(comparison: Comparison, suffix: str = ".png") -> bytes:
    """The picture of the forest plot as the content of a file."""
    chart = draw_forest(comparison)
    return figure.chart_bytes(replace(chart, title=f"{comparison.verdict}: {chart.title}"), suffix)


def _forest_spec(rows: Sequence[Row], bands: Sequence[Row], low: float, high: float) -> Spec:
    lines = [line for row in rows if "words" in row for line in row["label"].split("\n")]
    left = 14 + 7 * min(figure.LINE_CHARACTERS, max(map(len, lines), default=0))
    row_px = 14 + 12 * max((1 + row["label"].count("\n") for row in rows), default=1)
    at: Spec = {"y_by": "y"}
    own: Spec = {**at, "color_by": {"field": "color", "type": "nominal", "scale": None}}
    shaded: Spec = {"data": {"name": "bands"}, "color_by": {"value": GREY}, "opacity": 0.17, "size": row_px - 1}
    upright: Spec = {"y_by": {"value": 0}, "y2_by": {"value": "height"}, "color_by": {"value": GREY}}
    shape: Spec = {"shape_by": {"field": "shape", "type": "nominal", "scale": None}, "size": 80}
    name: Spec = {"text_by": "label", "align": "left", "x_by": {"value": -left}, "fontSize": 12.5, **at}
    words: Spec = {
        "align": "left",
        "x_by": {"value": "width"},
        "fontSize": 12.5,
        "where": "isValid(datum.words)",
        **at,
    }
    layers = [
        layer("bar", x_by="low", x2_by="high", **shaded, **at),
        layer("rule", data={"values": [{"ratio": 1}]}, strokeWidth=1, strokeDash=[2, 3], **upright),
        layer("rule", x_by="low", x2_by="high", where="isValid(datum.low)", strokeWidth=2, **own),
        *(
            layer("point", x_by=end, where=f"datum.{end}_is_cut", shape=f"triangle-{side}", size=40, **own)
            for end, side in (("low", "left"), ("high", "right"))
        ),
        layer("point", x_by="ratio", where="isValid(datum.ratio)", **shape, **own),
        layer("text", text_by="words", dx=20, **words),
        layer("text", text_by="verdict", dx=240, fontWeight=600, **words),
        layer("text", where="datum.weight === 'bold'", fontWeight="bold", limit=600, **name),
        layer("text", where="datum.weight !== 'bold'", lineBreak="\n", baseline="middle", limit=left, **name),
    ]
    change = "datum.value == 1 ? '0' : format(datum.value - 1, '+.3~%')"
    marks: Spec = (
        {"values": figure.ticks_of_decades(low, high)} if figure.is_wide([low, high]) else {"tickCount": 4}
    )
    x = figure.axis(None, "ratio", labelExpr=change, labelOverlap="greedy", labelSeparation=4, **marks)
    x["scale"] = {"type": "log", "domain": [low, high], "nice": False}
    y = figure.axis(None, domain=(len(rows) - 0.5, -0.5), labels=False, ticks=False, grid=False)
    panel = figure.panel(row_px * max(len(rows), 2), y, layers)
    return figure.picture([panel], rows, x, left=left, right=_WORDS_PX, bands=bands)


def _row(metric: MetricComparison, low: float, high: float) -> Row:
    """Interval and ratio, and change and verdict to the right; an end beyond ``low`` or ``high`` is cut."""
    estimate = metric.estimate
    color, shape = _MARKS.get(metric.verdict, (GREY, "diamond"))
    row: dict[str, Any] = {
        "words": minus(change_text(metric)),
        "verdict": metric.verdict,
        "color": color,
        "shape": shape,
        "ratio": None if estimate is None else estimate.ratio,
    }
    for name in ("low", "high"):
        if estimate is not None and (end := getattr(estimate, f"ci_{name}")) is not None:
            row |= {name: min(max(end, low), high), f"{name}_is_cut": not low <= end <= high}
    return row


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
    """Invariant: ``start`` and all that ``falls`` add make ``end``; ``sides`` are the names of both."""

    title: str
    unit: str
    sides: tuple[str, str]
    start: float
    falls: Sequence[Fall]
    end: float
    sentence: str


def cell_waterfalls(cell: CellComparison) -> Iterator[Waterfall]:
    """The wall time by its factors, then the mean step by its sections and by what a step-time model says about its
    work; each where it is known.
    """
    decomposition = cell.decomposition
    if decomposition is None:
        return
    wall, split, model = decomposition.wall, decomposition.sections, decomposition.model
    if wall is not None and wall.parts:
        lines = (cell.cause, speed_line(cell))
        share = "Its share of the seconds is its share of the logarithm of the ratio"
        yield Waterfall(
            title=f"{cell.label}: wall time",
            unit="s",
            sides=(cell.a_label, cell.b_label),
            start=wall.whole.a_s or 0.0,
            falls=[
                Fall(
                    label=factor.name,
                    added=factor.added_s,
                    half_width=_half_width_s(factor),
                    is_clear=factor.is_significant,
                    meaning=f"{MEANING[factor.name]}; it changes by {factor_text(factor.estimate)}. {share}",
                )
                for factor in wall.parts
            ],
            end=wall.whole.b_s or 0.0,
            sentence=f"{capitalized('. '.join(filter(None, lines)))}.",
        )
    if split is not None and split.whole.a_s is not None and len(split.parts) > 1:
        yield _of_step(cell, "mean step", (split.whole, split.parts), "in", f"Sections of a step: {split.origin}.")
    if not isinstance(model, str) and model.whole.a_s is not None:
        words = f"By the {source_text(model)}."
        yield _of_step(cell, "mean step by its work", (model.whole, model.shown_parts), "by", words)


def _of_step(
    cell: CellComparison, title: str, split: tuple[Part, Sequence[Part]], how: str, words: str
) -> Waterfall:
    """A fall for each part of the mean step; those below a hundredth of the largest are shown together."""
    whole, parts = split
    worth = 0.01 * max(abs(part.added_s) for part in parts)
    falls = []
    for part in parts:
        half_width_s = _half_width_s(part)
        if abs(part.added_s) >= worth:
            falls.append(
                Fall(
                    label=part.name,
                    added=part.added_s * MS_PER_S,
                    half_width=None if half_width_s is None else half_width_s * MS_PER_S,
                    meaning=f"time per step {how} {part.name}: mean over blocks of b - a, with its 95% interval",
                    is_clear=part.is_significant,
                )
            )
    if small := [part for part in parts if abs(part.added_s) < worth]:
        added = sum(part.added_s for part in small) * MS_PER_S
        names = f"together: {', '.join(part.name for part in small)}"
        falls.append(Fall(label="all others", added=added, meaning=names, is_clear=False))
    start = whole.a_s or 0.0
    return Waterfall(
        title=f"{cell.label}: {title}",
        unit="ms",
        sides=(cell.a_label, cell.b_label),
        start=start * MS_PER_S,
        falls=falls,
        end=(start + whole.added_s) * MS_PER_S,
        sentence=words,
    )


def _half_width_s(part: Part) -> float | None:
    """Half of its interval; None where it has none, or no scatter."""
    low, high = part.ci_low_s, part.ci_high_s
    return None if low is None or high is None or math.isclose(low, high, rel_tol=1e-6) else (high - low) / 2


def ladder_waterfalls(analysis: AnalyzedExperiment) -> Iterator[Waterfall]:
    """The prices of each ladder on top of the mean of its lowest step, where all of them are known."""
    cells = {cell.label: cell for cell in analysis.cells}
    for ladder in analysis.ladders:
        for quantity, unit in (("step_ms", "ms"), ("wall_s", "s")):
            base, whole = cells.get(ladder.whole.lower), ladder.whole.differences.get(quantity)
            start = None if base is None else base.centre(quantity)
            falls = [
                Fall(
                    label=price.what,
                    added=difference.mean,
                    half_width=difference.half_width,
                    is_clear=difference.half_width is not None and abs(difference.mean) > difference.half_width,
                    meaning=f"mean over {difference.num_blocks} blocks: {quantity} of {price.upper} minus that of "
                    f"{price.lower}",
                )
                for price in ladder.prices
                if (difference := price.differences.get(quantity)) is not None
            ]
            if whole is None or start is None or len(falls) < len(ladder.prices):
                continue
            largest = max(falls, key=lambda fall: abs(fall.added))
            share = f", {largest.added / whole.mean:.0%} of the difference" if whole.mean else ""
            yield Waterfall(
                title=ladder.label,
                unit=unit,
                sides=(ladder.whole.lower, ladder.whole.upper),
                start=start,
                falls=falls,
                end=start + whole.mean,
                sentence=f"The largest part is {largest.label}: {signed_four_digits(largest.added)} {unit}{share}.",
            )


def waterfall_values(waterfall: Waterfall) -> dict[str, Any]:
    """The bars of a waterfall from top to bottom, with positions as SVG lengths: from zero to the highest level,
    with room for intervals.
    """
    levels = list(accumulate((fall.added for fall in waterfall.falls), initial=waterfall.start))
    reached = [0.0, waterfall.end, *levels]
    for fall, after in zip(waterfall.falls, levels[1:], strict=True):
        reached += [after - (fall.half_width or 0.0), after + (fall.half_width or 0.0)]
    lowest, highest = min(reached), max(reached) * 1.02 or 1.0

    def share(value: float) -> float:
        return (value - lowest) / (highest - lowest)

    def total(label: str, value: float) -> dict[str, Any]:
        return {
            "label": label,
            "text": f"{four_digits(value)} {waterfall.unit}",
            "x": _length(share(0)),
            "width": _length(share(value) - share(0)),
            "class": "total",
            "interval": None,
        }

    rows = [total(waterfall.sides[0], waterfall.start)]
    for fall, (level, after) in zip(waterfall.falls, pairwise(levels), strict=True):
        half = fall.half_width
        first, last = sorted((share(level), share(after)))
        is_rounding = abs(fall.added) <= 1e-9 * abs(level)
        rows.append(
            {
                "label": fall.label,
                "text": f"{'+0' if is_rounding else _amount(fall)} {waterfall.unit}",
                "meaning": fall.meaning,
                "x": _length(first),
                "width": _length(max(last - first, 0.002)),
                "class": f"{'more' if fall.added > 0 else 'less'}{'' if fall.is_clear else ' is-untold'}",
                "interval": None if half is None else [_length(share(after + sign * half)) for sign in (-1, 1)],
            }
        )
    rows.append(total(waterfall.sides[1], waterfall.end))
    return {"title": waterfall.title, "rows": rows, "sentence": waterfall.sentence}


def _amount(fall: Fall) -> str:
    """``+57.6 ± 1.7`` with the decimals that the interval supports; without one, four digits."""
    if not fall.half_width:
        return minus(signed_four_digits(fall.added))
    decimals = max(0, 1 - math.floor(math.log10(fall.half_width)))
    return minus(f"{fall.added:+.{decimals}f} ± {fall.half_width:.{decimals}f}")


def _length(share: float) -> str:
    """A share of the width as an SVG length in per cent."""
    return f"{share * 100:.3f}%"
