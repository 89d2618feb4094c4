"""The number of blocks with which the inconclusive verdicts of a directory would be settled."""

from collections.abc import Iterable

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.statistics.sample_size import blocks_for_verdict
from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS


def blocks_to_settle(comparisons: Iterable[Comparison]) -> int | None:
    """Blocks in all that give the deciding metrics of cells without a verdict theirs, where blocks can do that.

    Ratio and scatter are taken to stay as they are. To add blocks is one more look at the data, so the intervals
    are those of alpha * K / (K + 1) where they were those of alpha after K looks. None where nothing is
    inconclusive, or where no number of blocks helps.
    """
    needed = [
        number
        for comparison in comparisons
        for cell in comparison.cells
        if not cell.errors and cell.verdict == "inconclusive"
        for metric in cell.deciding
        if (number := _blocks_needed(metric, comparison.num_looks)) is not None
    ]
    return max(needed, default=None)


def _blocks_needed(metric: MetricComparison, num_looks: int) -> int | None:
    """Blocks for one metric; a screening needs at least those that a verdict takes."""
    estimate, judged = metric.estimate, metric.judged_confidence
    if metric.verdict != "inconclusive" or estimate is None or judged is None or metric.is_unreliable:
        return None
    confidence = 1 - (1 - judged) * num_looks / (num_looks + 1)
    needed = blocks_for_verdict(estimate, metric.margins, confidence)
    if metric.is_screening:
        return max(needed or 0, MIN_PAIRED_BLOCKS)
    return None if needed is None else max(needed, estimate.num_blocks + 1)
