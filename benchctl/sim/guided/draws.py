"""Counts of guidance in a chunk of steps: many rows and steps in one call of the random source."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from benchctl.records.columns import Floats, Integers
from benchctl.sim.costs.cost_model import GuidedCounts
from benchctl.sim.guided.guidance import GAP_SCALE, SMALLEST_GAP, VOCAB, CandidateLaw

_BISECTIONS: Final = 60
"""Halvings of the unit interval: past the last bit of a uniform number."""


class RowColumns(NamedTuple):
    """Guided rows as arrays: their length at the first step, the tokens followed, and their laws of candidates."""

    tokens: Integers
    followed: Integers
    prompt: Integers
    threshold: Floats
    bound: Floats
    temperature: Floats
    top_k: Floats


class GuidedDraws(NamedTuple):
    """Counts of each step, and every scored row and step behind them, a row after the other."""

    counts: GuidedCounts
    rows: Integers
    steps: Integers


@lru_cache(maxsize=1024)
def scoring_threshold(law: CandidateLaw) -> float:
    """The uniform number below which a row has a choice: the number of candidates falls with it."""
    if law.count_at(1 - 2**-53) > 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 1 and law.count_at(middle) > 1 else (low, middle)
    return low


def draw_steps(random: np.random.Generator, rows: RowColumns, num_steps: int, revision: str) -> GuidedDraws:
    """Score the rows in each of ``num_steps`` steps.

    A row is scored where its uniform number is below its threshold, independently of all else, as
    ``GuidedRow`` does it; the sums over the rows so have the distribution that single rows give them.
    """
    uniform = random.random((len(rows.tokens), num_steps))
    hits = np.flatnonzero(uniform < rows.threshold[:, None])
    row, step = np.divmod(hits, num_steps)
    candidates = _candidates(uniform.ravel()[hits], rows, row)
    end = rows.tokens[row] + step
    previous = np.empty_like(end)
    previous[1:] = end[:-1]
    is_first = np.empty(len(row), dtype=bool)
    is_first[:1] = True
    is_first[1:] = row[1:] != row[:-1]
    previous[is_first] = rows.followed[row[is_first]]
    prompt = np.maximum(rows.prompt[row] - previous, 0)
    scored = np.bincount(step, minlength=num_steps)
    is_fused = np.full(num_steps, revision == "V4")
    if revision == "V2":
        is_fused = np.bincount(step[end - previous > 1], minlength=num_steps) == 0
    counts = GuidedCounts(
        scored_rows=scored,
        candidates=_sums(step, candidates, num_steps),
        value_prefill_tokens=_sums(step, prompt, num_steps),
        value_extend_tokens=_sums(step, end - previous - prompt, num_steps),
        is_fused=is_fused.astype(np.int64),
    )
    return GuidedDraws(counts, row, step)


def no_draws(num_steps: int) -> GuidedDraws:
    """Steps in which no row has a choice."""
    none = np.zeros(num_steps, dtype=np.int64)
    return GuidedDraws(GuidedCounts(none, none, none, none, none), none[:0], none[:0])


def _candidates(uniform: Floats, rows: RowColumns, row: Integers) -> Floats:
    """Candidates of scored rows, ``CandidateLaw.count_at`` for many."""
    gap = np.maximum(GAP_SCALE * uniform / (1 - uniform) / rows.temperature[row], SMALLEST_GAP)
    count = np.floor(np.minimum(rows.bound[row] / gap, VOCAB)) + 1
    candidates: Floats = np.minimum(count, rows.top_k[row])
    return candidates


def _sums(step: Integers, values: Integers | Floats, num_steps: int) -> Integers:
    """Sum of the values of each step."""
    return np.bincount(step, weights=values, minlength=num_steps).astype(np.int64)
