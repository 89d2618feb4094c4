"""Guidance of one row, written from its definition in plain Python: what the code over tensors is held against.

Nothing here is fast, and nothing is shared with the code under test: lists, ``math``, and bisection.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Sequence[float]


def softmax(scores: Row, temperature: float = 1.0) -> list[float]:
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def candidates(probs: Row, *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """Ids of the candidates and their probabilities among themselves."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = order[:top_k] if top_k > 0 else order
    kept, mass = [], 0.0
    for token in order:
        if mass <= top_p + 1e-13 and probs[token] >= min_p * probs[order[0]] and probs[token] > 0:
            kept.append(token)
        mass += probs[token]
    kept = kept or order[:1]
    total = math.fsum(probs[token] for token in kept)
    return {token: probs[token] / total for token in kept}


def mean(p: Row, v: Row) -> float:
    return math.fsum(a * b for a, b in zip(p, v, strict=True))


def tilted(p: Row, x: Row, slope: float) -> list[float]:
    logs = [math.log(a) + slope * b if a > 0 else -math.inf for a, b in zip(p, x, strict=True)]
    return softmax(logs)


def with_mean(p: Row, v: Row, target: float) -> list[float]:
    """p' ~ p exp(m v) with sum p' v = target, by bisection."""
    low, high = -1.0, 1.0
    while mean(tilted(p, v, low), v) > target:
        low *= 2
    while mean(tilted(p, v, high), v) < target:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if mean(tilted(p, v, middle), v) < target:
            low = middle
        else:
            high = middle
    return tilted(p, v, high)


def aimed_mean(mode: str, scale: float, p: Row, v: Row) -> float:
    """Expectation that a mode aims at, before it is kept within the values."""
    e, low, high = mean(p, v), min(v), max(v)
    try:
        if mode == "mul":
            return e * scale if scale > 0 else e
        if mode == "linear":
            return e + (scale - 1) * (high - e) if scale >= 1 else e - (1 - scale) * (e - low)
        if mode == "exp":
            return low + (1 - (1 - (e - low) / (high - low)) ** scale) * (high - low)
        return 1 - (1 - e) ** scale
    except OverflowError:
        return -math.inf


def kept_within(target: float, v: Row) -> float:
    margin = max(1e-12, 1e-6 * (max(v) - min(v)))
    return min(max(target, min(v) + margin), max(v) - margin)


def one_of(p: Row, cost: Row) -> list[float]:
    winner = min(range(len(p)), key=lambda i: (cost[i], -p[i]))
    return [float(i == winner) for i in range(len(p))]


def length(value: float, gamma: float) -> float:
    return math.log(1 - min(max(value, 1e-9), 1 - 1e-9)) / math.log(gamma)


def constrained(p: Row, v: Row, *, constraint: str, target: float, gamma: float) -> list[float]:
    if constraint == "eq":
        return one_of(p, [abs(length(value, gamma) - length(target, gamma)) for value in v])
    if constraint == "le" or (constraint == "ge" and target <= 1e-12):
        return one_of(p, v)
    if constraint == "ge":
        return one_of(p, [-value for value in v])
    if max(v) - min(v) < 1e-8:
        return list(p)
    if target <= min(v):
        return one_of(p, v)
    if target >= max(v):
        return one_of(p, [-value for value in v])
    return with_mean(p, v, kept_within(target, v))


def guided_row(
    before: Mapping[int, float], raw: Mapping[int, float], eos: int, params: Any, generated: int
) -> dict[int, float]:
    """The chance of each candidate; ``raw`` is what a value model says, the end of an answer has the value 0."""
    values = [0.0 if token == eos else 1 / (1 + math.exp(-raw[token])) for token in before]
    z = [raw[token] for token in before]
    after = guided(list(before.values()), values, z, dataclasses.asdict(params), generated)
    return dict(zip(before, after, strict=True))


def guided(p: Row, v: Row, z: Row, params: Mapping[str, Any], generated: int = 0) -> list[float]:
    """p' of one row; ``params`` are fields of GuidanceParams, defaults included."""
    gamma, target = params["gamma"], params["target_value"]
    if params["value_min"] is not None and mean(p, v) < params["value_min"]:
        return list(p)
    if target is None and params["target_length"] is not None:
        spent = generated if params["target_length_mode"] == "total" else 0
        target = 1 - gamma ** max(params["target_length"] - spent, 0)
    if target is not None:
        return constrained(p, v, constraint=params["value_constraint"], target=target, gamma=gamma)
    mode, scale = params["mode"], params["value_scale"]
    if mode in ("centered_exp", "value_bias"):
        return tilted(p, v if mode == "centered_exp" else z, scale)
    if max(v) - min(v) < 1e-8 or scale == 1:
        return list(p)
    if mode == "mul" and scale <= 0:
        return list(p)
    aim = kept_within(aimed_mean(mode, scale, p, v), v)
    return list(p) if abs(aim - mean(p, v)) < 1e-8 else with_mean(p, v, aim)
