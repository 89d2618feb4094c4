"""The table of cells and metrics, and the answers: both sides, the change with its interval, p, and the verdict."""

from typing import Any

from benchctl.analysis.compare.metric_comparison import MetricComparison, scatters_of
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.text import change_text
from benchctl.analysis.metrics.bounds import marked
from benchctl.analysis.quality.text import divergence_sentence, quality_lines
from benchctl.formats import NOT_AVAILABLE, count_of, minus_in_numbers, p_value, page_number, percentage, scatter
from benchctl.report.page.parts.terms import change_term, metric_term, p_term, value_term, verdict_term
from benchctl.report.text.comparison_table import is_shown

_MAX_ERRORS = 5
_MAX_CELLS = 3
"""With more cells, the first table has the deciding metrics only."""


def table_values(comparison: Comparison, num_cells: int) -> dict[str, Any]:
    """The table of the metrics that decide or are usually asked for, and the one of all metrics.

    ``num_cells`` are those of the whole page.
    """
    return {
        "a_name": comparison.a_name,
        "b_name": comparison.b_name,
        "interval": f"change [{percentage(comparison.confidence)} interval]",
        "num_all": max((len(cell.metrics) for cell in comparison.cells), default=0),
        "main": [_main_body(comparison, cell, is_short=num_cells > _MAX_CELLS) for cell in comparison.cells],
        "all": [_body(comparison, cell, show_all=True) for cell in comparison.cells],
    }


def _main_body(comparison: Comparison, cell: CellComparison, *, is_short: bool) -> dict[str, Any]:
    """The rows that most readers want, or with ``is_short`` those of deciding metrics and of counts that differ.

    A reason that several deciding rows share stands once, below the last.
    """
    body = _body(comparison, cell, show_all=False)
    rows = [row for row in body["rows"] if not is_short or row["role"] != "exploratory"]
    reasons = [row["verdict_meaning"] if row["role"] == "deciding" else None for row in rows]
    for row, reason, following in zip(rows, reasons, [*reasons[1:], None], strict=True):
        row["reason"] = reason if reason != following else None
    return {**body, "rows": rows}


def _body(comparison: Comparison, cell: CellComparison, *, show_all: bool) -> dict[str, Any]:
    return {
        "label": cell.label,
        "blocks": count_of(cell.num_blocks, "block"),
        "verdict": cell.verdict,
        "errors": [str(error) for error in cell.errors[:_MAX_ERRORS]],
        "rows": [_row(comparison, metric) for metric in cell.metrics if is_shown(metric, show_all=show_all)],
    }


def _row(comparison: Comparison, metric: MetricComparison) -> dict[str, Any]:
    sides = ((comparison.a_name, metric.a, metric.a_blocks), (comparison.b_name, metric.b, metric.b_blocks))
    probability = None if metric.estimate is None else metric.estimate.p_value
    has_p = metric.role != "exact" and probability is not None
    return {
        "role": metric.role,
        "name": metric.metric.name,
        "name_meaning": metric_term(metric.metric),
        "unit": f" {metric.metric.unit}" if metric.metric.unit != "1" else "",
        "sides": [
            {
                "name": name,
                "number": page_number(centre),
                "scatter": scatter(scatter_frac),
                "mark": marked("", num_bounded),
                "meaning": value_term(metric, name, sum(value is not None for value in blocks)),
            }
            for (name, centre, blocks), scatter_frac, num_bounded in zip(
                sides, scatters_of(metric), metric.num_bounded, strict=True
            )
        ],
        "change": change_text(metric),
        "change_meaning": change_term(metric),
        "p": "exact" if metric.role == "exact" else NOT_AVAILABLE if probability is None else p_value(probability),
        "p_meaning": p_term(metric) if has_p else None,
        "verdict": metric.verdict,
        "verdict_meaning": verdict_term(metric),
    }


def answer_values(comparison: Comparison) -> dict[str, Any] | None:
    """Quality and divergence of every cell; None where neither is known and there is no reason to report."""
    cells = [values for cell in comparison.cells if (values := _answers(cell)) is not None]
    notes = list(dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note))
    return {"cells": cells, "notes": notes} if cells or notes else None


def _answers(cell: CellComparison) -> dict[str, Any] | None:
    lines = []
    if cell.quality is not None:
        lines += [minus_in_numbers(line) for line in quality_lines(cell.quality)]
    if cell.divergence is not None:
        lines.append(divergence_sentence(cell.divergence))
    if not lines:
        return None
    return {
        "label": cell.label,
        "verdict": None if cell.quality is None else cell.quality.verdict,
        "is_deciding": cell.is_quality_deciding,
        "lines": lines,
    }
