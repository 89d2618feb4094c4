"""Definitions of the words and metrics of the page, and how another person computes its ratios from its data."""

from collections.abc import Sequence
from typing import Any, Final

from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.metrics.table import METRICS

_WORDS: Final = {
    "variant": "One named server configuration; every other one is compared with the baseline.",
    "cell": "One point of the sweep: a value for each swept factor.",
    "block": "One complete replicate: the baseline and every cell once, each on a fresh server (forward passes: in "
    "one process of the block), in a balanced order. The unit of statistics: requests and steps of one server "
    "share its luck and are not replicates.",
    "ratio": "Value of the other side divided by that of the baseline. A change is the ratio minus 1.",
    "interval": "The range of ratios that the blocks are compatible with, at the stated confidence.",
    "threshold": "The smallest change that matters: a factor of 1 + threshold either way.",
    "noise floor": "The change that identical servers of this machine could not rule out, from an A/A experiment.",
    "margin": "Of a change: the threshold, or the noise floor where that is larger. Of equivalence: the threshold, "
    "or a margin that was named; noise never widens it.",
    "regression": "The whole interval is beyond the margin of a change, on the worse side.",
    "improvement": "The whole interval is beyond the margin of a change, on the better side.",
    "equivalent": "The whole interval is inside the margin of equivalence: shown to be the same, not assumed.",
    "inconclusive": "None of these: more blocks are needed, or, between threshold and noise floor, less noise.",
    "invalid": "Something failed or differs that makes any verdict worthless; the reasons are given.",
}
_METHODS: Final = {
    "t": (
        "method t: take d = ln(b_blocks[k] / a_blocks[k]) for each block k. Where position_effect is known, x is "
        "positions of its cell; the ratio is exp(sum of block_weights * (d - position_effect * x)). With n blocks "
        "its interval is exp(mu - t * se) to exp(mu + t * se), t the quantile of Student's distribution at (1 + "
        "confidence) / 2: with n - 1 degrees of freedom and se^2 = s^2 / n without positions, with n - 2 and "
        "se^2 = s^2 * (1/n + mean(x)^2 / sum((x - mean(x))^2)) where these blocks gave the effect."
    ),
    "bca": (
        "method bca: mu and its ratio as with method t; the interval is that of the bias-corrected and accelerated "
        "bootstrap over blocks, 10,000 resamples, with tails widened to those of t, and reaches at least as far as "
        "that of method t on either side."
    ),
    "robust": (
        "method robust: d and x as with method t. Where runs of other arms helped to know position_effect, the "
        "ratio is exp(sum of block_weights * (d - position_effect * x)); where only these blocks gave it, the "
        "weights remove it and the ratio is exp(sum of block_weights * d). Weights and interval are those of a "
        "mixture of t distributions, one for each choice of blocks that may be far off (Box and Tiao, Biometrika "
        "55, 1968, with probability 0.2 and 16 times the scatter; fewer than half of the blocks, less one)."
    ),
    "hodges-lehmann": (
        "method hodges-lehmann: the ratio is exp(median of ln(b) - ln(a)) over all pairs of a block of a and one "
        "of b; the interval is from the k-th smallest to the k-th largest of these differences, where k comes from "
        "the Mann-Whitney distribution."
    ),
}


def definition_values(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Words, metrics with their formulas, and the methods that the estimates of the comparisons used."""
    methods = {
        metric.estimate.method
        for comparison in comparisons
        for cell in comparison.cells
        for metric in cell.metrics
        if metric.estimate is not None
    }
    return {
        "words": _WORDS,
        "metrics": list(METRICS.values()),
        "methods": [text for method, text in _METHODS.items() if method in methods],
    }
