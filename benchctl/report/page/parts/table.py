"""The table of cells and metrics: both sides, the change with its interval, p, and the verdict."""

from collections.abc import Iterator

from benchctl.analysis.compare.metric_comparison import MetricComparison, spread_of_blocks
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.text import change_text
from benchctl.analysis.metrics.bounds import MARK
from benchctl.formats import NOT_AVAILABLE, count_of, minus, p_value, page_number, percentage, scatter
from benchctl.report.page.html import Html, el, join
from benchctl.report.page.parts.icon import badge
from benchctl.report.page.parts.terms import (
    change_term,
    metric_term,
    p_term,
    value_term,
    verdict_term,
    with_term,
)
from benchctl.report.text.comparison_table import is_shown


def comparison_table(comparison: Comparison) -> Html:
    """The table of what decides and what is usually asked for, and all the rest folded below it."""
    first = [body for cell in comparison.cells for body in _body(comparison, cell, is_all=False)]
    rest = [body for cell in comparison.cells for body in _body(comparison, cell, is_all=True)]
    num_all = max((len(cell.metrics) for cell in comparison.cells), default=0)
    folded = el(
        "details",
        el("summary", f"All {num_all} metrics"),
        _table(comparison, rest, "all"),
        class_="all-metrics",
    )
    return join(_table(comparison, first, "main"), folded if num_all else None)


def _table(comparison: Comparison, bodies: list[Html], kind: str) -> Html:
    interval = f"change [{percentage(comparison.confidence)} interval]"
    headings = ("metric", comparison.a_name, comparison.b_name, interval, "p", "verdict")
    classes = ("", "num", "num", "num", "num", "")
    head = el("tr", *(el("th", h, scope="col", class_=c or None) for h, c in zip(headings, classes, strict=True)))
    return el("table", el("thead", head), *bodies, class_=f"metrics {kind}")


def _body(comparison: Comparison, cell: CellComparison, *, is_all: bool) -> Iterator[Html]:
    shown = [metric for metric in cell.metrics if is_shown(metric, show_all=is_all)]
    verdict = badge(cell.verdict)
    name = el(
        "th",
        el("b", cell.label),
        " ",
        el("small", count_of(cell.num_blocks, "block")),
        " ",
        verdict,
        colspan=6,
        scope="rowgroup",
    )
    faults = [el("tr", el("td", f"{fault}", colspan=6, class_="fault")) for fault in cell.errors[:5]]
    rows = [_row(comparison, metric) for metric in shown]
    yield el("tbody", el("tr", name, class_="cell"), *faults, *rows)


def _row(comparison: Comparison, metric: MetricComparison) -> Html:
    sides = ((comparison.a_name, metric.a, metric.a_blocks), (comparison.b_name, metric.b, metric.b_blocks))
    values = [
        _value(metric, name, mean, blocks, num_bounded)
        for (name, mean, blocks), num_bounded in zip(sides, metric.num_bounded, strict=True)
    ]
    unit = f" {metric.metric.unit}" if metric.metric.unit != "1" else ""
    name = join(with_term(metric.metric.name, metric_term(metric.metric)), el("small", unit))
    change = with_term(minus(change_text(metric)), change_term(metric))
    cells = (
        el("th", name, scope="row"),
        *values,
        el("td", change, class_="num change"),
        el("td", _probability(metric), class_="num p"),
        el("td", _verdict(metric), class_="verdict"),
    )
    return el("tr", *cells, class_=metric.role)


def _value(
    metric: MetricComparison, name: str, mean: float | None, blocks: tuple[float | None, ...], num_bounded: int
) -> Html:
    shown = join(
        page_number(mean),
        el("small", f" {text}") if (text := scatter(spread_of_blocks(blocks))) else None,
        f" {MARK}" if num_bounded else None,
    )
    known = sum(value is not None for value in blocks)
    return el("td", with_term(shown, value_term(metric.metric, name, known)), class_="num value", data_side=name)


def _probability(metric: MetricComparison) -> Html:
    estimate = metric.estimate
    if metric.role == "exact":
        return el("span", "exact")
    if estimate is None or estimate.p_value is None:
        return el("span", NOT_AVAILABLE)
    return with_term(p_value(estimate.p_value), p_term(metric))


def _verdict(metric: MetricComparison) -> Html:
    meaning = verdict_term(metric)
    if metric.role == "deciding":
        return with_term(badge(metric.verdict), meaning)
    return with_term(el("span", metric.verdict, class_="quiet"), f"{meaning}; decides nothing")
