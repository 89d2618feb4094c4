"""One correction for all deciding tests of a comparison: every metric in every cell is a chance to be wrong."""

from collections.abc import Sequence
from dataclasses import replace

from benchctl.analysis.compare.metric_comparison import MetricComparison, judge_metric
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.statistics.margins import decision_alpha
from benchctl.analysis.statistics.multiplicity import BlockScores, holm_levels, joint_levels


def correct_for_multiple_tests(cells: Sequence[CellComparison], confidence: float) -> tuple[CellComparison, ...]:
    """The cells with their deciding verdicts made together: the chance of any wrong one is 1 - confidence."""
    tests = [
        (c, i, metric)
        for c, cell in enumerate(cells)
        for i, metric in enumerate(cell.metrics)
        if metric.role == "deciding" and metric.estimate is not None and not metric.is_unreliable
    ]
    metrics = [list(cell.metrics) for cell in cells]
    levels = _levels([metric for _, _, metric in tests], 1 - confidence)
    for (c, i, metric), level in zip(tests, levels, strict=True):
        metrics[c][i] = judge_metric(metric, 1 - level)
    return tuple(replace(cell, metrics=tuple(m)) for cell, m in zip(cells, metrics, strict=True))


def _levels(metrics: Sequence[MetricComparison], alpha: float) -> tuple[float, ...]:
    """The alpha of each test: joint where the sides share blocks, Holm's where they do not."""
    scores = {i: scores for i, metric in enumerate(metrics) if (scores := _block_scores(metric)) is not None}
    if not scores:
        p_values = [  # 1 where there are too few blocks for a verdict
            1.0 if m.estimate is None or m.is_screening else decision_alpha(m.estimate, m.margins) for m in metrics
        ]
        return holm_levels(p_values, alpha)
    indices = list(scores)

    def decides(test: int, level: float) -> bool:
        return judge_metric(metrics[indices[test]], 1 - level).verdict != "inconclusive"

    levels = [alpha] * len(metrics)
    for i, level in zip(indices, joint_levels(list(scores.values()), decides, alpha), strict=True):
        levels[i] = level
    return tuple(levels)


def _block_scores(metric: MetricComparison) -> BlockScores | None:
    """The contribution of each block to the estimate; None where the sides share none, or too few for a verdict."""
    estimate = metric.estimate
    if estimate is None or not estimate.block_weights or metric.is_screening:
        return None
    weights_and_residuals = zip(estimate.block_weights, estimate.residuals, strict=True)
    return BlockScores(metric.blocks, tuple(weight * residual for weight, residual in weights_and_residuals))
