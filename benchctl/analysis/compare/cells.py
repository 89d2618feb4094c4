"""A pair of arms beside its metrics: results by node, its answers, and its time divided into parts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from benchctl.analysis.attribution.breakdown import RunTimeBreakdown
from benchctl.analysis.attribution.decomposition import (
    METRIC_OF,
    NO_MODEL,
    Decomposition,
    decompose,
)
from benchctl.analysis.attribution.estimate import PairDesign, SourcedModel
from benchctl.analysis.compare.accuracy import (
    MARGIN_POINTS,
    DivergenceComparison,
    compare_divergence,
    compare_quality,
)
from benchctl.analysis.compare.judge import judge_named
from benchctl.analysis.compare.metric import roles_of
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.observed import modelled_run
from benchctl.analysis.experiment.pairing import ArmPair, deciding_between
from benchctl.analysis.metrics.arrivals import num_bunched
from benchctl.analysis.statistics.estimate import (
    MIN_PAIRED_BLOCKS,
    PooledSlope,
    RatioEstimate,
    SideRatio,
)
from benchctl.errors import UsageError
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RunRecord
from benchctl.units import change_of_ratio, count_of, p_value

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


def results_by_node(cells: Iterable[tuple[ArmPair, Sequence[str]]]) -> NodeResults | None:
    """The deciding metrics of every cell by node; None where no cell has blocks on more than one node.

    A block counts whose two runs have the same node. Metrics that decide nothing because tokens came in bursts are
    left out, as their verdicts are.
    """
    metrics: list[MetricByNode] = []
    variant, confidence = "", 0.0
    for pair, names in cells:
        node_of_block = _nodes_of(pair)
        for name in names if len(set(node_of_block.values())) > 1 else ():
            ratio = None if num_bunched(name, pair.runs) else pair.ratio(name)
            by_node = None if ratio is None else metric_by_node(pair.label, name, ratio, node_of_block)
            if by_node is not None:
                variant, confidence = pair.b.variant, pair.confidence
                metrics.append(by_node)
    return NodeResults(variant=variant, metrics=tuple(metrics), confidence=confidence) if metrics else None


def nodes_of_variants(pairs: Iterable[ArmPair]) -> tuple[NodeResults, ...]:
    """One for each variant of a directory whose blocks ran on more than one node, in its primary metrics.

    None where the profile, which names them, cannot be read.
    """
    by_variant: dict[str, list[tuple[ArmPair, Sequence[str]]]] = {}
    for pair in pairs:
        experiment = pair.sides[0]
        if experiment.profile_or_none is not None:
            named = tuple(dict.fromkeys(experiment.profile.primary_metrics))
            roles = roles_of(deciding_between(named, pair), is_forced=experiment.results.manifest.stop != "natural")
            deciding = [name for name, role in roles.items() if role == "deciding"]
            by_variant.setdefault(pair.b.variant, []).append((pair, deciding))
    variants = map(results_by_node, by_variant.values())
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
    from scipy.stats import f_oneway  # noqa: PLC0415 - 0.3 s, and few results are of several nodes

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


def _nodes_of(pair: ArmPair) -> dict[int, str]:
    """The node of each block of the pair whose two runs have the same one."""
    if pair.pairing == "unpaired":
        return {}
    runs = zip(pair.blocks, pair.a_runs, pair.b_runs, strict=True)
    nodes = {block: (node_of_run(a.record), node_of_run(b.record)) for block, a, b in runs}
    return {block: a for block, (a, b) in nodes.items() if a is not None and a == b}


def compare_answers(
    sides: tuple[Experiment, Experiment],
    pairs: Sequence[ArmPair],
    judge_name: str | None,
    margin_points: float | None,
) -> Iterator[dict[str, Any]]:
    """Quality and divergence of the answers of each pair: the fields of ``CellComparison`` on them.

    ``judge_name`` None: ``json`` where requests ask for JSON and have no gold answers, else ``numeric``. Quality
    decides where ``margin_points`` is given; raises UsageError where it must and no answer can be judged.
    """
    runs_on = _why_past_end(sides)
    has_gold = any(request.answer is not None for request in sides[0].results.requests)
    fitting = "json" if not has_gold and any(map(_asks_for_json, sides)) else "numeric"
    judge = judge_named(judge_name or fitting, runs_on=runs_on is not None)
    no_answers = None
    if judge.needs_gold and not has_gold:
        no_answers = "no request of this workload has a gold answer (those of gsm8k and generated have)"
    elif any(_is_simulated(pair) for pair in pairs):
        no_answers = "a simulator invents its texts; measure a real engine"
    past_end = runs_on if judge.needs_gold else None
    if margin_points is not None and (reason := no_answers or past_end):
        raise UsageError(f"--quality-margin cannot decide: {reason}")
    margin = MARGIN_POINTS if margin_points is None else margin_points
    for pair in pairs:
        quality, a, b = None, pair.a_runs, pair.b_runs
        if no_answers is None and past_end is None:
            requests = sides[0].results.sets.of(pair.a.cell)
            quality = compare_quality(requests, a, b, judge, margin, pair.confidence)
        yield {
            "quality": quality,
            "quality_note": past_end if no_answers is None else None,
            "is_quality_deciding": margin_points is not None,
            "divergence": _divergence(pair),
        }


def _asks_for_json(side: Experiment) -> bool:
    settings = (side.settings(run.record) for run in side.results.runs)
    return any(each is not None and each.request.asks_for_json for each in settings)


def _is_simulated(pair: ArmPair) -> bool:
    return any(run.record.is_virtual for run in (*pair.a_runs, *pair.b_runs))


def _why_past_end(sides: tuple[Experiment, Experiment]) -> str | None:
    """The reason why answers are not judged although there are gold answers; None where they are."""
    for results in (side.results for side in sides):
        if results.manifest.stop == "forced":
            return (
                f"{results.path} was measured with stop: forced, where answers run on past their end; "
                "measure with stop: natural or replay-natural"
            )
    return None


def _divergence(pair: ArmPair) -> DivergenceComparison | None:
    """Divergence with the sampling temperature that all sides share: 0 where a single candidate remains."""
    if _is_simulated(pair):
        return None
    runs_by_side = zip(pair.sides, (pair.a_runs, pair.b_runs), strict=True)
    settings = [side.settings(runs[0].record) for side, runs in runs_by_side if runs]
    temperatures = {s if s is None else 0.0 if s.sampling.top_k == 1 else s.sampling.temperature for s in settings}
    return compare_divergence(pair.a_runs, pair.b_runs, temperatures.pop() if len(temperatures) == 1 else None)


def decompose_pair(paired: ArmPair, model: SourcedModel | str = NO_MODEL) -> Decomposition | None:
    """The decomposition of one cell; ``model`` explains its steps, or is the reason why none does."""
    a, b = _break_down_runs(paired, model)
    compared = {name: paired.ratio(name) for name in ("wall_s", *METRIC_OF.values())}
    ratios = {name: ratio for name, ratio in compared.items() if ratio is not None}
    return decompose(a, b, _design_of_steps(paired), paired.sides[0].results.manifest.stop, ratios, model)


def _design_of_steps(paired: ArmPair) -> PairDesign:
    """The design for times of steps; without positions if these have no effect."""
    slope = paired.sides[0].position_slope("step_ms", paired.a.cell) if paired.is_ordered else None
    return PairDesign(
        is_paired=paired.pairing != "unpaired",
        confidence=paired.confidence,
        positions=None if slope is None else paired.design.positions,
        slope=None if slope is None else PooledSlope(0.0, slope.information),
    )


def _break_down_runs(
    paired: ArmPair, model: SourcedModel | str
) -> tuple[list[RunTimeBreakdown], list[RunTimeBreakdown]]:
    """The runs of both sides at the middle of their blocks.

    Two arms estimate the effect on the wall time with its ratio, so that the wall time stays as measured here.
    """

    def break_down(run: LoadedRun, side: Experiment) -> RunTimeBreakdown:
        breakdown = side.run_time(run)
        if isinstance(model, SourcedModel):
            breakdown = replace(breakdown, modelled=modelled_run(side, run, model))
        if not paired.is_ordered:
            return breakdown
        wall = side.position_scale(run, "wall_s") if side.is_pooled(run.record.cell) else 1.0
        return breakdown.scaled(wall=wall, step=side.position_scale(run, "step_ms"))

    a = [break_down(run, paired.sides[0]) for run in paired.a_runs]
    return a, [break_down(run, paired.sides[1]) for run in paired.b_runs]
