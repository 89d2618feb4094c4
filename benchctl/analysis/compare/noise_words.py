"""The noise of a machine in one sentence, where it is what prevents a verdict."""

import math
from typing import Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison

NOISY_MARGINS: Final = 5
NOISY_SCATTER_FRAC: Final = 0.03
"""A machine is noisy where blocks scatter by three per cent and by five thresholds. An interval as narrow as the
threshold would then take some hundred blocks."""
_TAILS: Final = ("p95_", "p99_")
"""Of metrics that scatter on a quiet machine as well."""


def noise_sentence(comparison: Comparison) -> str | None:
    """``This machine was noisy: ...`` where its noise prevents a verdict; None on a quiet machine.

    A deciding metric is inconclusive, and its values of A scatter from block to block, as do its ratios: what both
    sides of a block share prevents nothing. None of a simulator, whose scatter is that of its cost model.
    """
    scatters = [
        (scatter, metric.metric.name)
        for cell in comparison.cells
        for metric in cell.deciding
        if cell.verdict == "inconclusive" and (scatter := _noise(metric)) is not None
    ]
    if not scatters or comparison.is_simulated:
        return None
    scatter, name = max(scatters)
    sentence = f"This machine was noisy: {name} of {comparison.a_name} varied by {scatter:.0%} between blocks"
    if comparison.other_cores is None:
        return sentence
    used, num_cores = comparison.other_cores
    return f"{sentence} (other processes used {used:.1f} of {num_cores} cores)"


def _noise(metric: MetricComparison) -> float | None:
    """The scatter of A where it prevents a verdict; None where it does not."""
    estimate, scatter = metric.estimate, metric.scatters[0]
    if estimate is None or estimate.standard_error is None or scatter is None:
        return None
    is_open = metric.is_test and metric.verdict == "inconclusive" and not metric.metric.name.startswith(_TAILS)
    of_ratios = estimate.standard_error * math.sqrt(estimate.num_blocks)
    least = max(NOISY_SCATTER_FRAC, NOISY_MARGINS * metric.rules.margin_frac)
    return scatter if is_open and min(scatter, of_ratios) >= least else None
