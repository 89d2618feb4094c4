"""Is what is said of nodes true? Experiments on several nodes of which the truth is known.

Orders come from the planner, values from ``known_truth``, results by node from the code behind ``compare``. Each
node adds a normal effect of its own to the ratio of all arms and metrics. Shares are in per cent, with the 95 %
interval of Clopper and Pearson; a demand that is refuted ends the program with exit code 1. The same output every
time.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import t as student

from benchctl.analysis.metrics.table import METRICS as TABLE
from benchctl.analysis.statistics.estimate import BlockDesign, PooledSlope, metric_ratio
from benchctl.analysis.statistics.nodes import OWN_SCATTER_BLOCKS, NodeEffects, ratio_by_node
from benchctl.analysis.statistics.position_effect import PositionEffects
from benchctl.analysis.summary.nodes import NodeResults, correct_for_all_nodes, metric_by_node
from benchmarks.verdict.known_truth import CONFIDENCE, METRICS, Experiment, Made, make, named_stream, slopes_of
from benchmarks.verdict.sections import run_sections
from benchmarks.verdict.shares import COVERS, SELDOM, Demand, Row, row

SCATTER: Final = 0.02
BAD_NOISE: Final = "outliers, 10 % by 30 %"
LAYOUTS: Final = ((4, 4, 4), (2, 3, 7), (1, 1, 10), (3,) * 6, (1, 2, 3, 4, 5, 6), (2,) * 12, (2,) * 11 + (14,))
"""Blocks of each node."""
_OVER: Final = Demand(low=0.93, high=0.98)
"""With very unequal nodes and no scatter between them the interval is cautious."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How blocks are spread over nodes, and what nodes do."""

    counts: tuple[int, ...]
    between_sd: float = 0.0
    shift: float = 0.0
    """Added to the ratio on the first node."""
    noisy: float = 1.0
    """Scatter of the blocks of the first node, in those of the others."""

    @property
    def text(self) -> str:
        """``2+3+7``, or ``12 of 2`` for equal ones."""
        equal = len(set(self.counts)) == 1
        return f"{len(self.counts)} of {self.counts[0]}" if equal else "+".join(map(str, self.counts))


def results_of(made: Made, nodes: Nodes, stream: np.random.Generator) -> NodeResults:
    """One experiment, by node: blocks go to nodes at random."""
    node_of = stream.permutation(np.repeat(np.arange(len(nodes.counts)), nodes.counts))
    effects = stream.normal(0, nodes.between_sd, len(nodes.counts))
    effects[0] += nodes.shift
    extra = stream.normal(0, SCATTER * np.sqrt(nodes.noisy**2 - 1), made.num_blocks) * (node_of == 0)
    factors = np.exp(effects[node_of] + extra)
    experiment = make(made, stream)
    (first, *later), names = experiment.arms, METRICS[: made.num_metrics]
    others = tuple(
        tuple({name: run[name] * factor for name in run} for run, factor in zip(arm, factors, strict=True))
        for arm in later
    )
    return by_node(Experiment((first, *others), experiment.positions), [f"n{i}" for i in node_of], names, made)


def by_node(experiment: Experiment, nodes: Sequence[str], names: Sequence[str], made: Made) -> NodeResults:
    """What ``compare`` says of an experiment by node."""
    blocks, slopes = tuple(range(made.num_blocks)), slopes_of(experiment, names)
    (a, *others), (first, *later) = experiment.arms, experiment.positions
    metrics = []
    for name in names:
        within = slope_within(experiment, nodes, name)
        for i, (b, own) in enumerate(zip(others, later, strict=True)):
            design = BlockDesign(blocks, tuple(np.subtract(own, first).tolist()))
            sides = [[run[name] for run in side] for side in (a, b)]
            ratio = metric_ratio(name, sides[0], sides[1], design, slopes, CONFIDENCE, made.estimator)
            effects = None if ratio is None else ratio_by_node(ratio, nodes, within)
            if ratio is not None and effects is not None:
                metrics.append(metric_by_node(str(i), TABLE[name].name, ratio.estimate, effects, CONFIDENCE))
    return correct_for_all_nodes("b", metrics, CONFIDENCE)


def slope_within(experiment: Experiment, nodes: Sequence[str], name: str) -> PooledSlope | None:
    """The effect of one position later, each arm with a level of its own on every node."""
    keys = [
        ((block, f"{arm} on {nodes[block]}"), position, experiment.arms[arm][block][name])
        for arm, positions in enumerate(experiment.positions)
        for block, position in enumerate(positions)
    ]
    effects = PositionEffects({key: position for key, position, _ in keys})
    return effects.log_slope({key: value for key, _, value in keys})


def many(made: Made, nodes: Nodes, n: int) -> Iterator[NodeResults]:
    stream = named_stream("nodes", made, nodes)
    for _ in range(n):
        yield results_of(made, nodes, stream)


def over_nodes(n: int) -> Iterator[Row]:
    for counts in LAYOUTS:
        for share in (0.0, 0.5, 1.0, 2.0):
            nodes = Nodes(counts=counts, between_sd=share * SCATTER)
            made = Made(num_blocks=sum(counts), estimator="mean")
            events = (
                {
                    "over nodes": _holds(results.metrics[0].over_nodes[1]),
                    "Hartung-Knapp": _holds(hartung_knapp(results.metrics[0].effects)),
                    "over blocks": _holds(results.metrics[0].blocks_interval),
                }
                for results in many(made, nodes, n)
                if results.metrics[0].over_nodes is not None
            )
            condition = {"blocks of nodes": nodes.text, "between nodes": f"{share:g} x scatter"}
            yield row(condition, events, {"over nodes": _OVER if share == 0 else COVERS})


def hartung_knapp(effects: NodeEffects) -> tuple[float, float]:
    """The interval with weights 1 / (tau^2 + s^2 / n_i) and the variance of Hartung and Knapp."""
    means = np.array([node.log_ratio for node in effects.nodes])
    within = (effects.within_variance or 0.0) * np.diag(np.array(effects.factors))
    weights = 1 / ((effects.between_variance or 0.0) + within)
    centre = float(weights @ means / weights.sum())
    squared = float(weights @ (means - centre) ** 2) / (len(means) - 1) / weights.sum()
    half = student.ppf((1 + CONFIDENCE) / 2, len(means) - 1) * np.sqrt(squared)
    return float(np.exp(centre - half)), float(np.exp(centre + half))


def false_warnings(n: int) -> Iterator[Row]:
    for noise in ("gaussian", "heavy tail", "linear drift", BAD_NOISE):
        for counts in ((4, 4), (4, 4, 4), (2, 3, 7), (2,) * 6, (8, 8)):
            for num_arms in (2, 4):
                nodes = Nodes(counts=counts)
                made = Made(noise=noise, num_blocks=sum(counts), num_arms=num_arms, num_metrics=3)
                condition = {"noise": noise, "blocks of nodes": nodes.text, "arms": num_arms}
                demands = {"a node called different": SELDOM} if noise != BAD_NOISE else {}
                yield row(condition, called(made, nodes, n), demands)


def noisy_node(n: int) -> Iterator[Row]:
    for counts in ((2,) * 6, (4, 4, 4), (6, 6), (8, 8), (6, 6, 6)):
        nodes = Nodes(counts=counts, noisy=3.0)
        made = Made(num_blocks=sum(counts), num_metrics=3)
        demands = {"a node called different": SELDOM} if min(counts) >= OWN_SCATTER_BLOCKS else {}
        yield row({"blocks of nodes": nodes.text}, called(made, nodes, n), demands)


def called(made: Made, nodes: Nodes, n: int) -> Iterator[dict[str, bool]]:
    return ({"a node called different": bool(_names(results))} for results in many(made, nodes, n))


def power(n: int) -> Iterator[Row]:
    for counts in ((4, 4), (8, 8), (4, 4, 4), (8, 8, 8), (3,) * 6, (2,) * 12):
        for shift in (1, 2, 3):
            nodes = Nodes(counts=counts, shift=shift * SCATTER)
            made = Made(num_blocks=sum(counts), num_arms=4, num_metrics=3, are_metrics_alike=True)
            events = (
                {
                    "the node is named": "n0" in _names(results),
                    "another is, too": len(counts) > 2 and bool(_names(results) - {"n0"}),
                }
                for results in many(made, nodes, n)
            )
            demands = {"another is, too": SELDOM} if len(counts) > 2 else {}
            yield row({"blocks of nodes": nodes.text, "node differs by": f"{shift} x scatter"}, events, demands)


def _holds(interval: tuple[float, float] | None) -> bool:
    return interval is not None and interval[0] <= 1 <= interval[1]


def _names(results: NodeResults) -> set[str]:
    return {row.node for metric in results.metrics for row in metric.differing}


SECTIONS: Final = {
    "over": (over_nodes, f"intervals for the ratio of a node like these, scatter of blocks {SCATTER:.0%}"),
    "false": (false_warnings, "equal nodes, three metrics in every arm"),
    "noisy": (noisy_node, "equal ratios, but the blocks of one node scatter three times as much"),
    "power": (power, "one node differs, three metrics that say nearly the same, three arms"),
}


if __name__ == "__main__":
    sys.exit(run_sections(__doc__, SECTIONS, num_experiments=1000))
