"""Tokens that an uneven routing sends to each expert, and how many experts it reaches.

Loads follow a power law: the density of an expert's share x is x^-alpha between a least and a largest share, as
measured tables of fused kernels assume (aiconfigurator). With n tokens that choose k of N experts, shares lie in
[1, 0.8 n] if n k > N, else in [0.01, 2], and are scaled to n k in total; loads are whole numbers, at most n, and
choices lost in rounding go to one expert each.

With experts on several devices the slowest decides: the device with the largest load of many draws.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.steptime.design import Floats

_DRAWS: Final = 24
_SMALL_BLOCK: Final = 16
_LARGE_BLOCK: Final = 32
"""Tokens of one expert that a kernel takes together, for up to as many tokens as experts and for more. Settings of
vLLM lie between 16 and 128."""
_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Experts of the busiest device that tokens reach, and choices that they compute, in whole blocks."""

    experts: float
    padded_choices: float


def power_law_load(tokens: int, experts: int, per_token: int, *, alpha: float, devices: int = 1) -> ExpertLoad:
    """The mean load over draws; ``alpha`` is the exponent (1.01 is mildly, 1.2 clearly uneven).

    Without other devices the quantiles of the law stand for draws. Draws are the same at every call.
    """
    shares = _shares(tokens, experts, per_token, alpha, is_drawn=devices > 1)
    loads = _whole(_scaled(shares, tokens, tokens * per_token), tokens * per_token)
    if devices > 1:
        by_device = loads.reshape(len(loads), devices, -1)
        busiest = by_device.sum(axis=2).argmax(axis=1)
        loads = by_device[np.arange(len(loads)), busiest]
    block = _SMALL_BLOCK if tokens * devices <= experts else _LARGE_BLOCK
    least = min(per_token / devices, 1.0) if devices > 1 else float(per_token)
    return ExpertLoad(
        experts=max(float((loads > 0).sum(axis=1).mean()), least),
        padded_choices=float((np.ceil(loads / block) * block).sum(axis=1).mean()),
    )


def _scaled(shares: Floats, most: float, total: float) -> Floats:
    """Shares scaled to a total, none above ``most``; what is above goes to the others in proportion."""
    loads = shares * (total / shares.sum(axis=1, keepdims=True))
    for _ in range(_ROUNDS):
        is_full = loads >= most
        room = np.where(is_full, 0.0, loads)
        rest = total - most * is_full.sum(axis=1, keepdims=True)
        scaled = room * (rest / np.maximum(room.sum(axis=1, keepdims=True), 1e-9))
        loads = np.where(is_full, most, np.minimum(scaled, most))
    return np.asarray(loads, dtype=np.float64)


def _whole(loads: Floats, total: int) -> Floats:
    """Loads rounded; choices that are lost in rounding go to one expert each, the largest first."""
    rounded = np.round(loads)
    lost = np.maximum(total - rounded.sum(axis=1, keepdims=True), 0)
    rank = np.argsort(np.argsort(-rounded, axis=1, kind="stable"), axis=1)
    return np.asarray(rounded + (rank < lost), dtype=np.float64)


def _shares(tokens: int, experts: int, per_token: int, alpha: float, *, is_drawn: bool) -> Floats:
    """Unscaled shares (draws, experts) by the inverse of the law's distribution."""
    low, high = (1.0, 0.8 * tokens) if tokens * per_token > experts else (0.01, 2.0)
    high = max(high, low * 1.0001)
    if is_drawn:
        quantiles = np.random.default_rng([experts, _DRAWS]).random((_DRAWS, experts))
    else:
        quantiles = ((np.arange(experts) + 0.5) / experts)[None, :]
    power = 1 - alpha
    return np.asarray(((high**power - low**power) * quantiles + low**power) ** (1 / power), dtype=np.float64)
