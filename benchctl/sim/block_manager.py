"""Paged key-value memory: blocks, their holders, and the prefixes that sequences share."""

from collections import OrderedDict
from typing import Final

from benchctl.sim.sequence import Sequence


class BlockManager:
    """Gives out blocks of ``block_size`` tokens.

    Full blocks of a prompt are identified by the hash of everything up to their end. The samples of one request
    always share them; with ``enable_prefix_caching`` all requests do, and a block without
    a holder keeps its content until it is needed, the longest unused first. Generated tokens are never shared.

    Invariant: free blocks + blocks in use = ``num_blocks``; a block in use has a holder.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self._shares_across_requests = enable_prefix_caching
        self._num_fresh = 0
        """Blocks below this number have been given out at least once."""
        self._free: OrderedDict[int, None] = OrderedDict()
        self._num_holders: dict[int, int] = {}
        self._block_of: dict[tuple[str, bytes], int] = {}
        self._key_of: dict[int, tuple[str, bytes]] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_used(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._num_holders)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> bool:
        """True if all tokens of a waiting sequence fit; shared blocks that are in use need no room."""
        shared = [block for block in self._cached_prefix(seq) if block in self._num_holders]
        return self.blocks_for(seq.num_tokens) - len(shared) <= self.num_free

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence its blocks, and mark the tokens that a shared prefix spares it.

        At least one token is always computed: its logits are needed.
        """
        prefix = self._cached_prefix(seq)
        for block in prefix:
            self._hold(block)
        seq.block_table = prefix + [self._take_free() for _ in range(self.blocks_for(seq.num_tokens) - len(prefix))]
        seq.num_computed = seq.num_cached = len(prefix) * self.block_size
        if self._shares_across_requests:
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += seq.num_cached

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Let others share the prompt blocks that are complete once ``num_computed`` tokens are computed."""
        hashes = seq.request.prompt.block_hashes
        for index in range(seq.num_computed // self.block_size, min(num_computed // self.block_size, len(hashes))):
            key, block = self._key(seq, hashes[index]), seq.block_table[index]
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def can_append(self) -> bool:
        """True if one more block can be given out."""
        return self.num_free > 0

    def append(self, seq: Sequence) -> None:
        """Give a running sequence one more block."""
        seq.block_table.append(self._take_free())

    def deallocate(self, seq: Sequence) -> None:
        """Take all blocks of a sequence back; the last is the first to be given out again."""
        for block in reversed(seq.block_table):
            if self._num_holders[block] > 1:
                self._num_holders[block] -= 1
            else:
                del self._num_holders[block]
                self._free[block] = None
                if not self._shares_across_requests:
                    self._unpublish(block)
        seq.block_table = []
        seq.num_computed = 0

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        blocks: list[int] = []
        hashes = seq.request.prompt.block_hashes[: (seq.num_tokens - 1) // self.block_size]
        for block_hash in hashes:
            block = self._block_of.get(self._key(seq, block_hash))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _key(self, seq: Sequence, block_hash: bytes) -> tuple[str, bytes]:
        return ("" if self._shares_across_requests else seq.request.request_id, block_hash)

    def _hold(self, block: int) -> None:
        if block in self._num_holders:
            self._num_holders[block] += 1
        else:
            del self._free[block]
            self._num_holders[block] = 1

    def _take_free(self) -> int:
        if self._num_fresh < self.num_blocks:
            block = self._num_fresh
            self._num_fresh += 1
        else:
            block, _ = self._free.popitem(last=False)
            self._unpublish(block)
        self._num_holders[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
