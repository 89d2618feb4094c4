"""Is the verdict of ``benchctl micro bonus`` what it claims to be? Forward passes whose true times are known.

Estimates, intervals and the correction for several rows are those of benchctl; only the times are made. Shares are
in per cent with the 95 % interval of Clopper and Pearson. Ends with exit code 1 when a demand is refuted. The same
output every time.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.analysis.bonus import (
    BackfillComparison,
    BackfillVerdict,
    DesignRow,
    bonus_design,
    judge_backfill,
    points_of,
)
from benchctl.profile.choices import ForwardPoint, Mode, Phase
from benchmarks.common.harness import show
from benchmarks.verdict.shares import COVERS_AT_LEAST, SELDOM, Row, row

LAUNCH_NS: Final[Mapping[tuple[Phase, Mode], float]] = {
    ("decode", "graph"): 220_000.0,
    ("decode", "eager"): 870_000.0,
    ("prefill", "graph"): 300_000.0,
    ("prefill", "eager"): 1_000_000.0,
}
"""Time of a pass without rows."""
ROW_NS: Final = 2_000.0
SLOWED: Final = 1.3
BLOCK_LOG_SD: Final = 0.05


def true_ns(point: ForwardPoint, mode: Mode) -> float:
    """Launches, and the same time for each row."""
    return LAUNCH_NS[point.phase, mode] + ROW_NS * point.total_new_tokens


def modes_of(design: tuple[DesignRow, ...]) -> list[Mode]:
    """The modes of its passes, in the order of the design."""
    return list(dict.fromkeys(row.decode_mode for row in design))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """Experiments of one truth.

    Every pass is its truth times a factor of the block (5 %) and one of its own (``scatter``); a share of the
    passes is 30 % slower. With ``excess_ns``, the expanded decode is such that expansion costs that much more
    than the prefill pass of as many tokens without graphs.
    """

    design: tuple[DesignRow, ...]
    """Rows behind one context."""
    num_blocks: int = 8
    scatter: float = 0.01
    outlier_share: float = 0.0
    excess_ns: float | None = None

    def true_difference_ns(self, row: BackfillComparison) -> float:
        """Expansion minus prefill."""
        before, expanded, prefill = row.passes
        return self._truth()[expanded] - (true_ns(*before) + true_ns(*prefill))

    def times(self, stream: np.random.Generator) -> dict[tuple[ForwardPoint, Mode], dict[int, float]]:
        """Nanoseconds by pass and block of one experiment."""
        of_block = np.exp(BLOCK_LOG_SD * stream.normal(size=self.num_blocks))
        times = {}
        for key, truth_ns in self._truth().items():
            of_pass = np.exp(self.scatter * stream.normal(size=self.num_blocks))
            is_slowed = stream.random(self.num_blocks) < self.outlier_share
            values = truth_ns * of_block * of_pass * np.where(is_slowed, SLOWED, 1.0)
            times[key] = dict(enumerate(values.tolist()))
        return times

    def _truth(self) -> dict[tuple[ForwardPoint, Mode], float]:
        truth = {
            (point, mode): true_ns(point, mode)
            for point in points_of(self.design)
            for mode in modes_of(self.design)
        }
        for designed in self.design if self.excess_ns is not None else ():
            before, expanded, (prefill, _) = designed.passes
            truth[expanded] = true_ns(*before) + true_ns(prefill, "eager") + (self.excess_ns or 0.0)
        return truth


def verdicts(planted: Planted, num_experiments: int) -> Iterator[BackfillVerdict]:
    """The verdicts of that many experiments, the same every time."""
    for experiment in range(num_experiments):
        yield judge_backfill(planted.times(np.random.default_rng([4212, experiment])), planted.design)


def events_of(planted: Planted, verdict: BackfillVerdict) -> dict[str, bool]:
    """Truth covered by all rows together and by the first alone, and a way called cheaper, rightly or wrongly."""
    truths = [planted.true_difference_ns(row) for row in verdict.comparisons]
    covers = [
        row.difference_ns.low is not None
        and row.difference_ns.high is not None
        and row.difference_ns.low <= truth <= row.difference_ns.high
        for row, truth in zip(verdict.comparisons, truths, strict=True)
    ]
    right = ["expansion" if truth < 0 else "prefill" if truth > 0 else None for truth in truths]
    ways = [row.cheaper for row in verdict.comparisons]
    return {
        "all rows cover": all(covers),
        "first row covers": covers[0],
        "any wrong way": any(way not in {None, truth} for way, truth in zip(ways, right, strict=True)),
        "all ways named": None not in ways,
    }


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
