"""The noise of a machine in one sentence, where it is what prevents a verdict."""

import math
from typing import Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison

NOISY_MARGINS: Final = 5
NOISY_SCATTER_FRAC: Final = 0.03
"""A machine is noisy where blocks scatter by three per cent and by five thresholds. An interval as narrow as the
threshold would then take some hundred blocks."""


def noise_sentence(comparison: Comparison) -> str | None:
    """``This machine was noisy: ...`` where its noise prevents a verdict; None on a quiet machine.

    A deciding metric is inconclusive, and its values of A scatter from block to block, as do its ratios: what both
    sides of a block share prevents nothing. None of a simulator, whose scatter is that of its cost model.
    """
    scatters = [
        (_noise(metric), metric.metric.name)
        for cell in comparison.cells
        for metric in cell.deciding
        if cell.verdict == "inconclusive"
    ]
    scatter, name = max(scatters, default=(0.0, ""))
    if not scatter or comparison.is_simulated:
        return None
    others = ""
    if comparison.other_cores is not None:
        used, num_cores = comparison.other_cores
        others = f" (other processes used {used:.1f} of {num_cores} cores)"
    return f"This machine was noisy: {name} of {comparison.a_name} varied by {scatter:.0%} between blocks{others}"


def _noise(metric: MetricComparison) -> float:
    """The scatter of A where it prevents a verdict, else 0; that of high percentiles is large everywhere."""
    estimate, scatter = metric.estimate, metric.scatters[0] or 0.0
    if estimate is None or metric.verdict != "inconclusive" or metric.metric.name.startswith(("p95_", "p99_")):
        return 0.0
    of_two, error = math.hypot(*estimate.residuals), estimate.standard_error
    of_ratios = of_two if error is None else error * math.sqrt(estimate.num_blocks)
    least = max(NOISY_SCATTER_FRAC, NOISY_MARGINS * metric.rules.margin_frac)
    return scatter if metric.is_test and min(scatter, of_ratios) >= least else 0.0
