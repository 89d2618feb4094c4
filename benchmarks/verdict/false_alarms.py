"""How often a change is called that is not there, and found where it is, by laws of scatter."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchctl.analysis.compare.metric import MetricComparison
from benchmarks.verdict.known_truth import CHANGES, Experiment, Made, covers, experiments, is_found, judge
from benchmarks.verdict.shares import COVERS_AT_LEAST, SELDOM, Row, row

SCATTER_LAWS: Final = (
    ("gaussian", 0.028),
    ("noisy baseline, 3 %", 0.02),
    ("uneven", 0.02),
    ("outliers, 10 % by 30 %", 0.02),
    ("outliers, 10 % by 10 %", 0.02),
    ("two speeds, 10 %, 0.2", 0.02),
    ("two speeds, 10 %, 0.2", 0.005),
    ("two clock steps", 0.005),
    ("clock, 5 % in half of the blocks", 0.005),
    ("clock, 8 % in three of ten blocks", 0.005),
    ("each run at one of two speeds, 8 %", 0.005),
)
"""Noise, and its scatter; where that is small, differences take few values, and some agree by chance."""


def false_alarms(n: int) -> Iterator[Row]:
    """The same A/A experiments judged without a margin and with one of 1 %, and with a true +5 %."""
    for noise, ratio_sd in SCATTER_LAWS:
        for num_blocks in (6, 8, 12):
            made = Made(noise=noise, ratio_sd=ratio_sd, num_blocks=num_blocks, margin_frac=0.0)
            events = (alarms(experiment, made, compared) for experiment, (compared,) in experiments(made, n))
            demands = {"covers": COVERS_AT_LEAST, "margin 0": SELDOM, "margin 1 %": SELDOM}
            yield row({"noise": noise, "scatter": f"{ratio_sd:.1%}", "blocks": num_blocks}, events, demands)


def alarms(experiment: Experiment, made: Made, compared: MetricComparison) -> dict[str, bool]:
    """What is said of one experiment without a change, and of the same with one of 5 %."""
    with_margin = replace(made, margin_frac=0.01)
    a, b = experiment.arms
    changed = replace(experiment, arms=(a, tuple({name: 1.05 * block[name] for name in block} for block in b)))
    return {
        "covers": covers(compared, 0.0),
        "margin 0": compared.verdict in CHANGES,
        "margin 1 %": judge(experiment, with_margin)[0].verdict in CHANGES,
        "+5 % found": is_found(judge(changed, with_margin)),
    }
