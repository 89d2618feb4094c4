"""The tokens of a row that may be sampled: temperature, then top-k, top-p and min-p.

Guidance chooses among the tokens that these filters leave. They therefore come first, and the server's own filters
must not follow: applied to the guided distribution they would cut it again.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_SLACK_ULPS: Final = 16
"""A token exactly at a bound is kept, however its probability was rounded on the way."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of B rows in K columns, most probable first; columns beyond a row's own number are absent."""

    ids: Tensor
    """int64 [B, K]: token ids; distinct within a row, and valid in absent columns as well."""
    probs: Tensor
    """[B, K]: probabilities that add up to 1 over the candidates of a row; 0 where absent."""
    mask: Tensor
    """bool [B, K]: which are candidates; at least one in each row."""

    @property
    def counts(self) -> Tensor:
        """int64 [B]: number of candidates."""
        return self.mask.sum(dim=1)

    @property
    def is_deterministic(self) -> Tensor:
        """bool [B]: rows with a single candidate, which no guidance can change."""
        return self.counts == 1

    @property
    def entropy(self) -> Tensor:
        """[B]: -sum p ln p in nats, of the filtered distribution, not of the whole vocabulary's."""
        return -torch.xlogy(self.probs, self.probs).sum(dim=1)


def select_candidates(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    max_candidates: int,
    *,
    is_top_p_open: bool = False,
) -> Candidates:
    """Candidates of each row of ``logits`` [B, V], with parameters of each row [B].

    In this order, on p = softmax(logits / temperature) over the vocabulary:

    1. the ``top_k`` most probable, all if 0 or less;
    2. of these, tokens before which at most ``top_p`` of the probability lies, p not renormalised;
    3. of these, p >= ``min_p`` times the largest p.

    The most probable always stays, and a token of probability 0 never does. Which of several equal tokens are among
    the ``top_k`` is left to torch. ``max_candidates`` bounds K on the host, so that nothing waits for the device;
    the caller sees to it that no row asks for more. ``is_top_p_open`` promises that every top_p is 1 or more, which
    spares the sum over the vocabulary.

    Computed in the precision of ``logits``, float32 at least. Finite for finite logits of any size.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    kind = torch.finfo(scores.dtype)
    slack = _SLACK_ULPS * kind.eps
    heat = temperature.to(scores.dtype).clamp_min(kind.tiny)[:, None]
    top, ids = torch.topk(scores, min(max_candidates, scores.shape[1]), dim=1)
    # Relative to the largest, nothing overflows, and min_p needs no normalisation.
    weights = torch.exp((top - top[:, :1]) / heat)
    rank = torch.arange(top.shape[1], device=top.device)
    mask = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    mask &= weights * (1 + slack) >= min_p.to(scores.dtype)[:, None]
    if not is_top_p_open:
        total = torch.exp((scores - top[:, :1]) / heat).sum(dim=1, keepdim=True)
        shares = weights / total
        mass_before = shares.cumsum(dim=1) - shares
        mask &= mass_before <= top_p.to(scores.dtype)[:, None] + slack
    mask |= rank == 0
    mask &= weights > 0
    filtered = weights.masked_fill(~mask, 0)
    return Candidates(ids=ids, probs=filtered / filtered.sum(dim=1, keepdim=True), mask=mask)
