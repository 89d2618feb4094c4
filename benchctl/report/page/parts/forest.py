"""The forest plot as small SVG strips in a grid of text.

Positions are in per cent of the width: sharp and readable at any width, without any script, in the page's colours.
"""

from collections.abc import Iterator
from typing import Final

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.formats import minus
from benchctl.report.charts.forest import ForestRow, forest_of
from benchctl.report.charts.scale import LogScale
from benchctl.report.page.html import Html, el, join
from benchctl.report.page.parts.icon import badge, kind_of, marker
from benchctl.report.page.parts.terms import change_term, metric_term, with_term

_ROW_PX: Final = 24


def forest(comparison: Comparison) -> Html | None:
    """The plot of one comparison; None where no deciding metric has a ratio."""
    plot = forest_of(comparison)
    if plot is None:
        return None
    parts: list[Html] = []
    for group in plot.groups:
        head = (
            with_term(el("b", group.metric.name), metric_term(group.metric)),
            f" {group.metric.unit}, {group.direction}",
        )
        parts.append(el("div", *head, class_="forest-head"))
        parts += [_row(row, plot.scale) for row in group.rows]
    return el(
        "div",
        el("div", *parts, _axis(plot.scale, plot.bands), class_="forest", role="group", aria_label="forest plot"),
    )


def _row(row: ForestRow, scale: LogScale) -> Html:
    label, metric = row.label, row.metric
    strip = el(
        "svg",
        *_strip(metric, scale),
        class_=f"strip is-{kind_of(metric.verdict)}",
        width="100%",
        height=_ROW_PX,
        role="img",
        aria_label=f"{metric.metric.name} in {label}: {row.change}, {metric.verdict}",
    )
    change = with_term(el("span", minus(row.change), class_="num"), change_term(metric))
    return el(
        "div",
        el("span", label, class_="forest-label"),
        strip,
        el("span", change, class_="forest-change"),
        el("span", badge(metric.verdict), class_="forest-verdict"),
        class_="forest-row",
    )


def _strip(metric: MetricComparison, scale: LogScale) -> Iterator[Html]:
    for margin in metric.margins.log_bands:
        low, high = scale.at(-margin), scale.at(margin)
        yield el("rect", x=_at(low), width=_at(high - low), y=0, height=_ROW_PX, class_="margin-band")
    for log_ratio, _ in scale.ticks():
        x = _at(scale.at(log_ratio))
        yield el("line", x1=x, x2=x, y1=0, y2=_ROW_PX, class_="gridline")
    yield el("line", x1=_at(scale.at(0)), x2=_at(scale.at(0)), y1=0, y2=_ROW_PX, class_="no-change")
    estimate, middle = metric.estimate, _ROW_PX / 2
    if estimate is None:
        return
    if estimate.log_interval is not None:
        ends = estimate.log_interval
        first, last = (_at(scale.at(end)) for end in ends)
        yield el("line", x1=first, x2=last, y1=middle, y2=middle, class_="interval")
        for end, reached, turn in ((ends[0], first, 180), (ends[1], last, 0)):
            if scale.holds(end):
                yield el("line", x1=reached, x2=reached, y1=middle - 4, y2=middle + 4, class_="interval")
            else:
                arrow = el("path", d="M-6-4.5 0 0-6 4.5", transform=f"rotate({turn})", class_="interval open")
                yield el("svg", arrow, x=reached, y=middle, overflow="visible")
    yield marker(metric.verdict, _at(scale.at(estimate.log_ratio)), str(middle))


def _axis(scale: LogScale, shaded: str) -> Html:
    marks: list[Html] = []
    for log_ratio, label in scale.ticks():
        place = scale.at(log_ratio)
        marks.append(el("line", x1=_at(place), x2=_at(place), y1=0, y2=5, class_="tick"))
        marks.append(el("text", label, x=_at(place), y=18, text_anchor=_anchor(place)))
    title = el("span", f"change, logarithmic scale; shaded: {shaded}", class_="axis-title")
    strip = el("svg", *marks, class_="strip axis", width="100%", height=22, aria_hidden="true")
    return el("div", el("span"), join(strip), title, class_="forest-row forest-axis")


def _anchor(place: float) -> str:
    return "start" if place < 0.04 else "end" if place > 0.96 else "middle"


def _at(place: float) -> str:
    return f"{place * 100:.3f}%"
