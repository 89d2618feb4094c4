"""Rules by which values tilt the probabilities of candidates, and the lengths that values stand for."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchctl.guided.params import (
    CONSTRAINTS,
    EXPECTATION_MODES,
    EXPONENTIAL_MODES,
    MODES,
    NEUTRAL_WIDTH,
    GuidanceError,
    GuidanceParams,
)


def value_of_length(length: float, gamma: float) -> float:
    """v = 1 - gamma^length, for a length in tokens from 0 and a gamma between 0 and 1."""
    return -math.expm1(length * math.log(gamma))


def length_of_value(value: Tensor, gamma: Tensor) -> Tensor:
    """Length in tokens = ln(1 - v) / ln(gamma); infinite at 1. Whether v lies within 0 and 1 is not looked at."""
    return torch.log1p(-value) / torch.log(gamma)


LARGEST_T: Final = 22.5
"""Slopes are m = sinh(t). Targets lie 1e-6 or more within the range; then |m| <= 2e6 ln(2e6 / smallest p), which
is below sinh(22.5) for every p that float64 can hold."""
_SECTIONS: Final = 64
_LARGEST_GRID: Final = 1 << 24
"""Elements of a grid at most; with whole vocabularies as candidates there are fewer sections and more rounds."""
_BRACKET_WIDTH: Final = 2e-4
"""Of t when Newton takes over: close enough for each step to square the error."""
NEWTON_STEPS: Final = 4


def solve_slope(log_probs: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """Slopes [B, 1] that bring the expectation of ``x`` to ``target``.

    ``log_probs`` [B, K], -inf where absent; ``x`` [B, K] from 0 to 1, both of them attained, 0 where absent;
    ``target`` [B, 1] in [1e-6, 1 - 1e-6]. Rows that break this get some finite slope. In float64 the expectation is
    met to 1e-9 and better.
    """
    sections = max(8, min(_SECTIONS, _LARGEST_GRID // max(1, log_probs.numel())))
    steps = torch.linspace(0, 1, sections + 1, dtype=x.dtype, device=x.device)
    low = torch.full_like(target, -LARGEST_T)
    width = 2 * LARGEST_T
    for _ in range(bracket_rounds(sections)):
        grid = low + width * steps
        below = _expectation(log_probs, x, torch.sinh(grid)) < target
        # The last point below the target; the ends of the first bracket count as below and above.
        index = below[:, 1:-1].sum(dim=1, keepdim=True)
        low = grid.gather(1, index)
        width /= sections
    least, most = torch.sinh(low), torch.sinh(low + width)
    slope = (least + most) / 2
    for _ in range(NEWTON_STEPS):
        slope = _newton(log_probs, x, target, slope).clamp(least, most)
    return slope


def bracket_rounds(sections: int) -> int:
    """The number of cuts of the bracket into ``sections`` parts before Newton's method takes over."""
    return math.ceil(math.log(2 * LARGEST_T / _BRACKET_WIDTH) / math.log(sections))


def _expectation(log_probs: Tensor, x: Tensor, slopes: Tensor) -> Tensor:
    """Expectation of x [B, G] under each of G slopes of a row."""
    weights = torch.softmax(log_probs[:, None, :] + slopes[:, :, None] * x[:, None, :], dim=2)
    return (weights * x[:, None, :]).sum(dim=2)


def _newton(log_probs: Tensor, x: Tensor, target: Tensor, slope: Tensor) -> Tensor:
    """One step; the derivative of the expectation is the variance."""
    weights = torch.softmax(log_probs + slope * x, dim=1)
    mean = (weights * x).sum(dim=1, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=1, keepdim=True)
    return slope + (target - mean) / variance.clamp_min(torch.finfo(x.dtype).tiny)


CODES: Final = {rule: code for code, rule in enumerate((*MODES, *CONSTRAINTS))}
NUM_MODE_NUMBERS: Final = 5
SOLVED: Final = frozenset({*EXPECTATION_MODES, "eq_soft"})
VALUE_MARGIN: Final = 1e-9
SPENT: Final = 1e-12
LEAST_RANGE: Final = 1e-8
LEAST_MOVE: Final = 1e-8
LEAST_MARGIN: Final = 1e-12
MARGIN_FRAC: Final = 1e-6


@dataclass(frozen=True, slots=True)
class ModeBatch:
    """Parameters of B rows on the device; the host knows the rules that occur."""

    table: Tensor
    """float64 [B, 5]: code of the rule, scale, gamma, value_min (-inf where a row has none), and the value aimed at
    (0 where a row has no target)."""
    rules: int
    """Bit ``CODES[rule]`` is set for each rule that occurs."""

    @property
    def code(self) -> Tensor:
        return self.table[:, 0:1]

    @property
    def scale(self) -> Tensor:
        return self.table[:, 1:2]

    @property
    def gamma(self) -> Tensor:
        return self.table[:, 2:3]

    @property
    def value_min(self) -> Tensor:
        return self.table[:, 3:4]

    @property
    def target(self) -> Tensor:
        return self.table[:, 4:5]

    def has(self, *rules: str) -> bool:
        """True where one of these rules may occur."""
        return any(self.rules >> CODES[rule] & 1 for rule in rules)

    def asks(self, *rules: str) -> Tensor:
        """bool [B, 1]: rows that follow one of these rules."""
        follows = torch.zeros_like(self.code, dtype=torch.bool)
        for rule in rules:
            if self.has(rule):
                follows |= self.code == CODES[rule]
        return follows


def mode_numbers(params: GuidanceParams, generated: int) -> tuple[float, ...]:
    """A row of ``ModeBatch.table``, of a request that has generated so many tokens."""
    return (
        CODES[params.rule],
        params.value_scale,
        params.gamma,
        -math.inf if params.value_min is None else params.value_min,
        target_value(params, generated),
    )


def rules_of(params: Iterable[GuidanceParams]) -> int:
    """``ModeBatch.rules`` of these requests."""
    rules = 0
    for each in params:
        rules |= 1 << CODES[each.rule]
    return rules


def mode_batch(params: Sequence[GuidanceParams], device: torch.device | str, generated: Sequence[int]) -> ModeBatch:
    """Parameters of the rows of a batch, and how many tokens each has generated; one copy to the device."""
    if len(params) != len(generated):
        raise GuidanceError(
            f"{len(params)} rows of parameters, {len(generated)} of generated tokens; one of each per row"
        )
    numbers = [mode_numbers(each, tokens) for each, tokens in zip(params, generated, strict=True)]
    table = torch.tensor(numbers, dtype=torch.float64).reshape(len(params), NUM_MODE_NUMBERS)
    return ModeBatch(table.to(device, non_blocking=True), rules_of(params))


def target_value(params: GuidanceParams, generated: int) -> float:
    """Value that a row with a target aims at after ``generated`` tokens; 0 for rows without."""
    if params.target_value is not None:
        return params.target_value
    if params.target_length is None:
        return 0.0
    spent = generated if params.target_length_mode == "total" else 0
    return value_of_length(max(params.target_length - spent, 0.0), params.gamma)


def candidate_values(raw: Tensor, ids: Tensor, eos_ids: Tensor) -> Tensor:
    """Values sigma(raw) [B, K] of candidates; 0 for tokens that end the answer, whatever the model says of them."""
    ends = (ids[:, :, None] == eos_ids).any(dim=2)
    return torch.sigmoid(raw).masked_fill(ends, 0)


def log_tilt(probs: Tensor, values: Tensor, raw: Tensor, mask: Tensor, batch: ModeBatch) -> tuple[Tensor, Tensor]:
    """ln p' [B, K] of a distribution p' over the candidates of each row, -inf where absent; and which rows [B, 1]
    are unchanged. Logarithms keep apart what underflows as a probability.

    ``probs`` as in ``Candidates``; ``values`` in [0, 1] as ``candidate_values`` makes them; ``raw`` the outputs of
    the head, which ``value_bias`` takes as they are; ``mask`` marks candidates. Computed in the precision of
    ``probs``, float32 or float64.
    """
    mask = mask & (probs > 0)
    log_probs = torch.log(probs).masked_fill(~mask, -torch.inf)
    values = values.to(probs.dtype).masked_fill(~mask, 0)
    least = values.masked_fill(~mask, torch.inf).amin(dim=1, keepdim=True)
    most = values.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    x, slope = values, _within(batch.scale, probs.dtype)
    mean = (probs * values).sum(dim=1, keepdim=True)
    is_unchanged = (mean < batch.value_min) | (batch.scale.abs() <= NEUTRAL_WIDTH) & batch.asks(*EXPONENTIAL_MODES)
    if batch.has("value_bias"):
        x = torch.where(batch.asks("value_bias"), raw.to(probs.dtype).masked_fill(~mask, 0), x)
    if batch.has(*SOLVED):
        slope, is_still = _solved(log_probs, values, least, most, batch, slope)
        is_unchanged = is_unchanged | is_still
    exponent = _exponent(x, slope, mask)
    if batch.has(*CONSTRAINTS):
        exponent = _picked(probs, values, least, most, mask, batch, exponent)
    tilted = torch.log_softmax(log_probs + exponent, dim=1)
    return torch.where(is_unchanged, log_probs, tilted), is_unchanged


def _exponent(x: Tensor, slope: Tensor, mask: Tensor) -> Tensor:
    """slope * x less its largest, so that any finite numbers give 0 for some candidate and nothing above."""
    largest = torch.finfo(x.dtype).max
    top = x.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    bottom = x.masked_fill(~mask, torch.inf).amin(dim=1, keepdim=True)
    apart = (x - torch.where(slope > 0, top, bottom)).clamp(-largest, largest)
    return (slope * apart).masked_fill(~mask, 0)


def _solved(
    log_probs: Tensor, values: Tensor, least: Tensor, most: Tensor, batch: ModeBatch, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Slopes with those of the expectation modes put in, and which rows they leave unchanged.

    In the coordinate u = (v - lo) / (hi - lo), where ``m`` is the mean and ``aim`` the target.
    """
    width = most - least
    is_flat = width < LEAST_RANGE
    safe = width.masked_fill(is_flat, 1)
    u = ((values - least) / safe).masked_fill(torch.isneginf(log_probs), 0)
    m = (log_probs.exp() * u).sum(dim=1, keepdim=True).clamp(0, 1)
    margin = (LEAST_MARGIN / safe).clamp_min(MARGIN_FRAC)
    aim = _aim(m, least, safe, batch).clamp(margin, 1 - margin)
    is_solved = batch.asks(*SOLVED)
    is_neutral = ((batch.scale - 1).abs() <= NEUTRAL_WIDTH) & ~batch.asks("eq_soft")
    is_neutral |= batch.asks("mul") & (batch.scale <= 0)
    is_near = is_flat | ((aim - m).abs() * width < LEAST_MOVE)
    if batch.has("eq_soft"):
        is_near &= is_flat | ~(batch.asks("eq_soft") & _is_outside(least, most, batch))
    slope = torch.where(is_solved, solve_slope(log_probs, u, aim) / safe, slope)
    return slope, is_solved & (is_neutral | is_near)


def _aim(m: Tensor, least: Tensor, width: Tensor, batch: ModeBatch) -> Tensor:
    """Expectation aimed at, from 0 at the least value to 1 at the largest; beyond them where the scale says so."""
    scale = _within(batch.scale, m.dtype)
    mean = least + width * m
    aim = (_within(batch.target, m.dtype) - least) / width
    if batch.has("mul"):
        aim = torch.where(batch.asks("mul"), (mean * scale - least) / width, aim)
    if batch.has("linear"):
        line = torch.where(scale >= 1, m + (scale - 1) * (1 - m), scale * m)
        aim = torch.where(batch.asks("linear"), line, aim)
    if batch.has("exp"):
        aim = torch.where(batch.asks("exp"), 1 - (1 - m) ** scale, aim)
    if batch.has("length_mul"):
        # A value of 1, an answer without an end, is taken for the largest below it.
        rest = torch.log1p(-mean.clamp(max=1 - torch.finfo(m.dtype).eps / 2))
        aim = torch.where(batch.asks("length_mul"), (-torch.expm1(scale * rest) - least) / width, aim)
    return aim


def _is_outside(least: Tensor, most: Tensor, batch: ModeBatch) -> Tensor:
    return (batch.target <= least) | (batch.target >= most)


def _picked(
    probs: Tensor, values: Tensor, least: Tensor, most: Tensor, mask: Tensor, batch: ModeBatch, exponent: Tensor
) -> Tensor:
    """Exponents with 0 for the one candidate, and -inf for the others, in rows whose target picks one.

    Distances are taken in float64: in float32 nothing lies between 1 and 1 - 1e-9.
    """
    wide = values.double()
    lengths = length_of_value(wide.clamp(VALUE_MARGIN, 1 - VALUE_MARGIN), batch.gamma)
    aimed = length_of_value(batch.target.clamp(VALUE_MARGIN, 1 - VALUE_MARGIN), batch.gamma)
    wants_most = batch.asks("ge") & (batch.target > SPENT) | batch.asks("eq_soft") & (batch.target >= most)
    cost = torch.where(batch.asks("eq"), (lengths - aimed).abs(), torch.where(wants_most, -wide, wide))
    cost = cost.masked_fill(~mask, torch.inf)
    is_best = cost <= cost.amin(dim=1, keepdim=True)
    winner = probs.masked_fill(~(is_best & mask), -1).argmax(dim=1, keepdim=True)
    one = torch.full_like(exponent, -torch.inf).scatter(1, winner, 0)
    is_picked = batch.asks("eq", "ge", "le") | batch.asks("eq_soft") & _is_outside(least, most, batch)
    return torch.where(is_picked, one, exponent)


def _within(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite numbers in another precision, still finite."""
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)
