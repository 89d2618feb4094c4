"""The table of percentiles: each latency of each arm, with the interval over its blocks."""

from collections.abc import Sequence
from typing import Any

from benchctl.analysis.analyzed import CONFIDENCE, AnalyzedExperiment
from benchctl.analysis.metrics.percentile import PERCENTS, smallest_sample
from benchctl.analysis.summary.latencies import LATENCY_NAMES, PercentileLevel, percentile_levels
from benchctl.formats import NOT_AVAILABLE, page_number, percentage
from benchctl.report.charts.arms import arm_styles

Levels = Sequence[PercentileLevel | None]


def percentile_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """The table of a directory; None where no percentile is known."""
    cells = [arm.cell for arm in arm_styles(analysis)]
    return percentile_table(
        [(name, cell.label, percentile_levels(cell, name, CONFIDENCE)) for name in LATENCY_NAMES for cell in cells],
        CONFIDENCE,
        "block",
    )


def percentile_table(
    rows: Sequence[tuple[str, str, Levels]], confidence: float, unit: str
) -> dict[str, Any] | None:
    """``rows`` are latency, arm and its percentiles; None where none is known. ``unit`` is the word for a block."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for latency, label, levels in rows:
        if any(level is not None for level in levels):
            numbers = [_text(level) for level in levels]
            groups.setdefault(latency, []).append({"label": label, "numbers": numbers})
    if not groups:
        return None
    fewest = ", ".join(f"p{percent} {smallest_sample(percent)}" for percent in PERCENTS if percent > 50)
    return {
        "headings": [f"p{percent}" for percent in PERCENTS],
        "groups": [(LATENCY_NAMES[name], group) for name, group in groups.items()],
        "num_rows": sum(map(len, groups.values())),
        "note": (
            f"In ms: {'centre' if unit == 'block' else 'geometric mean'} over {unit}s of the percentile of each, "
            "in brackets its "
            f"{percentage(confidence)} interval with {unit}s as units. "
            f"{NOT_AVAILABLE}: too few completed requests in a {unit} ({fewest}). In virtual time the "
            "percentile of so few is shown, with their number: of these requests alone, near the slowest of them."
        ),
    }


def _text(level: PercentileLevel | None) -> tuple[str, str]:
    """Value and interval, with the number of requests where these are too few."""
    if level is None:
        return NOT_AVAILABLE, ""
    mark = "" if level.num_requests is None else f"of {level.num_requests}"
    if level.interval_ms is None:
        return page_number(level.level_ms), mark
    low, high = level.interval_ms
    return page_number(level.level_ms), f"[{page_number(low)}, {page_number(high)}] {mark}".rstrip()
