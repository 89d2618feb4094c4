"""Requests as the core sees them."""

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass

from benchctl.guided.params import GuidanceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. ``top_k`` -1 keeps the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Temperature 0 is top_k 1: the arg max, which no guidance can change."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized prompt. ``block_hashes`` chains over its full blocks: equal hashes mean equal prefixes."""

    num_tokens: int
    digest: str
    asks_for_box: bool
    block_hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, pieces: Items[str], block_size: int) -> "Prompt":
        chain = hashlib.blake2b(digest_size=16)
        hashes = []
        for start in range(0, len(pieces) - block_size + 1, block_size):
            chain.update("\0".join(pieces[start : start + block_size]).encode() + b"\1")
            hashes.append(chain.digest())
        chain.update("\0".join(pieces[len(hashes) * block_size :]).encode())
        return cls(
            num_tokens=len(pieces),
            digest=chain.hexdigest(),
            asks_for_box="\\boxed" in "".join(pieces),
            block_hashes=tuple(hashes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and ``n`` choices of at most ``max_tokens`` each.

    With ``ignore_eos`` each choice has exactly ``max_tokens``. ``guidance`` is None for an unguided request.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    n: int = 1
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    guidance: GuidanceParams | None = None
