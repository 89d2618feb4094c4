"""Block log-ratios by the node that measured them: a ratio for each node, and the ratio of a node like these.

Nodes of runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, PooledSlope, SideRatio
from benchctl.analysis.statistics.intervals import StudentT
from benchctl.analysis.statistics.robust import PositionCovariate
from benchctl.records.record import RunRecord

Floats: TypeAlias = NDArray[np.float64]

Untold: TypeAlias = Literal["one-node", "one-block-per-node", "order"]
"""Why nodes cannot be told apart: there is one; no node has two blocks, so that a node is a block; on each node the
arms ran in one order."""

OWN_SCATTER_BLOCKS: Final = MIN_PAIRED_BLOCKS
"""From so many blocks on, a node's interval comes from their own scatter."""
_ROUNDING: Final = 1e-12
"""Log-ratios that are closer are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMean:
    """The blocks of one node."""

    node: str
    num_blocks: int
    log_ratio: float
    estimate: StudentT | None
    """The log-ratio with its uncertainty; None where no scatter within nodes is known."""
    difference: StudentT | None
    """Log-ratio of this node less that of all blocks of the others; None where nodes cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesTest:
    """The F test of equal nodes."""

    statistic: float
    df_between: float
    df_within: float

    @property
    def p_value(self) -> float:
        return float(fdtrc(self.df_between, self.df_within, self.statistic))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEffects:
    """One ratio by node, in the order of their names."""

    nodes: tuple[NodeMean, ...]
    over_nodes: StudentT | None
    """The log-ratio of a node like these; None for one node."""
    within_variance: float | None
    """s^2 of the log-ratio of a block; None where no node has two blocks."""
    between_variance: float | None
    """tau^2 of the log-ratio of a node; None where it cannot be told from that of blocks."""
    test: NodesTest | None
    """None where nodes cannot be told apart, or all blocks are equal."""
    reason: Untold | None
    """Why nodes cannot be told apart; None where they can."""
    factors: tuple[tuple[float, ...], ...] = ()
    """V."""

    @property
    def num_blocks(self) -> int:
        return sum(node.num_blocks for node in self.nodes)

    def against(self, index: int, others: Sequence[int]) -> StudentT | None:
        """The log-ratio of one node less that of all blocks of others; None where nodes cannot be told apart."""
        if self.within_variance is None or self.test is None:
            return None
        contrast = np.zeros(len(self.nodes))
        counts = np.array([self.nodes[i].num_blocks for i in others])
        contrast[index], contrast[list(others)] = 1, -counts / counts.sum()
        centre = float(contrast @ [node.log_ratio for node in self.nodes])
        error = math.sqrt(self.within_variance * float(contrast @ np.asarray(self.factors) @ contrast))
        return StudentT(centre, error, self.test.df_within)

    @property
    def num_differences(self) -> int:
        """Tests of single nodes; with two nodes both are the same one."""
        number = sum(node.difference is not None for node in self.nodes)
        return min(number, 1) if len(self.nodes) == 2 else number


def ratio_by_node(ratio: SideRatio, nodes: Sequence[str | None], within: PooledSlope | None) -> NodeEffects | None:
    """The effects of nodes on the ratio of two arms; None where no block has a node.

    ``nodes`` has the node of each block of the ratio; blocks without one are left out. ``within`` is the effect of
    one position later, estimated within nodes; it counts where the ratio is one at equal positions, and is None
    where nodes and order cannot be told apart.
    """
    placed = [(i, node) for i, node in enumerate(nodes) if node is not None]
    if not placed:
        return None
    log_ratios, names = [ratio.adjusted_log_ratios[i] for i, _ in placed], [node for _, node in placed]
    if ratio.estimate.position_effect is None or ratio.design.positions is None:
        return node_effects(log_ratios, names)
    if within is None:
        return node_effects(log_ratios, names, is_ordered_by_node=True)
    x = np.asarray([ratio.design.positions[i] for i, _ in placed], dtype=float)
    measured = np.asarray([ratio.log_ratios[i] for i, _ in placed])
    covariate = PositionCovariate(x, within.information)
    return node_effects((measured - within.log_per_position * x).tolist(), names, covariate)


def node_effects(
    log_ratios: Sequence[float],
    nodes: Sequence[str],
    covariate: PositionCovariate | None = None,
    *,
    is_ordered_by_node: bool = False,
) -> NodeEffects:
    """The effects of nodes on log-ratios of at least one block, with the node of each block.

    The effect of ``covariate``, whose information is known, is already removed from the log-ratios.
    ``is_ordered_by_node``: the order of the arms does not change on a node.
    """
    names = sorted(set(nodes))
    blocks = _Blocks.of(log_ratios, [names.index(node) for node in nodes], covariate)
    reason, scatter = blocks.why_untold(is_ordered_by_node=is_ordered_by_node), blocks.scatter()
    means, counts, factors = blocks.means(), blocks.counts, blocks.factors()
    variance = None if scatter is None else scatter.variance
    is_told = reason is None and scatter is not None
    return NodeEffects(
        nodes=tuple(
            NodeMean(
                node=name,
                num_blocks=int(counts[i]),
                log_ratio=float(means[i]),
                estimate=blocks.mean_of(i, scatter),
                difference=blocks.difference_of(i, scatter) if is_told and scatter is not None else None,
            )
            for i, name in enumerate(names)
        ),
        over_nodes=None if reason in {"one-node", "order"} else _over_nodes(means, factors, variance or 0.0),
        within_variance=variance,
        between_variance=_between(means, factors, variance) if is_told and variance is not None else None,
        test=_test(means, factors, scatter) if is_told and scatter is not None else None,
        reason=reason,
        factors=tuple(tuple(row) for row in factors.tolist()),
    )


@dataclass(frozen=True, slots=True)
class _Scatter:
    """Variance of the log-ratio of a block, and its degrees of freedom."""

    variance: float
    df: float


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Values of blocks with the index of the node of each, and the positions whose slope was removed from them."""

    values: Floats
    node_of: NDArray[np.intp]
    x: Floats
    information: float
    """On the slope, as in ``PooledSlope``; infinite without one."""
    own_share: float

    @classmethod
    def of(
        cls, log_ratios: Sequence[float], node_of: Sequence[int], covariate: PositionCovariate | None
    ) -> "_Blocks":
        values = np.asarray(log_ratios, dtype=float)
        if np.ptp(values) <= _ROUNDING:
            values = np.full(len(values), values[0])
        if covariate is None or not covariate.information:
            return cls(values, np.asarray(node_of), np.zeros(len(values)), math.inf, 0.0)
        x, nodes = covariate.x, np.asarray(node_of)
        within = math.fsum(_squares(x[nodes == i]) for i in np.unique(nodes))
        return cls(values, nodes, x, covariate.information, min(1.0, within / 2 / covariate.information))

    @property
    def counts(self) -> NDArray[np.intp]:
        """Blocks of each node."""
        return np.bincount(self.node_of)

    def means(self) -> Floats:
        """The mean of each node; of equal blocks exactly their value."""
        sums = np.bincount(self.node_of, weights=self.values - self.values[0])
        means: Floats = self.values[0] + sums / self.counts
        return means

    def scatter(self) -> _Scatter | None:
        """s^2 pooled over nodes; None where no degree of freedom is left."""
        df = len(self.values) - len(self.counts) - self.own_share
        return _Scatter(self._squares_within(self.values) / df, df) if df > 0 else None

    def factors(self) -> Floats:
        """V: the covariance of the node means, divided by the variance of a block."""
        x = np.bincount(self.node_of, weights=self.x) / self.counts
        return np.diag(1 / self.counts) + np.outer(x, x) / (2 * self.information)

    def why_untold(self, *, is_ordered_by_node: bool) -> Untold | None:
        """None where nodes can be told apart."""
        if len(self.counts) < 2:
            return "one-node"
        if max(self.counts) == 1 or self.scatter() is None:
            return "one-block-per-node"
        return "order" if is_ordered_by_node else None

    def mean_of(self, index: int, pooled: _Scatter | None) -> StudentT | None:
        """The mean of one node; None where neither its own nor a common scatter is known."""
        on_node = self.node_of == index
        scatter = self._own_scatter(on_node, 1) or pooled
        if scatter is None:
            return None
        factor = 1 / int(on_node.sum()) + self.x[on_node].mean() ** 2 / (2 * self.information)
        return StudentT(float(self.means()[index]), math.sqrt(scatter.variance * factor), scatter.df)

    def difference_of(self, index: int, pooled: _Scatter) -> StudentT:
        """The mean of one node less that of all blocks elsewhere."""
        here, elsewhere = self.node_of == index, self.node_of != index
        own, others = self._own_scatter(here, 1), self._own_scatter(elsewhere, len(self.counts) - 1)
        apart = float(self.x[here].mean() - self.x[elsewhere].mean())
        of_slope = pooled.variance * apart**2 / (2 * self.information)
        if own is None or others is None:
            own = others = pooled
        parts = [(side.variance / int(on.sum()), side.df) for side, on in ((own, here), (others, elsewhere))]
        squared = sum(part for part, _ in parts)
        df = pooled.df
        if own is not pooled and squared > 0:
            df = squared**2 / sum(part**2 / part_df for part, part_df in parts)
        centre = float(self.values[here].mean() - self.values[elsewhere].mean())
        centre = 0.0 if abs(centre) <= _ROUNDING else centre
        return StudentT(centre, math.sqrt(squared + of_slope), df)

    def _own_scatter(self, on: NDArray[np.bool_], num_nodes: int) -> _Scatter | None:
        """s^2 of some of the blocks, which are on ``num_nodes`` nodes; None where they are too few."""
        count = int(on.sum())
        df = count - num_nodes - self.own_share * count / len(self.values)
        if count < OWN_SCATTER_BLOCKS or df < OWN_SCATTER_BLOCKS - 2:
            return None
        return _Scatter(self._squares_within(self.values, on) / df, df)

    def _squares_within(self, values: Floats, on: NDArray[np.bool_] | None = None) -> float:
        """Sum of squares around the means of the nodes."""
        chosen = np.full(len(values), fill_value=True) if on is None else on
        indices = np.unique(self.node_of[chosen])
        return math.fsum(_squares(values[chosen & (self.node_of == i)]) for i in indices)


def _squares(values: Floats) -> float:
    """Sum of squares around the mean; 0 where all values are equal but for rounding."""
    if np.ptp(values) <= _ROUNDING:
        return 0.0
    off = values - values.mean()
    return float(off @ off)


def _over_nodes(means: Floats, factors: Floats, variance: float) -> StudentT:
    """The mean of the node means, each counted once, with k - 1 degrees of freedom.

    The error of the slope moves all means together and is not in their scatter: it is added.
    """
    k = len(means)
    of_slope = variance * max(0.0, float(factors.sum() - np.trace(factors)) / (k * (k - 1)))
    error = math.sqrt(_squares(means) / (k - 1) / k + of_slope)
    return StudentT(float(means.mean()) if error > 0 else float(means[0]), error, k - 1)


def _between(means: Floats, factors: Floats, variance: float) -> float:
    """tau^2 by the analysis of variance."""
    weights = np.linalg.inv(factors)
    sums = weights.sum(axis=0)
    n_0 = float(np.trace(weights) - sums @ sums / sums.sum()) / (len(means) - 1)
    return max(0.0, (_mean_square_between(means, factors) - variance) / n_0)


def _test(means: Floats, factors: Floats, scatter: _Scatter) -> NodesTest | None:
    """F of equal nodes; None where all blocks are equal."""
    between = _mean_square_between(means, factors)
    if scatter.variance == 0 and between == 0:
        return None
    statistic = between / scatter.variance if scatter.variance > 0 else math.inf
    return NodesTest(statistic=statistic, df_between=len(means) - 1, df_within=scatter.df)


def _mean_square_between(means: Floats, factors: Floats) -> float:
    """MSB: without positions sum n_i (y_i - y)^2 / (k - 1)."""
    if np.ptp(means) <= _ROUNDING:
        return 0.0
    weights = np.linalg.inv(factors)
    off = means - float(weights.sum(axis=0) @ means) / float(weights.sum())
    return float(off @ weights @ off) / (len(means) - 1)


def node_of_run(record: RunRecord) -> str | None:
    """The name of the node that did a run; None where no machine did it, or none is recorded.

    Older records have the name of the host instead. Runs in virtual time without a server depend on no machine.
    """
    return None if record.is_simulated else record.node_name
