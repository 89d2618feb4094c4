"""The operations of ``operations.sampling`` as Triton kernels; see ``modes`` for what each rule means.

A row is a program: it takes the branch of its own rule only, and computes in float64, of which a GPU does a row of
candidates in no time. Whatever must be compared with a limit is rounded to the precision of the probabilities
first, as torch does. Triton has no log1p and no expm1 that its interpreter knows; the two here are Kahan's, exact
to a few roundings.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchctl.guided import modes
from benchctl.guided.modes import bracket_rounds
from benchctl.guided.operations import SLACK_ULPS
from benchctl.guided.params import NEUTRAL_WIDTH

_MASS_BLOCK: Final = 2048
_MASS_PART: Final = 8 * _MASS_BLOCK
"""Tokens of the vocabulary that one program adds up."""
_WRITE_BLOCK: Final = 4096
_LEAST_PARTS: Final = 16
"""Of a vocabulary of 262,144 tokens, so that all usual ones are computed by one program."""
_USUAL_COLUMNS: Final = (8, 64)
_CENTERED: Final = tl.constexpr(modes.CODES["centered_exp"])
_BIAS: Final = tl.constexpr(modes.CODES["value_bias"])
_MUL: Final = tl.constexpr(modes.CODES["mul"])
_LINEAR: Final = tl.constexpr(modes.CODES["linear"])
_EXP: Final = tl.constexpr(modes.CODES["exp"])
_LENGTH_MUL: Final = tl.constexpr(modes.CODES["length_mul"])
_EQ: Final = tl.constexpr(modes.CODES["eq"])
_GE: Final = tl.constexpr(modes.CODES["ge"])
_LE: Final = tl.constexpr(modes.CODES["le"])
_SOFT: Final = tl.constexpr(modes.CODES["eq_soft"])
_NEUTRAL: Final = tl.constexpr(NEUTRAL_WIDTH)
_VALUE_MARGIN: Final = tl.constexpr(modes.VALUE_MARGIN)
_SPENT: Final = tl.constexpr(modes.SPENT)
_LEAST_RANGE: Final = tl.constexpr(modes.LEAST_RANGE)
_LEAST_MOVE: Final = tl.constexpr(modes.LEAST_MOVE)
_LEAST_MARGIN: Final = tl.constexpr(modes.LEAST_MARGIN)
_MARGIN_FRAC: Final = tl.constexpr(modes.MARGIN_FRAC)
_LARGEST_T: Final = tl.constexpr(modes.LARGEST_T)
_LARGEST: Final = tl.constexpr(1.7e308)
_NEWTON_STEPS: Final = tl.constexpr(modes.NEWTON_STEPS)


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


@triton.jit(
    do_not_specialize=("table_stride", "width", "num_ends"),
    do_not_specialize_on_alignment=("lines", "table"),
)
def tilt_row(  # type: ignore[no-untyped-def]
    probs, mask, counts, ids, raw, lines, ends, table, result, table_stride, width, num_ends,
    below_one: tl.constexpr, block: tl.constexpr, sections: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """ln p' of the row that is this program's number."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, block)
    is_there = rank < width
    kind = probs.dtype.element_ty
    prob = tl.load(probs + row * width + rank, mask=is_there, other=0.0).to(tl.float64)
    is_there = is_there & (prob > 0)
    log_prob = tl.where(is_there, tl.log(tl.where(is_there, prob, 1.0)), float("-inf"))
    line = tl.load(lines + row)
    tilted = log_prob
    if (line >= 0) & (tl.load(counts + row) > 0):
        is_there = is_there & (tl.load(mask + row * width + rank, mask=rank < width, other=0) != 0)
        z = tl.load(raw + line * width + rank, mask=is_there, other=0.0).to(kind).to(tl.float64)
        value = (1 / (1 + tl.exp(-z))).to(kind).to(tl.float64)
        token = tl.load(ids + row * width + rank, mask=rank < width, other=-1)
        for number in range(num_ends):
            value = tl.where(token == tl.load(ends + number), 0.0, value)
        own = table + row * table_stride
        tilted = _tilted(
            prob, log_prob, tl.where(is_there, value, 0.0), tl.where(is_there, z, 0.0), is_there, tl.load(own),
            tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), below_one, sections, rounds,
        )  # fmt: skip
    tl.store(result + row * width + rank, tilted.to(kind), mask=rank < width)


@triton.jit
def _tilted(  # type: ignore[no-untyped-def]
    prob, log_prob, value, z, is_there, code, scale, gamma, value_min, target, below_one: tl.constexpr,
    sections: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """ln p' of a row that is guided."""
    least = tl.min(tl.where(is_there, value, float("inf")), axis=0)
    most = tl.max(tl.where(is_there, value, float("-inf")), axis=0)
    is_unchanged = tl.sum(prob * value, axis=0) < value_min
    is_outside = (target <= least) | (target >= most)
    is_picked = (code == _EQ) | (code == _GE) | (code == _LE) | ((code == _SOFT) & is_outside)
    x, slope = value, scale
    if (code == _CENTERED) | (code == _BIAS):
        is_unchanged = is_unchanged | (tl.abs(scale) <= _NEUTRAL)
        x = tl.where(code == _BIAS, z, value)
    elif (code != _EQ) & (code != _GE) & (code != _LE):
        range_ = most - least
        is_flat = range_ < _LEAST_RANGE
        safe = tl.where(is_flat, 1.0, range_)
        u = tl.where(is_there, (value - least) / safe, 0.0)
        mean = tl.minimum(tl.maximum(tl.sum(prob * u, axis=0), 0.0), 1.0)
        margin = tl.maximum(1.0 / safe * _LEAST_MARGIN, _MARGIN_FRAC)  # Triton 3.7 divides no constant by a tensor
        aim = _aim(mean, least, safe, code, scale, target, below_one)
        aim = tl.minimum(tl.maximum(aim, margin), 1 - margin)
        is_neutral = (code != _SOFT) & (tl.abs(scale - 1) <= _NEUTRAL) | (code == _MUL) & (scale <= 0)
        is_near = (tl.abs(aim - mean) * range_ < _LEAST_MOVE) & ((code != _SOFT) | ~is_outside)
        is_unchanged = is_unchanged | is_neutral | is_flat | is_near
        slope = _solved_slope(log_prob, u, aim, sections, rounds) / safe
    if is_picked:
        exponent = _picked(prob, value, most, is_there, code, gamma, target)
    else:
        top = tl.max(tl.where(is_there, x, float("-inf")), axis=0)
        bottom = tl.min(tl.where(is_there, x, float("inf")), axis=0)
        apart = tl.minimum(tl.maximum(x - tl.where(slope > 0, top, bottom), -_LARGEST), _LARGEST)
        exponent = tl.where(is_there, slope * apart, 0.0)
    exponent += log_prob
    exponent -= tl.max(exponent, axis=0)
    guided = exponent - tl.log(tl.sum(tl.exp(exponent), axis=0))
    return tl.where(is_unchanged, log_prob, tl.where(is_there, guided, float("-inf")))


@triton.jit
def _aim(mean, least, range_, code, scale, target, below_one):  # type: ignore[no-untyped-def]
    """Expectation aimed at, 0 at the least value and 1 at the largest; see ``modes``."""
    expected = least + range_ * mean
    aim = (target - least) / range_
    if code == _MUL:
        aim = (expected * scale - least) / range_
    elif code == _LINEAR:
        aim = tl.where(scale >= 1, mean + (scale - 1) * (1 - mean), scale * mean)
    elif code == _EXP:
        # 0 to the power of 0 is 1.
        rest = tl.where(scale == 0, 1.0, tl.exp(scale * tl.log(1 - mean)))
        aim = 1 - rest
    elif code == _LENGTH_MUL:
        aim = (-_expm1(scale * _log1p(-tl.minimum(expected, below_one))) - least) / range_
    return aim


@triton.jit
def _picked(prob, value, most, is_there, code, gamma, target):  # type: ignore[no-untyped-def]
    """0 for the candidate that a target picks, -inf for the others."""
    within = tl.minimum(tl.maximum(value, _VALUE_MARGIN), 1 - _VALUE_MARGIN)
    aimed = tl.minimum(tl.maximum(target, _VALUE_MARGIN), 1 - _VALUE_MARGIN)
    wants_most = (code == _GE) & (target > _SPENT) | (code == _SOFT) & (target >= most)
    apart = tl.abs(_log1p(-within) / tl.log(gamma) - _log1p(-aimed) / tl.log(gamma))
    cost = tl.where(code == _EQ, apart, tl.where(wants_most, -value, value))
    cost = tl.where(is_there, cost, float("inf"))
    is_best = is_there & (cost <= tl.min(cost, axis=0))
    winner = tl.argmax(tl.where(is_best, prob, -1.0), axis=0)
    return tl.where(tl.arange(0, prob.shape[0]) == winner, 0.0, float("-inf")).to(prob.dtype)


@triton.jit
def _solved_slope(log_prob, u, aim, sections: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slope that brings the expectation of ``u`` to ``aim``; see ``expectation``."""
    low = aim * 0 - _LARGEST_T
    span = low * 0 + 2 * _LARGEST_T
    # In float64, or the points of the grid would be as coarse as 1e-6.
    step = tl.arange(0, sections).to(tl.float64)
    for _ in range(rounds):
        slopes = _sinh(low + span * step / sections)
        exponent = log_prob[None, :] + slopes[:, None] * u[None, :]
        weight = tl.exp(exponent - tl.max(exponent, axis=1)[:, None])
        mean = tl.sum(weight * u[None, :], axis=1) / tl.sum(weight, axis=1)
        # The last point below the target; the ends of the first bracket count as below and above.
        index = tl.sum(((mean < aim) & (step > 0)).to(tl.int32), axis=0).to(tl.float64)
        low += span * index / sections
        span /= sections
    least, most = _sinh(low), _sinh(low + span)
    slope = (least + most) / 2
    for _ in range(_NEWTON_STEPS):
        exponent = log_prob + slope * u
        weight = tl.exp(exponent - tl.max(exponent, axis=0))
        weight /= tl.sum(weight, axis=0)
        mean = tl.sum(weight * u, axis=0)
        variance = tl.sum(weight * (u - mean) * (u - mean), axis=0)
        slope = tl.minimum(tl.maximum(slope + (aim - mean) / tl.maximum(variance, 1e-300), least), most)
    return slope


@triton.jit
def _sinh(x):  # type: ignore[no-untyped-def]
    grown = _expm1(tl.abs(x))
    half = (grown + grown / (grown + 1)) / 2
    return tl.where(x < 0, -half, half)


@triton.jit
def _expm1(x):  # type: ignore[no-untyped-def]
    grown = tl.exp(x)
    is_small = tl.abs(x) < 0.5
    less = grown - 1
    near = tl.where(grown == 1, x, less * x / tl.log(tl.where((grown == 1) | ~is_small, 2.0, grown)))
    return tl.where(is_small, near, less)


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    grown = 1 + x
    return tl.where(grown == 1, x, tl.log(grown) * x / tl.where(grown == 1, 1.0, grown - 1))
