"""How another person computes the ratios of the page from the data in it."""

from typing import Final

from benchctl.report.page.html import Html, el
from benchctl.report.page.judged import Verdict

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
        "method robust: the ratio is exp(sum of block_weights * (d - position_effect * x)), d and x as with method "
        "t. Weights and interval are those of a mixture of t distributions, one for each choice of blocks that may "
        "be far off (Box and Tiao, Biometrika 55, 1968, with probability 0.2 and 16 times the scatter)."
    ),
    "hodges-lehmann": (
        "method hodges-lehmann: the ratio is exp(median of ln(b) - ln(a)) over all pairs of a block of a and one "
        "of b; the interval lies between the k-th smallest and the k-th largest of these differences, where k "
        "comes from the Mann-Whitney distribution."
    ),
}


def recompute_note(verdict: Verdict) -> Html:
    """Where the block values are, and what the methods used on this page do with them."""
    used = {
        metric.estimate.method
        for comparison in verdict.comparisons
        for cell in comparison.cells
        for metric in cell.metrics
        if metric.estimate is not None
    }
    where, row = el("code", "benchctl-data"), el("code", "comparisons[i].metrics[j]")
    start = (
        "To compute a ratio again: every block value is in this file, as JSON in the element ",
        where,
        ", under ",
    )
    methods = [el("li", text) for method, text in _METHODS.items() if method in used]
    return el("div", el("p", *start, row, "."), el("ul", *methods, class_="notes") if methods else None)
