"""Is the verdict of ``benchctl micro bonus`` what it claims to be? Experiments whose truth is known.

Estimates, intervals and the correction for several rows are those of benchctl; only the times are made
(``planted_passes.py``). Shares are in per cent with the 95 % interval of Clopper and Pearson. Ends with exit code 1
when a demand is refuted. The same output every time.
"""

import argparse
import sys
from collections.abc import Iterator

from benchctl.analysis.bonus import bonus_design
from benchmarks.common.table import show
from benchmarks.verdict.planted_passes import Planted, events_of, verdicts
from benchmarks.verdict.shares import COVERS_AT_LEAST, SELDOM, Row, row

DESIGN = bonus_design((2, 10, 64), 256, ("eager",))
DEMANDS = {"all rows cover": COVERS_AT_LEAST, "any wrong way": SELDOM}


def cases() -> Iterator[Planted]:
    for num_blocks in (6, 8, 12):
        for scatter, outlier_share in ((0.01, 0.0), (0.05, 0.0), (0.02, 0.1)):
            yield Planted(design=DESIGN, num_blocks=num_blocks, scatter=scatter, outlier_share=outlier_share)
    for excess_ns in (-100_000.0, -20_000.0, 0.0, 20_000.0, 100_000.0):
        yield Planted(design=DESIGN, scatter=0.02, excess_ns=excess_ns)


def judged(planted: Planted, num_experiments: int) -> Row:
    excess = "-" if planted.excess_ns is None else f"{planted.excess_ns / 1000:+.0f}"
    condition = {
        "blocks": planted.num_blocks,
        "scatter": f"{planted.scatter:.0%}",
        "outliers": f"{planted.outlier_share:.0%}",
        "excess, us": excess,
    }
    return row(condition, (events_of(planted, verdict) for verdict in verdicts(planted, num_experiments)), DEMANDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000, help="of each row")
    num_experiments = parser.parse_args().experiments
    rows = [judged(planted, num_experiments) for planted in cases()]
    print(f"{num_experiments} experiments for each row; shares in % with their 95 % interval\n")
    show([each.cells() for each in rows])
    return int(any(each.failures for each in rows))


if __name__ == "__main__":
    sys.exit(main())
