"""Does the interval of a knee cover the true one? Servers whose step takes a + b N, so that it is at N = a / b.

By arithmetic: the throughput of each load by that law, times the scatter of launches (one for all loads of a server
that gets a ladder of loads, one for each load with fresh servers) and of runs; latency by Little's law. Two arms
over the same blocks, whose knees are equal or 10 % apart. Then the simulator in virtual time, with a step time of
this law in noise of the published size. The same output every time. Ends with exit code 1 when a demand is refuted.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchctl.analysis.experiment.curves import knee_level, vertex
from benchctl.analysis.statistics.estimate import BlockDesign, side_ratio
from benchmarks.common.harness import show
from benchmarks.verdict.shares import COVERS_AT_LEAST, SELDOM, Demand, Row, row

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS: Final = tuple(range(8))
DIFFERENCE: Final = 1.1
"""Knee of the other arm over that of the first, where they differ."""
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Scatters are standard deviations of logarithms."""

    of_launches: float
    of_runs: float
    is_ladder: bool
    demands: Mapping[str, Demand] = field(default_factory=dict)


def conditions() -> Iterator[Condition]:
    covers = {"knee covered": COVERS_AT_LEAST, "ratio covered": COVERS_AT_LEAST, "equal called different": SELDOM}
    for of_launches, is_ladder in ((0.0, True), (0.05, True), (0.05, False)):
        for of_runs in (0.005, 0.01, 0.02, 0.04):
            yield Condition(of_launches=of_launches, of_runs=of_runs, is_ladder=is_ladder, demands=covers)


def knees(truth: float, condition: Condition, rng: np.random.Generator) -> list[float | str]:
    """The knee of one arm in each block."""
    sizes = np.array(SIZES, dtype=float)
    knees_of_blocks = []
    for _ in BLOCKS:
        launch = rng.normal(0, condition.of_launches, 1 if condition.is_ladder else len(sizes))
        log_throughput = np.log(sizes / (truth + sizes)) + launch + rng.normal(0, condition.of_runs, len(sizes))
        knees_of_blocks.append(vertex(SIZES, list(2 * log_throughput - np.log(sizes))))
    return knees_of_blocks


def experiment(condition: Condition, seed: int) -> dict[str, float] | None:
    """Centre and ends of the knee, and ends of both ratios; None where some block has no knee."""
    rng = np.random.default_rng(seed)
    truth = 20 * 2 ** rng.uniform(-0.5, 0.5)  # anywhere between two loads
    arms = [knees(truth * factor, condition, rng) for factor in (1, 1, DIFFERENCE)]
    if any(isinstance(knee, str) for arm in arms for knee in arm):
        return None
    first, equal, other = ([float(knee) for knee in arm] for arm in arms)
    level = knee_level(first, CONFIDENCE, "robust")
    same, apart = (side_ratio(first, arm, BlockDesign(BLOCKS), CONFIDENCE) for arm in (equal, other))
    assert level.low
    assert level.high
    assert same
    assert apart
    ends = {"low": level.low, "high": level.high, "knee": level.value}
    of_same = {"same_low": same.estimate.ci_low, "same_high": same.estimate.ci_high}
    of_apart = {"apart_low": apart.estimate.ci_low, "apart_high": apart.estimate.ci_high}
    return {
        name: (value or math.nan) / (truth if name in ends else 1)
        for name, value in (ends | of_same | of_apart).items()
    }


def judge(condition: Condition, num_experiments: int) -> Row:
    """Shares over the experiments in which every block has a knee, and how wide the intervals are."""
    every = [experiment(condition, seed) for seed in range(num_experiments)]
    whole = [each for each in every if each is not None]
    events = [
        {
            "knee covered": each["low"] <= 1 <= each["high"],
            "ratio covered": each["apart_low"] <= DIFFERENCE <= each["apart_high"],
            "equal called different": not each["same_low"] <= 1 <= each["same_high"],
            "10 % told apart": not each["apart_low"] <= 1 <= each["apart_high"],
        }
        for each in whole
    ]
    half = float(np.median([math.log(each["high"] / each["low"]) / 2 for each in whole]))
    bias = float(np.mean([math.log(each["knee"]) for each in whole]))
    named = {
        "servers": "ladder of loads" if condition.is_ladder else "fresh",
        "scatter of launches": f"{condition.of_launches:.0%}",
        "of runs": f"{condition.of_runs:.1%}",
        "no knee": f"{100 * (1 - len(whole) / len(every)):.1f}",
        "half interval": f"{100 * half:.1f} %",
        "bias": f"{100 * bias:+.1f} %",
    }
    return row(named, events, condition.demands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000, help="of each condition")
    options = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(judge, (cases := list(conditions())), [options.experiments] * len(cases)))
    show([each.cells() for each in rows], "Knees by arithmetic, in % of experiments")
    return 1 if any(each.failures for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
