"""Results by node, where blocks ran on more than one: the ratio on each node, and a test whether nodes differ.

The verdict pools the blocks of all nodes. The test is the F test of the one-way layout on the logarithms of the
ratios of the blocks, which the position in the block is already removed from.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from scipy.stats import f_oneway

from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.pairing import PairedRuns, deciding_between
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, Estimator, RatioEstimate, SideRatio
from benchctl.analysis.validity.client import num_bunched
from benchctl.formats import change_of_ratio, count_of, p_value
from benchctl.records.record import RunRecord

_ROUNDING: Final = 1e-12
"""Log-ratios that are closer are equal."""


class NodeRow(NamedTuple):
    """One node in one metric of one cell."""

    node: str
    num_blocks: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricByNode:
    """One deciding metric in one cell by node. Invariant: at least two nodes."""

    label: str
    metric: str
    over_blocks: RatioEstimate
    """The estimate of the verdict."""
    rows: tuple[NodeRow, ...]
    p_value: float | None
    """Of the F test of equal nodes; None of a screening, and where no node has two blocks."""

    @property
    def blocks_interval(self) -> tuple[float, float] | None:
        """The interval of the verdict's ratio; None of one block."""
        low, high = self.over_blocks.ci_low, self.over_blocks.ci_high
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResults:
    """One variant against another by node. Invariant: its blocks ran on at least two nodes."""

    variant: str
    metrics: tuple[MetricByNode, ...]
    confidence: float

    @property
    def num_tests(self) -> int:
        return sum(metric.p_value is not None for metric in self.metrics)

    @property
    def differing(self) -> tuple[MetricByNode, ...]:
        """The metrics whose nodes differ beyond chance, over all tests (Bonferroni), the surest first."""
        alpha = (1 - self.confidence) / max(1, self.num_tests)
        tested = [(metric.p_value, metric) for metric in self.metrics if metric.p_value is not None]
        return tuple(metric for p, metric in sorted(tested, key=lambda each: each[0]) if p < alpha)


def results_by_node(
    cells: Iterable[tuple[PairedRuns, Sequence[str]]], confidence: float, estimator: Estimator | None = None
) -> NodeResults | None:
    """The deciding metrics of every cell by node; None where no cell has blocks on more than one node.

    A block counts whose two runs have the same node. Metrics that decide nothing because tokens came in bursts are
    left out, as their verdicts are.
    """
    metrics, variant = [], ""
    for paired, names in cells:
        node_of_block = _nodes_of(paired)
        for name in names if len(set(node_of_block.values())) > 1 else ():
            ratio = None if num_bunched(name, paired.runs) else paired.ratio(name, confidence, estimator)
            by_node = None if ratio is None else metric_by_node(paired.pair.label, name, ratio, node_of_block)
            if by_node is not None:
                variant = paired.pair.b.variant
                metrics.append(by_node)
    return NodeResults(variant=variant, metrics=tuple(metrics), confidence=confidence) if metrics else None


def nodes_of_variants(pairs: Iterable[PairedRuns], confidence: float) -> tuple[NodeResults, ...]:
    """One for each variant of a directory whose blocks ran on more than one node, in its primary metrics.

    None where the profile, which names them, cannot be read.
    """
    by_variant: dict[str, list[tuple[PairedRuns, Sequence[str]]]] = {}
    for paired in pairs:
        experiment = paired.a
        if experiment.profile_or_none is not None:
            named = tuple(dict.fromkeys(experiment.profile.primary_metrics))
            names = deciding_between(named, paired.pair, (experiment, experiment)).names
            roles = roles_of(names, is_forced=experiment.results.manifest.stop != "natural")
            deciding = [name for name, role in roles.items() if role == "deciding"]
            by_variant.setdefault(paired.pair.b.variant, []).append((paired, deciding))
    variants = (results_by_node(cells, confidence) for cells in by_variant.values())
    return tuple(results for results in variants if results is not None)


def metric_by_node(label: str, name: str, ratio: SideRatio, node_of_block: dict[int, str]) -> MetricByNode | None:
    """One metric by node; None where the blocks that know it ran on one."""
    log_ratios: dict[str, list[float]] = {}
    for block, log_ratio in zip(ratio.design.blocks, ratio.adjusted_log_ratios, strict=True):
        if block in node_of_block:
            log_ratios.setdefault(node_of_block[block], []).append(log_ratio)
    if len(log_ratios) < 2:
        return None
    rows = [
        NodeRow(node, len(logs), math.exp(math.fsum(logs) / len(logs))) for node, logs in sorted(log_ratios.items())
    ]
    return MetricByNode(
        label=label,
        metric=name,
        over_blocks=ratio.estimate,
        rows=tuple(rows),
        p_value=p_of_equal_nodes(list(log_ratios.values())),
    )


def p_of_equal_nodes(groups: Sequence[Sequence[float]]) -> float | None:
    """The p-value of the F test; None where a node is a block, and of too few blocks for a verdict."""
    num_blocks = sum(map(len, groups))
    if num_blocks < MIN_PAIRED_BLOCKS or num_blocks == len(groups):
        return None
    if all(max(group) - min(group) <= _ROUNDING for group in groups):  # no scatter, as of copied runs
        means = [group[0] for group in groups]
        return 1.0 if max(means) - min(means) <= _ROUNDING else 0.0
    return float(f_oneway(*groups).pvalue)


def node_sentence(results: NodeResults) -> str | None:
    """The metric in which nodes differ the most surely, and by how much; None where none differ beyond chance."""
    if not results.differing:
        return None
    first, *others = results.differing
    lowest, highest = (choose(first.rows, key=lambda row: row.ratio) for choose in (min, max))
    corrected = f", one of {results.num_tests} tests" if results.num_tests > 1 else ""
    more = f", and so in {count_of(len(others), 'more metric')} of these cells" if others else ""
    changes = [f"{change_of_ratio(row.ratio)} on {row.node}" for row in (lowest, highest)]
    return (
        f"nodes differ beyond chance: {first.metric} in {first.label} changes by {' and by '.join(changes)} "
        f"(p {p_value(first.p_value or 0.0)}{corrected}){more}"
    )


def node_of_run(record: RunRecord) -> str | None:
    """The name of the node that did a run; None where no machine did it, or none is recorded.

    Older records have the name of the host instead. Runs in virtual time without a server depend on no machine.
    """
    return None if record.is_simulated else record.node_name


def _nodes_of(paired: PairedRuns) -> dict[int, str]:
    """The node of each block of the pair whose two runs have the same one."""
    if paired.pair.pairing == "unpaired":
        return {}
    runs = zip(paired.pair.blocks, paired.pair.a_runs, paired.pair.b_runs, strict=True)
    nodes = {block: (node_of_run(a.record), node_of_run(b.record)) for block, a, b in runs}
    return {block: a for block, (a, b) in nodes.items() if a is not None and a == b}
