"""Compute the table ``CALIBRATION`` of ``analysis/statistics/robust.py`` by simulation, and print it as source.

For normal noise and a given number of blocks: the largest r with which intervals of 95, 98.75 and 99.5 % miss
the truth in at most 1.05 times what they say. Once with the effect of the position estimated from the same
blocks (two arms in turn), once with none to estimate. Beside it, how often intervals miss with that r. The same
output each time.
"""

import argparse
from typing import Final

import numpy as np

from benchctl.analysis.statistics.robust import PositionCovariate, credibility_of, estimate_mixture
from benchmarks.common.harness import show
from benchmarks.verdict.known_truth import named_stream

NUMBERS: Final = (6, 7, 8, 9, 10, 12, 15, 20, 30, 50)
ALPHAS: Final = (0.05, 0.0125, 0.005)
OTHER_ALPHAS: Final = (0.2, 0.002)
TOLERANCE: Final = 1.05


def credibilities(num_blocks: int, *, is_own_slope: bool, num_data_sets: int) -> np.ndarray:
    """2 min(P(mu < 0), P(mu > 0)) of data sets whose mu is 0."""
    stream = named_stream("calibration", num_blocks, is_own_slope)
    x = np.array([1.0 if b % 2 else -1.0 for b in range(num_blocks)])
    covariate = PositionCovariate(x) if is_own_slope else None
    data_sets = stream.normal(size=(num_data_sets, num_blocks))
    below = np.array([estimate_mixture(data_set, covariate)[0].below(0.0) for data_set in data_sets])
    return 2 * np.minimum(below, 1 - below)


def calibration(found: np.ndarray) -> float:
    """The r with ``credibility_of(alpha, r)`` = the quantile of what may be missed, the least of all alphas."""
    candidates = []
    for alpha in ALPHAS:
        share, root = float(np.quantile(found, TOLERANCE * alpha)) / alpha, alpha**0.25
        candidates.append((share - root) / (1 - root))
    return max(0.0, min(candidates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-sets", type=int, default=40_000, metavar="N", help="for each row")
    asked = parser.parse_args()
    rows, table = [], {}
    for num_blocks in NUMBERS:
        pair = []
        for is_own_slope in (False, True):
            found = credibilities(num_blocks, is_own_slope=is_own_slope, num_data_sets=asked.data_sets)
            r = calibration(found)
            pair.append(round(r, 2))
            missed = {
                f"missed at {1 - alpha:.2%}, in %": f"{100 * np.mean(found < credibility_of(alpha, r)):.2f}"
                for alpha in (*ALPHAS, *OTHER_ALPHAS)
            }
            rows.append(
                {"blocks": num_blocks, "slope": "own" if is_own_slope else "none", "r": f"{r:.2f}"} | missed
            )
        table[num_blocks] = tuple(pair)
    show(rows, f"{asked.data_sets} data sets of normal noise for each row")
    for num_blocks, pair in table.items():
        print(f"    {num_blocks}: {pair},")


if __name__ == "__main__":
    main()
