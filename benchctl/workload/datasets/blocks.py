"""Prompts described by blocks: equal block ids stand for equal tokens, as prefix caches see them."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

from benchctl.workload.datasets.made.synthetic import NUMBERS, numbers_of_prompt
from benchctl.workload.seeded import named_stream

TOKENS_PER_BLOCK: Final = 512
"""As in the traces of Mooncake."""


def numbers_of_blocks(block_ids: Sequence[int], num_tokens: int, index: int, seed: int) -> tuple[int, ...]:
    """Numbers of a prompt of ``num_tokens`` tokens: those of its blocks, the last of them cut, then its own.

    Raises ValueError for more blocks than the prompt has.
    """
    num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
    if len(block_ids) > num_blocks:
        raise ValueError(
            f"{len(block_ids)} hash_ids for {num_tokens} tokens, which are {num_blocks} of {TOKENS_PER_BLOCK}"
        )
    blocks = chain.from_iterable(_numbers_of_block(block_id, seed) for block_id in block_ids)
    shared = tuple(blocks)[:num_tokens]
    rest = num_tokens - len(shared)
    return (*shared, *numbers_of_prompt(rest, index, seed)) if rest else shared


@lru_cache(maxsize=8192)
def _numbers_of_block(block_id: int, seed: int) -> tuple[int, ...]:
    stream = named_stream(seed, f"block:{block_id}")
    return (block_id, *stream.choices(NUMBERS, k=TOKENS_PER_BLOCK - 1))
