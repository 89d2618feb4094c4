"""Requests as the core sees them."""

import hashlib
from collections.abc import Hashable
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
    """A tokenized prompt. ``block_hashes`` stand for its full blocks: equal ones mean equal prefixes."""

    num_tokens: int
    digest: str
    asks_for_box: bool
    block_hashes: Items[Hashable]

    @classmethod
    def of(cls, pieces: Items[str], block_size: int, *, salt: str | None = None) -> "Prompt":
        """The prompt of these tokens; one with a ``salt`` shares blocks with those of the same salt alone."""
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
            block_hashes=tuple(hashes) if salt is None else tuple((salt, block) for block in hashes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and ``n`` choices of at most ``max_tokens`` each.

    With ``ignore_eos`` each choice has exactly ``max_tokens``. ``guidance`` is None for an unguided request. A
    lower ``priority`` goes first where the scheduler asks for it. ``static_tokens`` of the prompt are in a cache
    that never changes. ``answer_hashes`` stand for the full blocks
    after those of the prompt, up to the end of the answer: the next turn of a session begins with them.
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
    priority: int = 0
    static_tokens: int = 0
    answer_hashes: Items[Hashable] = ()
