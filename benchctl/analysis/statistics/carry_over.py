"""Carry-over: what the loads of one server leave to those that come after them.

Least squares of logarithms, ``(block, server) + (server, load) + per load + after larger + first``, as in crossover
trials (B. Jones, M. G. Kenward, *Design and Analysis of Cross-Over Trials*, 3rd edition, 2014, chapter 4), with the
terms that servers have: a drift, caches and clocks after a larger load, and a cold start.

The test is one of randomisation (E. S. Edgington, P. Onghena, *Randomization Tests*, 4th edition, 2007): orders are
exchanged between whole blocks. The block stays the unit, so that what its servers share, and loads that scatter
differently, do no harm. The largest |t| over all terms and metrics counts (P. H. Westfall, S. S. Young,
*Resampling-Based Multiple Testing*, 1993), so that p < 0.01 is one false alarm in a hundred experiments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.steptime.speculation_law import Estimate

TERMS: Final = {
    "per_load": "with each load of its server",
    "after_larger": "after a larger load, against after a smaller one",
    "first": "in the first load of a server",
}
"""The terms, and when a value changes by them. Where orders do not tell all apart, the earlier ones stay: of two
loads, which one came first."""
Load: TypeAlias = tuple[float, ...]
"""Its sizes, by which loads are ordered."""
LoadKey: TypeAlias = tuple[int, str, Load]
"""Block, server (or pair of servers), load."""
_NUM_DRAWS: Final = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOver:
    """Effects on the logarithm of one metric."""

    effects: Mapping[str, Estimate]
    """Those of ``TERMS`` that the orders tell, with intervals of 95 %."""
    clearest: str
    """The effect with the largest |t|."""
    p_value: float
    """Of "no carry-over", over all metrics; never small where few blocks or orders leave few exchanges."""


def carry_over(
    tables: Mapping[str, Mapping[LoadKey, float]], orders: Mapping[int, Sequence[Load]]
) -> dict[str, CarryOver]:
    """The carry-over in each of these tables of logarithms; empty where they do not tell it.

    All tables have the same keys. ``orders`` are the loads of a block's servers, in order, also those that are
    missing in the tables.
    """
    keys = sorted(next(iter(tables.values()), ()))
    if not keys:
        return {}
    servers, loads = dict.fromkeys(key[:2] for key in keys), dict.fromkeys(key[1:] for key in keys)
    levels = np.array([[key[:2] == s for s in servers] + [key[1:] == p for p in loads] for key in keys], np.float64)
    remainder = np.eye(len(keys)) - levels @ np.linalg.pinv(levels)
    terms = np.tensordot(remainder, _drawn_terms(keys, orders), 1)  # keys, draws, terms
    ranks = [0, *(int(np.linalg.matrix_rank(terms[:, 0, : i + 1], tol=1e-6)) for i in range(len(TERMS)))]
    is_told = np.diff(ranks) > 0
    names = list(compress(TERMS, is_told))
    df = round(float(np.trace(remainder))) - len(names)
    if not names or df < 1:
        return {}
    values = remainder @ np.array([[table[key] for table in tables.values()] for key in keys])
    terms = terms[:, :, is_told]
    inverse = np.linalg.pinv(np.einsum("kdt,kdu->dtu", terms, terms), hermitian=True, rcond=1e-9)
    products = np.einsum("kdt,km->dtm", terms, values)
    effects = inverse @ products  # draws, terms, metrics
    squares = np.sum(values**2, axis=0) - np.sum(effects * products, axis=1)
    # Equal values scatter by their rounding alone, which is no scatter to judge an effect by
    variances = np.diagonal(inverse, axis1=1, axis2=2)[:, :, None] * np.maximum(squares / df, 1e-20)[:, None, :]
    t = np.abs(effects) / np.sqrt(variances)
    p_values = np.mean(t.max(axis=(1, 2))[:, None] > t[0].max(axis=0) - 1e-3, axis=0)  # as large but for rounding
    half = t_quantile(0.975, df) * np.sqrt(variances[0])
    return {
        name: CarryOver(
            effects={
                term: Estimate(*(float(effects[0, i, m] + end) for end in (0, -half[i, m], half[i, m])))
                for i, term in enumerate(names)
            },
            clearest=names[int(t[0, :, m].argmax())],
            p_value=float(p_values[m]),
        )
        for m, name in enumerate(tables)
    }


def _drawn_terms(keys: Sequence[LoadKey], orders: Mapping[int, Sequence[Load]]) -> NDArray[np.float64]:
    """The terms by key, draw, and term: of the orders as they were, then of those exchanged between blocks."""
    blocks = sorted({block for block, _, _ in keys})
    sizes = sorted({load for _, _, load in keys}.union(*(orders[block] for block in blocks)))
    of_blocks = np.zeros((len(blocks), len(sizes), len(TERMS)))
    for i, block in enumerate(blocks):
        loads = [sizes.index(load) for load in orders[block]]
        for position, (before, load) in enumerate(pairwise([loads[0], *loads])):
            of_blocks[i, load] = position, np.sign(before - load) / 2, position == 0
    draws = np.tile(np.arange(len(blocks)), (1 + _NUM_DRAWS, 1))
    draws[1:] = np.random.default_rng(0).permuted(draws[1:], axis=1)
    of_key = draws[:, [blocks.index(block) for block, _, _ in keys]].T
    return np.asarray(of_blocks[of_key, np.array([[sizes.index(load)] for _, _, load in keys])])
