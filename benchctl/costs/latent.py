"""Multi-head latent attention: dimensions, weights, and the two ways to compute it.

The cache holds one vector of r + R elements for each token, from which the keys and values of all heads follow by
up-projection. An engine computes a prompt with keys and values projected up (*expanded*: heads of P + R and V) and
a decoding token against the cached vectors themselves (*absorbed*: the query is projected down instead, and heads
are r + R and r wide). Both need the same projections for each new token, H r (P + V); they differ in the work for
each position attended to. Source: DeepSeek-V2 (arXiv 2405.04434) and the MLA backend of vLLM.
"""

from dataclasses import dataclass

from benchctl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Dimensions of a latent attention.

    ``kv_rank`` is r (``kv_lora_rank``), ``rope_dim`` R, ``nope_dim`` P and ``value_dim`` V of each head.
    ``q_rank`` is that of the query's own low-rank projection, or None for a full one: it must not be taken for
    the hidden size, which is 43 % off for DeepSeek-V2.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "q_rank" and value is None):
                raise UsageError(f"latent attention: {name} is {value!r}; it must be a positive whole number")

    def replicated_params(self, hidden: int) -> int:
        """Weights that every device of a tensor-parallel group holds whole: the projections down.

        d (r + R), and d q of a low-rank query.
        """
        return hidden * (self.kv_rank + self.rope_dim) + (hidden * self.q_rank if self.q_rank else 0)

    def head_params(self, hidden: int, heads: int) -> int:
        """Weights that are divided by head: query, keys and values up, output.

        H (q (P + R) + r (P + V) + V d), with d for q without a low-rank query.
        """
        query = (self.q_rank or hidden) * (self.nope_dim + self.rope_dim)
        return heads * (query + self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden)

    def norm_params(self) -> int:
        """Norms of the low-rank vectors."""
        return self.kv_rank + (self.q_rank or 0)

    def cache_elements(self) -> int:
        """Elements that the cache holds for one token of one layer: r + R, on every device."""
        return self.kv_rank + self.rope_dim

    def expanded_flops(self, heads: int) -> int:
        """FLOPs for one token and one position with keys and values projected up: 2 H (P + R + V)."""
        return 2 * heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def absorbed_flops(self, heads: int) -> int:
        """FLOPs for one token and one position against the cached vectors: 2 H (r + R) + 2 H r."""
        return 2 * heads * (2 * self.kv_rank + self.rope_dim)

    def expansion_flops(self, heads: int) -> int:
        """FLOPs to project one cached token's keys and values up: 2 H r (P + V)."""
        return 2 * heads * self.kv_rank * (self.nope_dim + self.value_dim)
