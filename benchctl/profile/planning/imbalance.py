"""The imbalance of an experiment's order: of its plan, or of those of its runs that count."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchctl.records.directory import arm_label
from benchctl.records.manifest import PlannedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """All three are 0 where the order is balanced."""

    position_difference: float
    """Largest distance between the mean position of an arm and that of the baseline in the same blocks. A machine
    that changes evenly while a block runs moves an uncorrected estimate by so many positions."""
    position_spread: int
    """How much oftener an arm runs in one position than in another, at most."""
    predecessor_spread: int
    """How much oftener one arm runs directly after a certain other arm than another pair does, at most."""

    @property
    def is_balanced(self) -> bool:
        return self == Imbalance(position_difference=0.0, position_spread=0, predecessor_spread=0)


def imbalance_of(runs: Iterable[PlannedRun], baseline: str) -> Imbalance:
    """The imbalance of ``runs``: a whole plan, or those that are left of it when blocks or runs do not count.

    ``baseline`` is the name of its variant. Positions are those of the plan; what ran before a run is the run in
    the position before, where it is one of ``runs``.
    """
    blocks: dict[int, dict[int, str]] = defaultdict(dict)
    baselines: set[str] = set()
    for run in runs:
        arm = arm_label(run.variant, run.cell)
        blocks[run.block][run.position] = arm
        if run.variant == baseline:
            baselines.add(arm)
    orders = list(blocks.values())
    arms = sorted({arm for order in orders for arm in order.values()})
    positions = Counter((arm, position) for order in orders for position, arm in order.items())
    predecessors = Counter(
        (order[earlier], order[later])
        for order in orders
        for earlier, later in pairwise(sorted(order))
        if later == earlier + 1
    )
    used = range(max((position for _, position in positions), default=-1) + 1)
    return Imbalance(
        position_difference=max((_mean_difference(orders, arm, baselines) for arm in arms), default=0.0),
        position_spread=max((_spread([positions[arm, p] for p in used]) for arm in arms), default=0),
        predecessor_spread=_spread([predecessors[a, b] for a in arms for b in arms if a != b]),
    )


def _mean_difference(orders: Iterable[Mapping[int, str]], arm: str, baselines: Iterable[str]) -> float:
    """The distance of the mean position of ``arm`` from that of the baseline, over the blocks that have both."""
    differences = []
    for order in orders:
        position_of = {name: position for position, name in order.items()}
        if arm in position_of:
            differences += [position_of[arm] - position_of[name] for name in baselines if name in position_of]
    return abs(sum(differences) / len(differences)) if differences else 0.0


def _spread(counts: Sequence[int]) -> int:
    return max(counts, default=0) - min(counts, default=0)
