"""A comparison on the screen and as a JSON document."""

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchctl.analysis.comparison import CellComparison, Comparison
from benchctl.analysis.comparison_text import (
    change_text,
    margin_text,
    reasons_of,
    split_sentence,
    verdict_sentence,
)
from benchctl.analysis.metric_comparison import MetricComparison, spread_of_blocks
from benchctl.errors import InvalidDataError, NotComparableError

SHOWN_EXPLORATORY: Final = frozenset(
    {"output_throughput", "ttft_ms", "e2el_ms", "output_tokens", "num_steps", "tokens_per_step"}
)
"""Exploratory metrics of the table; the document has them all."""
_LEAST_WIDTH: Final = 150


def print_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """The verdict, the table, then what must be known to trust it."""
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(verdict_sentence(comparison), style="bold", markup=False, soft_wrap=True)
    console.print()
    console.print(_table(comparison, show_all=show_all))
    console.print()
    for line in footnotes_of(comparison):
        console.print(line, markup=False, soft_wrap=True)


def _table(comparison: Comparison, *, show_all: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings_of(comparison):
        table.add_column(heading, no_wrap=True)
    for row in rows_of(comparison, show_all=show_all):
        table.add_row(*row)
    return table


def headings_of(comparison: Comparison) -> tuple[str, ...]:
    """The columns of the table."""
    change = f"change ({comparison.confidence * 100:.3g}% CI)"
    return ("cell", "metric", comparison.a_name, comparison.b_name, change, "p", "verdict")


def rows_of(comparison: Comparison, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table; a cell is named in its first one."""
    for cell in comparison.cells:
        shown = [metric for metric in cell.metrics if _is_shown(metric, show_all=show_all)]
        for index, metric in enumerate(shown):
            yield ("" if index else cell.label, *_row(metric))


def _is_shown(metric: MetricComparison, *, show_all: bool) -> bool:
    if metric.role == "deciding" or show_all:
        return True
    if metric.role == "exact":
        return metric.verdict == "different"
    return metric.metric.name in SHOWN_EXPLORATORY


def _row(metric: MetricComparison) -> tuple[str, ...]:
    p_value = metric.estimate.p_value if metric.estimate else None
    exact = "exact" if metric.role == "exact" else ""
    verdict = f"({metric.verdict})" if metric.role == "exploratory" else metric.verdict
    return (
        metric.metric.name,
        _value(metric.a, metric.a_blocks),
        _value(metric.b, metric.b_blocks),
        change_text(metric),
        exact if p_value is None else f"{p_value:.3f}",
        verdict,
    )


def _value(mean: float | None, blocks: tuple[float | None, ...]) -> str:
    if mean is None:
        return "n/a"
    text = f"{mean:,.0f}" if abs(mean) >= 10_000 else f"{mean:.4g}"
    spread = spread_of_blocks(blocks)
    return text if not spread else f"{text} ± {spread * 100:.1f}%"


def footnotes_of(comparison: Comparison) -> Iterator[str]:
    """What must be known to trust the table."""
    for cell in comparison.cells:
        split = split_sentence(cell)
        if split:
            yield f"{cell.label}: {split}"
    yield _blocks_line(comparison)
    yield f"margin {margin_text(comparison.margin_frac)} · {comparison.num_tests} deciding comparisons"
    if equal := _equal_everywhere(comparison):
        yield f"equal in every block: {', '.join(equal)}"
    yield "verdicts in parentheses are exploratory and decide nothing"
    for difference in comparison.allowed:
        yield f"declared difference: {difference}"
    if comparison.verdict in {"invalid", "inconclusive"}:
        yield from (f"reason: {reason}" for reason in reasons_of(comparison))
    for warning in comparison.warnings:
        yield f"warning: {warning.message}" + (f" [{warning.where}]" if warning.where else "")


def _blocks_line(comparison: Comparison) -> str:
    counts = sorted({cell.num_blocks for cell in comparison.cells})
    numbers = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    line = f"n = {numbers} blocks, {comparison.pairing}"
    first = [cell for cell in comparison.cells if cell.num_a_first is not None]
    if first:
        ran_first, blocks = sum(c.num_a_first or 0 for c in first), sum(c.num_blocks for c in first)
        line += f", {comparison.a_name} ran first in {ran_first} of {blocks}"
    detectable = _detectable(comparison)
    return line + (f" · detectable: {detectable}" if detectable else "")


def _detectable(comparison: Comparison) -> str:
    """The smallest change that would show in each deciding metric, in the cell where it is largest."""
    worst: dict[str, float] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            found = metric.estimate.detectable_frac if metric.estimate else None
            if found is not None:
                worst[metric.metric.name] = max(found, worst.get(metric.metric.name, 0.0))
    return ", ".join(f"{name} {found * 100:.2g}%" for name, found in worst.items())


def _equal_everywhere(comparison: Comparison) -> list[str]:
    verdicts: dict[str, set[str]] = {}
    for cell in comparison.cells:
        for metric in cell.metrics:
            if metric.role == "exact":
                verdicts.setdefault(metric.metric.name, set()).add(metric.verdict)
    return [name for name, found in verdicts.items() if found == {"equal"}]


def document_of(comparison: Comparison) -> dict[str, Any]:
    """Everything of a comparison; units inside ``metrics`` are those of each metric, ratios are b / a."""
    return {
        "verdict": comparison.verdict,
        "exit_code": comparison.exit_code,
        "summary": verdict_sentence(comparison),
        "reasons": list(reasons_of(comparison)),
        "a": comparison.a_name,
        "b": comparison.b_name,
        "margin_frac": comparison.margin_frac,
        "confidence": comparison.confidence,
        "pairing": comparison.pairing,
        "num_tests": comparison.num_tests,
        "cells": [_cell_document(cell) for cell in comparison.cells],
        "metrics": [_metric_document(cell, m) for cell in comparison.cells for m in cell.metrics],
        "allowed_differences": [
            {"key": d.key, "a": d.a, "b": d.b, "cells": list(d.cells)} for d in comparison.allowed
        ],
        "warnings": [{"code": w.code, "message": w.message, "where": w.where} for w in comparison.warnings],
    }


def refusal_document(error: InvalidDataError) -> dict[str, Any]:
    """The same document for results that must not be compared or cannot be read."""
    differences = error.differences if isinstance(error, NotComparableError) else ()
    return {
        "verdict": "not-comparable" if isinstance(error, NotComparableError) else "invalid",
        "exit_code": error.exit_code,
        "summary": str(error).splitlines()[0],
        "reasons": list(differences) or [str(error)],
        "cells": [],
        "metrics": [],
        "allowed_differences": [],
        "warnings": [],
    }


def _cell_document(cell: CellComparison) -> dict[str, Any]:
    return {
        "cell": cell.label,
        "a": cell.a_label,
        "b": cell.b_label,
        "blocks": cell.num_blocks,
        "a_first": cell.num_a_first,
        "verdict": cell.verdict,
        "faults": list(cell.faults),
        "wall_split": cell.wall_split,
    }


def _metric_document(cell: CellComparison, metric: MetricComparison) -> dict[str, Any]:
    estimate = metric.estimate
    return {
        "name": metric.metric.name,
        "unit": metric.metric.unit,
        "cell": cell.label,
        "a": metric.a,
        "b": metric.b,
        "ratio": estimate.ratio if estimate else None,
        "ci_low": estimate.ci_low if estimate else None,
        "ci_high": estimate.ci_high if estimate else None,
        "blocks": estimate.num_blocks if estimate else cell.num_blocks,
        "verdict": metric.verdict,
        "reason": metric.reason,
        "p": estimate.p_value if estimate else None,
        "detectable_frac": estimate.detectable_frac if estimate else None,
        "exploratory": metric.role == "exploratory",
        "role": metric.role,
        "a_blocks": list(metric.a_blocks),
        "b_blocks": list(metric.b_blocks),
    }
