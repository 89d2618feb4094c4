"""The forest plot: the ratio of every deciding metric in every cell with its interval, against the margin.

Drawn as small SVG strips in a grid of text, with places in per cent of their width: sharp and readable at any
width, there without any script, and in the colours of the page.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import change_text, has_two_margins
from benchctl.formats import minus
from benchctl.report.page.html import Html, el, join
from benchctl.report.page.parts.icon import badge, kind_of, marker
from benchctl.report.page.parts.scale import LogScale, scale_of
from benchctl.report.page.parts.terms import change_term, metric_term, with_term

_ROW_PX: Final = 24
_BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "none": "neither is better"}


def forest(comparison: Comparison) -> Html | None:
    """The plot of one comparison; None where no deciding metric has a ratio."""
    groups = _groups(comparison)
    drawn = [metric for rows in groups.values() for _, metric in rows if metric.estimate is not None]
    if not drawn:
        return None
    scale = _scale(drawn)
    parts: list[Html] = []
    for rows in groups.values():
        metric = rows[0][1].metric
        head = (
            with_term(el("b", metric.name), metric_term(metric)),
            f" {metric.unit}, {_BETTER[metric.direction]}",
        )
        parts.append(el("div", *head, class_="forest-head"))
        parts += [_row(label, compared, scale) for label, compared in rows]
    shaded = "the margins of equivalence and of a change" if has_two_margins(drawn) else "the margin"
    return el(
        "div", el("div", *parts, _axis(scale, shaded), class_="forest", role="group", aria_label="forest plot")
    )


def _groups(comparison: Comparison) -> dict[str, list[tuple[str, MetricComparison]]]:
    """Rows by metric, in the order of the cells."""
    groups: dict[str, list[tuple[str, MetricComparison]]] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            groups.setdefault(metric.metric.name, []).append((cell.label, metric))
    return groups


def _scale(drawn: Sequence[MetricComparison]) -> LogScale:
    estimates = [metric.estimate for metric in drawn if metric.estimate is not None]
    ends = [end for estimate in estimates if estimate.log_interval is not None for end in estimate.log_interval]
    margin = max(metric.margins.log_bands[0] for metric in drawn)
    return scale_of([estimate.log_ratio for estimate in estimates], ends, (-margin, margin))


def _row(label: str, metric: MetricComparison, scale: LogScale) -> Html:
    strip = el(
        "svg",
        *_strip(metric, scale),
        class_=f"strip is-{kind_of(metric.verdict)}",
        width="100%",
        height=_ROW_PX,
        role="img",
        aria_label=f"{metric.metric.name} in {label}: {change_text(metric)}, {metric.verdict}",
    )
    change = with_term(el("span", minus(change_text(metric)), class_="num"), change_term(metric))
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
    for place, _ in scale.ticks():
        yield el("line", x1=_at(place), x2=_at(place), y1=0, y2=_ROW_PX, class_="gridline")
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
    for place, label in scale.ticks():
        marks.append(el("line", x1=_at(place), x2=_at(place), y1=0, y2=5, class_="tick"))
        marks.append(el("text", label, x=_at(place), y=18, text_anchor=_anchor(place)))
    title = el("span", f"change, logarithmic scale; shaded: {shaded}", class_="axis-title")
    strip = el("svg", *marks, class_="strip axis", width="100%", height=22, aria_hidden="true")
    return el("div", el("span"), join(strip), title, class_="forest-row forest-axis")


def _anchor(place: float) -> str:
    return "start" if place < 0.04 else "end" if place > 0.96 else "middle"


def _at(place: float) -> str:
    return f"{place * 100:.3f}%"
