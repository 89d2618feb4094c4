"""What every number of the page means, for whoever was not there."""

from typing import Final

from benchctl.analysis.metrics.table import METRICS
from benchctl.report.page.html import Html, el, join

_WORDS: Final = {
    "variant": "One named server configuration; every other one is compared with the baseline.",
    "cell": "One point of the sweep: a value for each swept factor.",
    "block": "One complete replicate: the baseline and every cell once, each on a fresh server, in a balanced "
    "order. The unit of statistics: requests and steps of one server share its luck and are no replicates.",
    "ratio": "Value of the other side divided by that of the baseline. Changes are ratio minus 1.",
    "interval": "The range of ratios that the blocks are compatible with, at the stated confidence.",
    "threshold": "The change below which nobody cares: a factor of 1 + threshold either way.",
    "noise floor": "The change that identical servers of this machine could not rule out, from an A/A experiment.",
    "margin": "Of a change: the threshold, or the noise floor where that is larger. Of equivalence: the threshold, "
    "or one that was named; noise never widens it.",
    "regression": "The whole interval lies beyond the margin of a change, on the worse side.",
    "improvement": "The whole interval lies beyond the margin of a change, on the better side.",
    "equivalent": "The whole interval lies inside the margin of equivalence: the same, shown rather than assumed.",
    "inconclusive": "Neither: more blocks are needed to tell, or, between threshold and noise floor, less noise.",
    "invalid": "Something failed or differs that makes any verdict worthless; the reasons are given.",
}


def definitions() -> Html:
    """Words, then metrics with their formulas."""
    words = el("dl", *(join(el("dt", word), el("dd", text)) for word, text in _WORDS.items()), class_="facts")
    head = el("tr", *(el("th", h, scope="col") for h in ("metric", "unit", "formula", "better", "needs")))
    rows = [
        el(
            "tr",
            el("th", el("code", metric.name), scope="row"),
            *(el("td", text) for text in (metric.unit, metric.formula, metric.direction, metric.needs)),
        )
        for metric in METRICS.values()
    ]
    table = el("table", el("thead", head), el("tbody", *rows), class_="definitions")
    folded = el(
        "details", el("summary", f"All {len(METRICS)} metrics and their formulas"), el("div", table, class_="wide")
    )
    return join(words, folded)
