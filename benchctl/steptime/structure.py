"""Words of a step-time model: its structure, the experts that a step reads, and a coefficient."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Structure: TypeAlias = Literal["original", "overlap", "scaling-book", "no-overlap", "roofline"]
"""``original`` is the published form with seven coefficients; ``overlap`` takes max(compute, kv + weights) with
per-layer, per-request and all-reduce terms; ``scaling-book`` takes kv + max(compute, weights) instead, as the JAX
Scaling Book does; ``no-overlap`` adds compute, key-value and weight time up; ``roofline`` is the analytic bound,
which nothing is fitted to."""

ExpertsRead: TypeAlias = Literal["linear", "uniform", "measured"]
"""Number of experts whose weights a step reads: min(N, n k), N (1 - (1 - k / N)^n), or a table of the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One coefficient with its bootstrap interval; ``unit`` is empty for a factor on a time at peak."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    is_identified: bool = True
    """Whether the data determine it; a feature that never varies has no coefficient of its own."""
