"""A comparison as CSV: one line for each metric in each cell, with numbers at full precision."""

from typing import Any, Final

from benchctl.analysis.compare.result import Comparison
from benchctl.report.documents.comparison import document_of
from benchctl.report.documents.csv_table import csv_bytes

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
    """RFC 4180 with a header line; ratios are b / a, an unknown value is an empty field."""
    rows: list[dict[str, Any]] = document_of(comparison)["metrics"]
    return csv_bytes(_COLUMNS, rows)
