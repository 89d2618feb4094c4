"""Tables as CSV files, with numbers at full precision.

The verdict on a whole directory as a JSON document: every comparison with the baseline, made or refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.analysis.compare.result import Comparison
from benchctl.report.documents.documents import document_of
from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict
from benchctl.report.table import csv_bytes

_COLUMNS: Final = (
    "cell",
    "name",
    "unit",
    "role",
    "a",
    "b",
    "ratio",
    "ci_low",
    "ci_high",
    "blocks",
    "p",
    "margin_frac",
    "equivalence_margin_frac",
    "judged_confidence",
    "minimum_detectable_effect",
    "estimator",
    "method",
    "verdict",
    "reason",
)


def comparison_csv(comparison: Comparison) -> bytes:
    """One line for each metric in each cell; ratios are b / a."""
    return csv_bytes(_COLUMNS, _rows(comparison))


def comparisons_csv(comparisons: Mapping[str, Comparison]) -> bytes:
    """The lines of several comparisons; the first column is the name of each."""
    rows = [{"sides": name, **row} for name, comparison in comparisons.items() for row in _rows(comparison)]
    return csv_bytes(("sides", *_COLUMNS), rows)


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = document_of(comparison)["metrics"]
    return rows


def verdict_document(verdict: PageVerdict) -> dict[str, Any]:
    """The verdict, and under ``comparisons`` the document of each comparison; those of controls decide nothing."""
    return {
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "comparisons": [
            {**comparison_document(one), "is_control": one.is_control, "sides": one.sides} for one in verdict.all
        ],
        "notes": list(verdict.notes),
    }


def comparison_document(one: ComparisonVerdict) -> dict[str, Any]:
    """One comparison; where none could be made, the reason in the same keys."""
    if one.comparison is not None:
        return document_of(one.comparison)
    return {
        "verdict": one.word,
        "exit_code": one.exit_code,
        "summary": one.sentence,
        "reasons": list(one.differences) or [one.problem],
        "a": one.a_name,
        "b": one.b_name,
        "cells": [],
        "metrics": [],
    }
