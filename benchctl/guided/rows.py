"""The rows of a step: their candidates, and all that the host knows of them before their logits exist."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchctl.guided.modes import NUM_MODE_NUMBERS, ModeBatch, mode_numbers, rules_of
from benchctl.guided.operations import NUM_LIMITS, PLAIN, Operations, to_device
from benchctl.guided.params import GuidanceParams

GREEDY_TEMPERATURE: Final = 1e-5
"""At or below, a server takes the most probable token, and guidance leaves it alone."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A sequence whose candidates are to be scored. ``tokens`` may be a live view that grows with the answer."""

    key: Hashable
    """Identity of the request for as long as it lives: the same key means the same tokens with others appended."""
    tokens: Sequence[int]
    """Prompt and output so far."""
    num_prompt: int
    draws_candidates: bool = False
    """True where the next token can only be one of the candidates, in every step, guided or not: the server samples
    this request without filters of its own, because they are applied here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideRow(ScoredRow):
    """A sequence of the batch that asks for guidance."""

    index: int
    """Its row of the logits."""
    params: GuidanceParams
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of B rows in K columns, most probable first; columns beyond a row's own number are absent."""

    ids: Tensor
    """int64 [B, K]: token ids; distinct within a row, and valid in absent columns as well."""
    probs: Tensor
    """[B, K]: probabilities that add up to 1 over the candidates of a row; 0 where absent."""
    mask: Tensor
    """bool [B, K]: which are candidates; at least one in each row."""
    counts: Tensor
    """int64 [B]: number of candidates in rows that are to be guided, 0 in all others."""


def limit_numbers(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    threshold: float | None = None,
    is_due: bool = True,
    is_ours: bool = True,
) -> tuple[float, ...]:
    """A row of ``limits``, see ``operations.sampling``."""
    return temperature, top_k, top_p, min_p, -math.inf if threshold is None else threshold, is_due, is_ours


def select_candidates(
    logits: Tensor,
    limits: Tensor,
    max_candidates: int,
    *,
    is_top_p_open: bool = False,
    operations: Operations = PLAIN,
) -> Candidates:
    """Candidates of each row of ``logits`` [B, V], with ``limits`` [B, 7] in float64 from ``limit_numbers``.

    In this order, on p = softmax(logits / temperature) over the vocabulary:

    1. the ``top_k`` most probable, all if 0 or less;
    2. of these, tokens before which at most ``top_p`` of the probability lies, p not renormalised;
    3. of these, p >= ``min_p`` times the largest p.

    The most probable always stays, and a token of probability 0 never does. Which of several equal tokens are among
    the ``top_k`` is left to torch. ``max_candidates`` bounds K on the host, so that nothing waits for the device;
    the caller sees to it that no row asks for more. ``is_top_p_open`` promises that every top_p is 1 or more, which
    spares the sum over the vocabulary. A row is to be guided where it is due, has more than one candidate, and the
    entropy of these is above its threshold.

    Computed in the precision of ``logits``, float32 at least. Finite for finite logits of any size.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    top, ids = torch.topk(scores, min(max_candidates, scores.shape[1]), dim=1)
    mass = None if is_top_p_open else operations.vocabulary_mass(scores, top, limits)
    probs, mask, counts = operations.filter_candidates(top, mass, limits)
    return Candidates(ids=ids, probs=probs, mask=mask, counts=counts)


@dataclass(frozen=True, slots=True)
class RowTable:
    """B rows of a step on the device."""

    index: Tensor
    """int64 [B]: the row of the logits."""
    lines: Tensor
    """int64 [B]: the number of a row among those that are due, -1 in others."""
    limits: Tensor
    """[B, 7], see ``operations.sampling``."""
    modes: ModeBatch


def row_table(rows: Sequence[GuideRow], due: Sequence[bool], device: torch.device) -> RowTable:
    """``due`` tells which rows may be guided in this step."""
    numbers = [
        (
            *limit_numbers(
                temperature=row.temperature,
                top_k=row.top_k,
                top_p=row.top_p,
                min_p=row.min_p,
                threshold=row.params.value_entropy_threshold,
                is_due=row_is_due,
                is_ours=row.draws_candidates,
            ),
            *mode_numbers(row.params, len(row.tokens) - row.num_prompt),
        )
        for row, row_is_due in zip(rows, due, strict=True)
    ]
    is_due = np.asarray(due, dtype=bool)
    lines = np.where(is_due, np.cumsum(is_due) - 1, -1)
    floats = np.asarray(numbers, dtype=np.float64)
    # Both kinds of numbers have eight bytes, so that they can travel together.
    whole = np.column_stack([[row.index for row in rows], lines]).astype(np.int64)
    packed = torch.from_numpy(np.concatenate([whole.T.ravel(), floats.ravel().view(np.int64)]))
    index, lines_there, rest = to_device(packed, device).split((len(rows), len(rows), floats.size))
    table = rest.view(torch.float64).view(len(rows), NUM_LIMITS + NUM_MODE_NUMBERS)
    limits, modes = table.split((NUM_LIMITS, NUM_MODE_NUMBERS), dim=1)
    return RowTable(index, lines_there, limits, ModeBatch(modes, rules_of(row.params for row in rows)))
