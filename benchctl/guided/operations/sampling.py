"""Probabilities of a step from logits to logits, computed by torch; B rows, V tokens, K columns of candidates.

``limits`` [B, 7] are the numbers by which each row is filtered, in float64: temperature, top_k, top_p, min_p,
entropy threshold, 1 if the row may be guided in this step, 1 if its filters are applied here in any case.
``modes`` [B, 5] are those of ``modes.ModeBatch``.
"""

from typing import Final

import torch
from torch import Tensor

from benchctl.guided.modes import ModeBatch, candidate_values, log_tilt

NUM_LIMITS: Final = 7
SLACK_ULPS: Final = 16
"""A token exactly at a bound is kept, however its probability was rounded on the way."""


def vocabulary_mass(scores: Tensor, top: Tensor, limits: Tensor) -> Tensor:
    """[B, parts], to be added up: exp((score - largest) / temperature) over the vocabulary.

    ``scores`` [B, V] in float32 or float64; ``top`` [B, K] the largest of them, in descending order.
    """
    return torch.exp((scores - top[:, :1]) / _heat(limits, scores.dtype)).sum(dim=1, keepdim=True)


def filter_candidates(top: Tensor, mass: Tensor | None, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [B, K], which columns are candidates [B, K], and how many are to be guided [B].

    See ``candidates.select_candidates``. ``top`` [B, K] as above; ``mass`` is what ``vocabulary_mass`` gives, None
    where every top_p is 1 or more. Nothing is to be guided in rows that may not be, that have a single candidate,
    or whose entropy -sum p ln p in nats is at the threshold or below.
    """
    _, top_k, top_p, min_p, threshold, is_due, _ = limits[:, :, None].unbind(dim=1)
    slack = SLACK_ULPS * torch.finfo(top.dtype).eps
    # Relative to the largest, nothing overflows, and min_p needs no normalisation.
    weights = torch.exp((top - top[:, :1]) / _heat(limits, top.dtype))
    rank = torch.arange(top.shape[1], device=top.device)
    mask = (rank < top_k) | (top_k <= 0)
    mask &= weights * (1 + slack) >= min_p.to(top.dtype)
    if mass is not None:
        shares = weights / mass.sum(dim=1, keepdim=True)
        mass_before = shares.cumsum(dim=1) - shares
        mask &= mass_before <= top_p.to(top.dtype) + slack
    mask |= rank == 0
    mask &= weights > 0
    filtered = weights.masked_fill(~mask, 0)
    probs = filtered / filtered.sum(dim=1, keepdim=True)
    counts = mask.sum(dim=1)
    entropy = -torch.xlogy(probs, probs).sum(dim=1)
    is_open = (is_due[:, 0] > 0) & (counts > 1) & (entropy > threshold[:, 0])
    return probs, mask, counts * is_open


def tilt_candidates(
    probs: Tensor,
    mask: Tensor,
    counts: Tensor,
    ids: Tensor,
    raw: Tensor,
    lines: Tensor,
    ends: Tensor,
    modes: Tensor,
    rules: int,
) -> Tensor:
    """ln p' [B, K], -inf where absent; ln p in rows without a line of ``raw`` or with a count of 0.

    ``probs``, ``mask`` and ``counts`` as ``filter_candidates`` gives them; ``ids`` [B, K]; ``raw`` [lines, K] are
    outputs of the value model's head, ``lines`` [B] which of them is a row's, or -1; ``ends`` are ids of the tokens
    that end an answer; ``rules`` the rules that occur, see ``modes.ModeBatch``.
    """
    raw = raw.index_select(0, lines.clamp_min(0)).to(probs.dtype)
    tilted = log_tilt(probs, candidate_values(raw, ids, ends), raw, mask, ModeBatch(modes, rules))
    is_guided = (counts > 0) & (lines >= 0)
    return torch.where(is_guided[:, None], tilted, torch.log(probs))


def write_candidates(
    logits: Tensor, index: Tensor, ids: Tensor, log_probs: Tensor, counts: Tensor, limits: Tensor
) -> None:
    """Put temperature * ``log_probs`` [B, K] at ``ids``, -inf elsewhere, in rows ``index`` [B] of ``logits``.

    Rows that are neither guided (a count of 0) nor filtered here in any case stay as they are.
    """
    is_kept = ((counts == 0) & (limits[:, -1] == 0))[:, None]
    rows = logits.index_select(0, index)
    scores = (_temperature(limits, log_probs.dtype) * log_probs).to(logits.dtype)
    scores = torch.where(is_kept, rows.gather(1, ids), scores)
    logits.index_copy_(0, index, rows.masked_fill(~is_kept, -torch.inf).scatter(1, ids, scores))


def _temperature(limits: Tensor, dtype: torch.dtype) -> Tensor:
    return limits[:, :1].to(dtype)


def _heat(limits: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperatures [B, 1] to divide by."""
    return _temperature(limits, dtype).clamp_min(torch.finfo(dtype).tiny)
