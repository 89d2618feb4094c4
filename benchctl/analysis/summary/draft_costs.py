"""The measured costs of speculation: time that a draft token and bonus tokens add to a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.steptime.speculation.acceptance import LEVEL, NUM_DRAWS
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.law import CostDraws, DraftCost


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCosts:
    """c and, where arms differ in bonus tokens, d of step ratio = 1 + K c + d, fitted in each block."""

    by_block: tuple[tuple[float, ...], ...]

    @property
    def draft(self) -> Estimate:
        """Time that one more draft token adds to a step, as a share of the baseline's."""
        return self._along([1.0, 0.0])

    @property
    def backfill(self) -> Estimate | None:
        """Time that bonus tokens add; None unless arms with and without them were measured."""
        return self._along([0.0, 1.0]) if self._has_backfill else None

    @property
    def cost(self) -> DraftCost:
        """The means over blocks. A negative one, which noise can give, counts as 0."""
        backfill = self.backfill
        return DraftCost(
            draft=max(0.0, self.draft.value), backfill=0.0 if backfill is None else max(0.0, backfill.value)
        )

    def step(self, num_draft_tokens: int, *, bonus: bool) -> Estimate:
        """1 + K c + d, without d for a server without bonus tokens or where it is unknown."""
        added = self._along([num_draft_tokens, 1.0 if bonus else 0.0])
        bounds = (None if bound is None else max(0.0, 1 + bound) for bound in (added.low, added.high))
        return Estimate(1 + added.value, *bounds)

    def draws(self, seed: int = 0) -> CostDraws | None:
        """Draws of the means: multivariate t with the covariance of the blocks. None for a single block."""
        costs, num_blocks = np.array(self.by_block), len(self.by_block)
        if num_blocks < 2:
            return None
        stream = np.random.default_rng([seed, num_blocks])
        covariance = np.atleast_2d(np.cov(costs, rowvar=False)) / num_blocks
        scale = np.sqrt((num_blocks - 1) / stream.chisquare(num_blocks - 1, NUM_DRAWS))
        normal = stream.multivariate_normal(np.zeros(costs.shape[1]), covariance, NUM_DRAWS)
        drawn = np.maximum(costs.mean(axis=0) + normal * scale[:, None], 0.0)
        return CostDraws(draft=drawn[:, 0], backfill=drawn[:, 1] if self._has_backfill else np.zeros(NUM_DRAWS))

    @property
    def _has_backfill(self) -> bool:
        return len(self.by_block[0]) > 1

    def _along(self, weights: Sequence[float]) -> Estimate:
        """Weighted sum of c and d with the interval over blocks."""
        sums = [sum(w * x for w, x in zip(weights, costs, strict=False)) for costs in self.by_block]
        mean = mean_over_blocks(sums)
        assert mean is not None  # noqa: S101  # there is at least one block
        return mean


def fit_costs(drafts: Mapping[str, tuple[int, bool]], ratios: Mapping[str, SideRatio]) -> FittedCosts | None:
    """The costs by least squares in each block that all arms share; None without one.

    ``drafts`` has the draft tokens of each arm and whether it has bonus tokens, ``ratios`` its step time over that
    of the baseline.
    """
    labels = [label for label in drafts if label in ratios]
    if not labels:
        return None
    has_both = all(len(set(values)) > 1 for values in zip(*(drafts[label] for label in labels), strict=True))
    design = np.array([drafts[label][: 2 if has_both else 1] for label in labels], dtype=float)
    of_blocks = [ratios[label].block_ratios for label in labels]
    shared = sorted(set.intersection(*(set(each) for each in of_blocks)))
    added = [np.array([each[block] - 1 for each in of_blocks], dtype=float) for block in shared]
    costs = tuple(tuple(float(cost) for cost in np.linalg.lstsq(design, each)[0]) for each in added)
    return FittedCosts(by_block=costs) if costs else None


def mean_over_blocks(values: Sequence[float | None]) -> Estimate | None:
    """Mean over blocks with the interval of Student's t; None where it is unknown in all of them."""
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    mean, num = fmean(known_values), len(known_values)
    if num < 2:
        return Estimate(mean)
    half = t_quantile((1 + LEVEL) / 2, num - 1) * float(np.std(known_values, ddof=1)) / num**0.5
    return Estimate(mean, mean - half, mean + half)
