"""A comparison as CSV: one line for each metric in each cell, with numbers at full precision."""

from typing import Any, Final

from benchctl.analysis.comparison import Comparison
from benchctl.report.comparison_document import document_of
from benchctl.report.export import csv_bytes

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
    "detectable_frac",
    "estimator",
    "method",
    "verdict",
    "reason",
)


def comparison_csv(comparison: Comparison) -> bytes:
    """RFC 4180 with a header line; ratios are b / a, an unknown value is an empty field."""
    rows: list[dict[str, Any]] = document_of(comparison)["metrics"]
    return csv_bytes(_COLUMNS, rows)
