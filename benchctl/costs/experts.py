"""Feed-forward blocks with experts: their dimensions, and how many of them a batch of tokens reads.

Each of T tokens chooses k of N experts. The number of distinct experts, whose weights a forward pass has to read,
is at most N and, with any token, at least k. Two rules estimate it:

linear    min(N, k T): no two tokens share an expert. It counts too many once k T is about N / 2.
uniform   N (1 - (1 - k / N)^T): choices are independent and equally likely.

Tokens count, not requests: a prompt of 1,024 tokens reads nearly all experts. ``docs/design/step-time-model.md``
compares both with measured kernels.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from benchctl.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One batch, or many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The blocks with experts of a model: ``layers`` of its layers have them, the others are dense.

    ``shared_ffn`` is the width of all experts that every token passes, together; 0 without any. ``groups`` and
    ``groups_per_token`` are those of group-limited routing: a token's experts come from so many of the groups.
    ``has_shared_gate`` and ``has_routing_bias`` add parameters that cost nothing.
    """

    layers: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int = 0
    groups: int = 1
    groups_per_token: int = 1
    has_shared_gate: bool = False
    has_routing_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "experts_per_token", "expert_ffn", "groups", "groups_per_token"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UsageError(f"experts: {name} is {value!r}; it must be a positive whole number")
        if self.experts_per_token > self.experts:
            raise UsageError(
                f"experts: each token chooses {self.experts_per_token} of {self.experts}; it cannot choose more "
                "than there are"
            )

    def expert_params(self, hidden: int) -> int:
        """Weights of one expert: gate, up and down projection, 3 d d_e."""
        return 3 * hidden * self.expert_ffn

    def shared_params(self, hidden: int) -> int:
        """Weights of the shared experts and the router of one layer: 3 d d_s + d N."""
        return 3 * hidden * self.shared_ffn + hidden * self.experts

    def active_params(self, hidden: int) -> int:
        """Weights of one layer that a token is multiplied with: k experts, the shared ones and the router."""
        return self.experts_per_token * self.expert_params(hidden) + self.shared_params(hidden)

    def params(self, hidden: int) -> int:
        """All weights of one layer's block."""
        gate = hidden if self.has_shared_gate else 0
        bias = self.experts if self.has_routing_bias else 0
        return self.experts * self.expert_params(hidden) + self.shared_params(hidden) + gate + bias

    def linear_experts(self, tokens: Quantity) -> Quantity:
        """Distinct experts that tokens read if no two of them share one: min(N, k T)."""
        return at_most(tokens * self.experts_per_token, self.experts)

    def uniform_experts(self, tokens: Quantity) -> Quantity:
        """Expected distinct experts of independent, equally likely choices: N (1 - (1 - k / N)^T)."""
        unread_frac: Quantity = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts - self.experts * unread_frac


def at_most(quantity: Quantity, bound: float) -> Quantity:
    """The lesser of a quantity and a bound, element by element."""
    if isinstance(quantity, float | int):
        return min(quantity, bound)
    return quantity.clip(max=bound)


def at_least(quantity: Quantity, bound: float) -> Quantity:
    """The greater of a quantity and a bound, element by element."""
    if isinstance(quantity, float | int):
        return max(quantity, bound)
    return quantity.clip(min=bound)
