"""Results by node, where blocks ran on more than one: the ratio of each node, which node differs from the
others, and the ratio of a node like these.

Results by node of every variant of a directory: those of its comparison with the baseline.
Findings about nodes: one whose ratios are not those of the others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.pairing import PairedRuns, deciding_between
from benchctl.analysis.findings import Finding
from benchctl.analysis.statistics.decide import holm_p_values
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, Estimator, RatioEstimate
from benchctl.analysis.statistics.intervals import StudentT
from benchctl.analysis.statistics.nodes import NodeEffects, NodeMean, node_of_run, ratio_by_node
from benchctl.analysis.validity.client import num_bunched
from benchctl.formats import change_in_interval, count_of, first_of, in_a_row, p_value
from benchctl.records.schema import current_metric_name

_MOST_OTHERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node in one metric of one cell; intervals are of ratios, None where the scatter is unknown."""

    node: str
    num_blocks: int
    ratio: float
    interval: tuple[float, float] | None
    against_others: float | None
    """This node's ratio over that of all blocks on the others."""
    against_interval: tuple[float, float] | None
    p_value: float | None
    """Of no such difference, corrected for all tests of the comparison; None where it cannot be tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricByNode:
    """One deciding metric in one cell by node."""

    label: str
    metric: str
    over_blocks: RatioEstimate
    """The estimate of the verdict."""
    effects: NodeEffects
    rows: tuple[NodeRow, ...]
    confidence: float
    num_tests: int = 0
    """Those of the whole comparison, for which p is corrected."""

    @property
    def over_nodes(self) -> tuple[float, tuple[float, float] | None] | None:
        """The ratio of a node like these with its interval; None where it cannot be told."""
        if self.effects.over_nodes is None:
            return None
        return math.exp(self.effects.over_nodes.centre), _ratios(self.effects.over_nodes, self.confidence)

    @property
    def blocks_interval(self) -> tuple[float, float] | None:
        """The interval of the verdict's ratio; None of one block."""
        low, high = self.over_blocks.ci_low, self.over_blocks.ci_high
        return None if low is None or high is None else (low, high)

    @property
    def between_sd(self) -> float | None:
        """Scatter between nodes: standard deviation of their log-ratios beyond that of their blocks."""
        variance = self.effects.between_variance
        return None if variance is None else math.sqrt(variance)

    @property
    def within_sd(self) -> float | None:
        """Scatter of the log-ratios of blocks on one node."""
        variance = self.effects.within_variance
        return None if variance is None else math.sqrt(variance)

    @property
    def differing(self) -> tuple[NodeRow, ...]:
        """The nodes that differ from the others beyond chance, the farthest first.

        They differ from all others, and from those that are nearer as well: a single node that differs pulls the
        mean of all towards itself, and the others would differ from that.
        """
        alpha = 1 - self.confidence
        farthest = sorted(range(len(self.rows)), key=lambda i: -abs(math.log(self.rows[i].against_others or 1.0)))
        differing = []
        for rank, i in enumerate(farthest):
            p, nearer = self.rows[i].p_value, farthest[rank + 1 :]
            if p is None or p >= alpha or not nearer:
                continue
            difference = self.effects.against(i, nearer) if rank else None
            if rank == 0 or (difference is not None and difference.p_value() * self.num_tests < alpha):
                differing.append(self.rows[i])
        return tuple(differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResults:
    """One variant against another by node. Invariant: its blocks ran on at least two nodes."""

    variant: str
    metrics: tuple[MetricByNode, ...]
    num_tests: int
    """Nodes, cells and deciding metrics that were tested: those for which p is corrected."""
    confidence: float

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({row.node for metric in self.metrics for row in metric.rows}))


def results_by_node(
    cells: Iterable[tuple[PairedRuns, Sequence[str]]], confidence: float, estimator: Estimator | None = None
) -> NodeResults | None:
    """The deciding metrics of every cell by node; None where no cell has blocks on more than one node.

    A block counts whose two runs have the same node. Metrics that decide nothing because tokens came in bursts are
    left out, as their verdicts are.
    """
    metrics: list[MetricByNode] = []
    variant = ""
    for paired, names in cells:
        node_of_block = _nodes_of(paired)
        if len(set(node_of_block.values())) > 1:
            variant = paired.pair.b.variant
            metrics += _metrics_of(paired, names, node_of_block, confidence, estimator)
    return correct_for_all_nodes(variant, metrics, confidence) if metrics else None


def node_sentence(results: NodeResults) -> str | None:
    """The foremost node that differs, where and by how much; None where none differs beyond chance."""
    foremost = [(metric, row) for metric in results.metrics for row in metric.differing[:1]]
    if not foremost:
        return None
    metric, row = min(foremost, key=lambda each: (each[1].p_value, -abs(math.log(each[1].against_others or 1.0))))
    names = in_a_row([r.node for r in metric.rows])
    subject = f"nodes {names} differ" if len(metric.rows) == 2 else f"node {row.node} differs from the others"
    there, apart = (row.ratio, row.interval), (row.against_others, row.against_interval)
    corrected = f", corrected for {results.num_tests} tests" if results.num_tests > 1 else ""
    return (
        f"{subject} beyond chance: {metric.metric} in {metric.label} changes by {change_in_interval(*there)} on "
        f"{row.node}, {change_in_interval(*apart)} against the blocks elsewhere (p {p_value(row.p_value or 0.0)}"
        f"{corrected}){_also(results, metric, row.node)}; {over_nodes_text(metric)}"
    )


def _also(results: NodeResults, foremost: MetricByNode, node: str) -> str:
    """Number of the other metrics in which a node differs, and the other nodes that differ."""
    elsewhere = [m for m in results.metrics if m is not foremost and node in {row.node for row in m.differing}]
    text = f", and so in {count_of(len(elsewhere), 'more metric')} of these cells" if elsewhere else ""
    others = {row.node for m in results.metrics for row in m.differing} - {node}
    if others and len(foremost.rows) > 2:
        verb = "differs" if len(others) == 1 else "differ"
        text += f"; {first_of(sorted(others), _MOST_OTHERS)} {verb}, too"
    return text


def over_nodes_text(metric: MetricByNode) -> str:
    """``the interval over nodes is +5.0% [-1.0%, +11.4%], over blocks +4.8% [+4.1%, +5.6%]``."""
    over_blocks = f"over blocks {change_in_interval(metric.over_blocks.ratio, metric.blocks_interval)}"
    if metric.over_nodes is None:
        return f"the interval over nodes is unknown, {over_blocks}"
    return f"the interval over nodes is {change_in_interval(*metric.over_nodes)}, {over_blocks}"


def _nodes_of(paired: PairedRuns) -> Mapping[int, str]:
    """The node of each block of the pair whose two runs have the same one."""
    if paired.pair.pairing == "unpaired":
        return {}
    runs = zip(paired.pair.blocks, paired.pair.a_runs, paired.pair.b_runs, strict=True)
    nodes = {block: (node_of_run(a.record), node_of_run(b.record)) for block, a, b in runs}
    return {block: a for block, (a, b) in nodes.items() if a is not None and a == b}


def _metrics_of(
    paired: PairedRuns,
    names: Sequence[str],
    node_of_block: Mapping[int, str],
    confidence: float,
    estimator: Estimator | None,
) -> Iterable[MetricByNode]:
    for name in names:
        ratio = None if num_bunched(name, paired.runs) else paired.ratio(name, confidence, estimator)
        if ratio is None:
            continue
        nodes = [node_of_block.get(block) for block in ratio.design.blocks]
        effects = ratio_by_node(ratio, nodes, paired.a.slopes_within_nodes.get(name))
        if effects is None or len(effects.nodes) < 2:
            continue
        yield metric_by_node(paired.pair.label, name, ratio.estimate, effects, confidence)


def metric_by_node(
    label: str, name: str, over_blocks: RatioEstimate, effects: NodeEffects, confidence: float
) -> MetricByNode:
    """One metric with its intervals, without p-values."""
    rows = tuple(_row(node, confidence) for node in effects.nodes)
    return MetricByNode(
        label=label, metric=name, over_blocks=over_blocks, effects=effects, rows=rows, confidence=confidence
    )


def _row(node: NodeMean, confidence: float) -> NodeRow:
    difference = node.difference
    return NodeRow(
        node=node.node,
        num_blocks=node.num_blocks,
        ratio=math.exp(node.log_ratio),
        interval=None if node.estimate is None else _ratios(node.estimate, confidence),
        against_others=None if difference is None else math.exp(difference.centre),
        against_interval=None if difference is None else _ratios(difference, confidence),
        p_value=None,
    )


def _ratios(estimate: StudentT, confidence: float) -> tuple[float, float] | None:
    ends = estimate.interval(confidence)
    return None if ends is None else (math.exp(ends[0]), math.exp(ends[1]))


def correct_for_all_nodes(variant: str, metrics: Sequence[MetricByNode], confidence: float) -> NodeResults:
    """The metrics with the p-values of their nodes, corrected together; a screening is not tested.

    Two nodes are one test: each is the other's others.
    """
    tests = [
        (m, i, node.difference.p_value())
        for m, metric in enumerate(metrics)
        for i, node in enumerate(metric.effects.nodes)
        if node.difference is not None and metric.effects.num_blocks >= MIN_PAIRED_BLOCKS
        if i == 0 or len(metric.rows) > 2
    ]
    corrected = holm_p_values([p for _, _, p in tests])
    by_test = {(m, i): p for (m, i, _), p in zip(tests, corrected, strict=True)}
    corrected_metrics = tuple(
        replace(
            metric,
            num_tests=len(tests),
            rows=tuple(
                replace(row, p_value=by_test.get((m, 0 if len(metric.rows) == 2 else i)))
                for i, row in enumerate(metric.rows)
            ),
        )
        for m, metric in enumerate(metrics)
    )
    return NodeResults(variant=variant, metrics=corrected_metrics, num_tests=len(tests), confidence=confidence)


def nodes_of_variants(pairs: Sequence[PairedRuns], confidence: float) -> tuple[NodeResults, ...]:
    """One for each variant whose blocks ran on more than one node; ``pairs`` are of one directory.

    None where the profile, which names the deciding metrics, cannot be read.
    """
    by_variant: dict[str, list[tuple[PairedRuns, Sequence[str]]]] = {}
    for paired in pairs:
        if paired.a.profile_or_none is not None:
            by_variant.setdefault(paired.pair.b.variant, []).append((paired, _deciding(paired)))
    variants = (results_by_node(cells, confidence) for cells in by_variant.values())
    return tuple(results for results in variants if results is not None)


def _deciding(paired: PairedRuns) -> list[str]:
    named = tuple(dict.fromkeys(map(current_metric_name, paired.a.profile.primary_metrics)))
    names = deciding_between(named, paired.pair, (paired.a, paired.b)).names
    roles = roles_of(names, is_forced=paired.a.results.manifest.stop != "natural")
    return [name for name, role in roles.items() if role == "deciding"]


def node_findings(variants: Iterable[NodeResults]) -> Iterator[Finding]:
    """A finding for each variant in whose comparison a node differs from the others beyond chance."""
    for results in variants:
        sentence, rows = node_sentence(results), [row for metric in results.metrics for row in metric.differing]
        if sentence is not None:
            numbers = {"num_nodes": float(len({row.node for row in rows})), "num_tests": float(results.num_tests)}
            yield Finding(code="node-differs", sentence=f"{results.variant}: {sentence}.", numbers=numbers)
