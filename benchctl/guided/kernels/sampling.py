"""The operations of ``operations.sampling`` as Triton kernels.

A row is a program: it takes the branch of its own rule only, and computes in float64, of which a GPU does a row of
candidates in no time. Whatever must be compared with a limit is rounded to the precision of the probabilities
first, as torch does.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchctl.guided.kernels.tilting import tilt_row
from benchctl.guided.modes import bracket_rounds
from benchctl.guided.operations import SLACK_ULPS

_MASS_BLOCK: Final = 2048
_MASS_PART: Final = 8 * _MASS_BLOCK
"""Tokens of the vocabulary that one program adds up."""
_WRITE_BLOCK: Final = 4096
_LEAST_PARTS: Final = 16
"""Of a vocabulary of 262,144 tokens, so that all usual ones are computed by one program."""
_USUAL_COLUMNS: Final = (8, 64)


def vocabulary_mass(scores: Tensor, top: Tensor, limits: Tensor) -> Tensor:
    """See ``operations.sampling``."""
    rows, vocabulary = scores.shape
    mass = scores.new_empty((rows, triton.cdiv(vocabulary, _MASS_PART)))
    _vocabulary_mass[mass.shape](
        scores, top, limits, mass, vocabulary, scores.stride(0), top.stride(0), limits.stride(0),
        torch.finfo(scores.dtype).tiny, _MASS_BLOCK, _MASS_PART,
    )  # fmt: skip
    return mass


@triton.jit(do_not_specialize=("top_stride", "limit_stride"), do_not_specialize_on_alignment=("limits",))
def _vocabulary_mass(  # type: ignore[no-untyped-def]
    scores, top, limits, mass, vocabulary, score_stride, top_stride, limit_stride, tiny: tl.constexpr,
    block: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.maximum(tl.load(limits + row * limit_stride).to(scores.dtype.element_ty), tiny)
    largest = tl.load(top + row * top_stride)
    total = tl.zeros((block,), scores.dtype.element_ty)
    for begin in range(0, part, block):
        column = number * part + begin + tl.arange(0, block)
        score = tl.load(scores + row * score_stride + column, mask=column < vocabulary, other=float("-inf"))
        total += tl.exp((score - largest) / heat)
    tl.store(mass + row * tl.num_programs(1) + number, tl.sum(total, axis=0))


def _columns(width: int) -> int:
    """``width`` rounded up; to few sizes, because each is compiled by itself."""
    fitting = (size for size in _USUAL_COLUMNS if size >= width)
    return next(fitting, 0) or int(triton.next_power_of_2(width))


def filter_candidates(top: Tensor, mass: Tensor | None, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``operations.sampling``."""
    rows, width = top.shape
    top = top.contiguous()
    probs, mask = torch.empty_like(top), torch.empty_like(top, dtype=torch.bool)
    counts = torch.empty(rows, device=top.device, dtype=torch.int64)
    kind = torch.finfo(top.dtype)
    num_parts = 1 if mass is None else mass.shape[1]
    _filter_candidates[(rows,)](
        top, top if mass is None else mass, limits, probs, mask, counts, limits.stride(0), width, num_parts,
        SLACK_ULPS * kind.eps, kind.tiny, _columns(width), max(_LEAST_PARTS, triton.next_power_of_2(num_parts)),
        has_mass=mass is not None,
    )  # fmt: skip
    return probs, mask, counts


@triton.jit(do_not_specialize=("limit_stride", "width", "num_parts"), do_not_specialize_on_alignment=("limits",))
def _filter_candidates(  # type: ignore[no-untyped-def]
    top, mass, limits, probs, mask, counts, limit_stride, width, num_parts, slack: tl.constexpr, tiny: tl.constexpr,
    block: tl.constexpr, block_parts: tl.constexpr, has_mass: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, block)
    is_there = rank < width
    limit = limits + row * limit_stride
    kind = top.dtype.element_ty
    heat = tl.maximum(tl.load(limit).to(kind), tiny).to(tl.float64)
    largest = tl.load(top + row * width).to(tl.float64)
    score = tl.load(top + row * width + rank, mask=is_there, other=float("-inf")).to(tl.float64)
    weight = tl.exp((score - largest) / heat).to(kind).to(tl.float64)
    top_k = tl.load(limit + 1).to(tl.int64)
    is_kept = is_there & ((rank < top_k) | (top_k <= 0))
    is_kept = is_kept & (weight * (1 + slack) >= tl.load(limit + 3).to(kind).to(tl.float64))
    if has_mass:
        part = tl.arange(0, block_parts)
        parts = tl.load(mass + row * num_parts + part, mask=part < num_parts, other=0.0).to(tl.float64)
        share = weight / tl.sum(parts, axis=0)
        before = tl.cumsum(share, axis=0) - share
        is_kept = is_kept & (before <= tl.load(limit + 2).to(kind).to(tl.float64) + slack)
    is_kept = (is_kept | (rank == 0)) & (weight > 0)
    kept_weight = tl.where(is_kept, weight, 0.0)
    prob = (kept_weight / tl.sum(kept_weight, axis=0)).to(kind)
    tl.store(probs + row * width + rank, prob, mask=is_there)
    tl.store(mask + row * width + rank, is_kept, mask=is_there)
    exact = prob.to(tl.float64)
    entropy = -tl.sum(tl.where(exact > 0, exact * tl.log(tl.where(exact > 0, exact, 1.0)), 0.0), axis=0)
    count = tl.sum(is_kept.to(tl.int64), axis=0)
    is_open = (tl.load(limit + 5) > 0) & (count > 1) & (entropy.to(kind).to(tl.float64) > tl.load(limit + 4))
    tl.store(counts + row, tl.where(is_open, count, 0))


def tilt_candidates(
    probs: Tensor,
    mask: Tensor,
    counts: Tensor,
    ids: Tensor,
    raw: Tensor,
    lines: Tensor,
    ends: Tensor,
    modes: Tensor,
    rules: int,  # noqa: ARG001 - each row asks for its own rule
) -> Tensor:
    """See ``operations.sampling``."""
    rows, width = probs.shape
    result = torch.empty_like(probs)
    block = _columns(width)
    sections = max(8, min(64, 4096 // block))
    tilt_row[(rows,)](
        probs, mask, counts, ids.contiguous(), raw.contiguous(), lines, ends.contiguous(), modes, result,
        modes.stride(0), width, len(ends), 1 - torch.finfo(probs.dtype).eps / 2, block, sections,
        bracket_rounds(sections), num_warps=4 if block == _USUAL_COLUMNS[0] else 8,
    )  # fmt: skip
    return result


def write_candidates(
    logits: Tensor, index: Tensor, ids: Tensor, log_probs: Tensor, counts: Tensor, limits: Tensor
) -> None:
    """See ``operations.sampling``."""
    vocabulary = logits.shape[1]
    _write_candidates[(len(index), triton.cdiv(vocabulary, _WRITE_BLOCK))](
        logits, index, ids.contiguous(), log_probs, counts, limits, logits.stride(0), limits.stride(0), vocabulary,
        ids.shape[1], limits.shape[1] - 1, _WRITE_BLOCK,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("limit_stride", "width", "is_ours"), do_not_specialize_on_alignment=("index", "limits")
)
def _write_candidates(  # type: ignore[no-untyped-def]
    logits,
    index,
    ids,
    log_probs,
    counts,
    limits,
    stride,
    limit_stride,
    vocabulary,
    width,
    is_ours,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limit = limits + row * limit_stride
    if (tl.load(counts + row) > 0) | (tl.load(limit + is_ours) != 0):
        column = tl.program_id(1) * block + tl.arange(0, block)
        heat = tl.load(limit).to(log_probs.dtype.element_ty)
        value = tl.full((block,), float("-inf"), logits.dtype.element_ty)
        for rank in range(width):
            score = (heat * tl.load(log_probs + row * width + rank)).to(logits.dtype.element_ty)
            value = tl.where(column == tl.load(ids + row * width + rank), score, value)
        tl.store(logits + tl.load(index + row) * stride + column, value, mask=column < vocabulary)
