"""The tokens of a row that may be sampled: temperature, then top-k, top-p and min-p.

Guidance chooses among the tokens that these filters leave. They therefore come first, and the server's own filters
must not follow: applied to the guided distribution they would cut it again.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchctl.guided.operations.registry import PLAIN, Operations


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
