"""Forward passes whose true times are known, and what a verdict on backfill says about them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.analysis.bonus import (
    BackfillComparison,
    BackfillVerdict,
    DesignRow,
    judge_backfill,
    points_of,
)
from benchctl.profile.choices import ForwardPoint, Mode, Phase

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
        for row in self.design if self.excess_ns is not None else ():
            before, expanded, (prefill, _) = row.passes
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
