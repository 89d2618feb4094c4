"""One choice of one request on its way through the engine, and the blocks of key-value memory that it holds."""

import enum
from collections import OrderedDict
from collections.abc import Hashable, Sequence as Items
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.sim.answers import Answer, PlannedAnswers
from benchctl.sim.requests import Entry, Request

if TYPE_CHECKING:
    from benchctl.sim.drafts import DraftingRow
    from benchctl.sim.guidance import GuidedRow


Prefills: TypeAlias = Items["tuple[Sequence, int]"]
"""Sequences in prefill, each with the tokens computed for it in a step."""


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class StepClock:
    """A number of steps, from which the lengths of decoding rows are counted."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


_STILL: Final = StepClock()
"""The clock of sequences that do not decode; it stays at 0."""


class Sequence:
    """The engine's view of one choice.

    A decoding sequence gains one token with each step, and so do all others of its batch. Its length is therefore
    not counted up but kept relative to a clock that they share: ``num_tokens`` = ``lead`` + the steps of the clock.
    A step of a thousand rows moves the clock by one and writes in no row; a row is touched when it begins to
    decode, ends, or loses its memory. A sequence that does not decode has a clock at 0, and its ``lead`` is its
    length.

    ``num_computed`` is the progress of prefill; while a sequence decodes, all its tokens but the newest are
    computed, and it is not updated. ``block_keys`` identifies the blocks of its prompt that may be shared, None for
    one that is not; its other blocks are counted.
    """

    __slots__ = (
        "_answers",
        "_clock",
        "arrival_ns",
        "block_keys",
        "choice",
        "drafting",
        "end",
        "entry",
        "first_token_ns",
        "guided",
        "is_greedy",
        "join",
        "last_token_ns",
        "lead",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "prompt_tokens",
        "request",
        "seq_id",
        "status",
    )

    def __init__(
        self, seq_id: int, request: Request, choice: int, answers: PlannedAnswers, arrival_ns: int, entry: Entry
    ) -> None:
        self.seq_id = seq_id
        """Number in the order of arrival."""
        self.request = request
        self.choice = choice
        self.entry = entry
        """Its request's place in a phase of load."""
        self.guided: GuidedRow | None = None
        self.drafting: DraftingRow | None = None
        """Its drafts once it has begun to decode, on a server that speculates."""
        self.is_greedy = request.sampling.is_greedy
        self.prompt_tokens = request.prompt.num_tokens
        self.lead = self.prompt_tokens
        """Tokens minus the steps of its clock, which is a constant while it decodes."""
        self.end = self.prompt_tokens + answers.num_tokens[choice]
        """Number of tokens at which the answer is complete."""
        self.status = SequenceStatus.WAITING
        self.join = 0
        """Number of the last time that a sequence of this engine began to decode: the order of rows."""
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.block_keys: list[Hashable | None] = []
        self.arrival_ns = arrival_ns
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self._answers = answers
        self._clock = _STILL

    @property
    def num_tokens(self) -> int:
        return self.lead + self._clock.step

    @property
    def num_output(self) -> int:
        return min(self.num_tokens, self.end) - self.prompt_tokens

    @property
    def answer(self) -> Answer:
        return self._answers.answer(self.choice)

    @property
    def is_decoding(self) -> bool:
        return self._clock is not _STILL

    def begin_decoding(self, clock: StepClock) -> None:
        """Count the first sampled token, and from now on one with each step of the clock."""
        self.lead += 1 - clock.step
        self._clock = clock

    def end_decoding(self) -> None:
        """Fix the length; a closing step has added no token."""
        self.lead = min(self.num_tokens, self.end)
        self._clock = _STILL


class BlockManager:
    """Gives out blocks of ``block_size`` tokens.

    Full blocks of a prompt are identified by the hash of everything up to their end. The samples of one request
    always share them; with ``enable_prefix_caching`` all requests do, and a block without
    a holder keeps its content until it is needed, the longest unused first. All other blocks are alike and counted,
    not named, so that no work grows with the size of the memory. Generated tokens are shared when their sequence
    has ended, with requests that go on from its answer.

    Invariant: free blocks + blocks in use = ``num_blocks``; a block in use has a holder.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.num_used = 0
        self._shares_across_requests: Final = enable_prefix_caching
        self._num_fresh = num_blocks
        """Blocks that have never been given out."""
        self._free: OrderedDict[Hashable, int] = OrderedDict()
        """Blocks given back, in that order: a key and 1 for one with content, a number and a count for others."""
        self._num_runs = 0
        self._num_holders: dict[Hashable, int] = {}
        """Holders of each identified block in use."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence) -> bool:
        """Give a waiting sequence its blocks, and mark the tokens that a shared prefix spares it.

        False if they do not fit; shared blocks that are in use need no room. At least one token is always computed:
        its logits are needed.
        """
        num_tokens = seq.num_tokens
        num_blocks = -(-num_tokens // self.block_size)
        if not (self._shares_across_requests or seq.request.n > 1):
            if num_blocks > self.num_blocks - self.num_used:
                return False
            self.num_used += num_blocks
            seq.num_computed = seq.num_cached = seq.request.static_tokens
            return True
        prefix = self._cached_prefix(seq)
        num_in_use = sum(key in self._num_holders for key in prefix)
        if num_blocks - num_in_use > self.num_free:
            return False
        for key in prefix:
            self._hold(key)
        self.take(num_blocks - len(prefix))
        seq.block_keys = [*prefix]
        seq.num_computed = seq.num_cached = max(len(prefix) * self.block_size, seq.request.static_tokens)
        if self._shares_across_requests:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += seq.num_cached
        return True

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Let others share the prompt blocks that are complete once ``num_computed`` tokens are computed."""
        if not (self._shares_across_requests or seq.request.n > 1):
            return
        hashes = seq.request.prompt.block_hashes
        for index in range(len(seq.block_keys), min(num_computed // self.block_size, len(hashes))):
            seq.block_keys.append(self._identify(self._key(seq, hashes[index])))

    def publish_answer(self, seq: Sequence) -> None:
        """Let requests that go on from the answer of an ended sequence share its blocks; its last token was never
        computed.
        """
        further_hashes = seq.request.prompt.further_hashes
        if self._shares_across_requests and further_hashes is not None:
            for block_hash in further_hashes(map(seq.answer.token_text, range(seq.num_output - 1))):
                seq.block_keys.append(self._identify(self._key(seq, block_hash)))

    def take(self, count: int) -> None:
        """Give out ``count`` blocks, the longest unused first; there must be as many."""
        self.num_used += count
        if not self._shares_across_requests:
            return
        fresh = min(count, self._num_fresh)
        self._num_fresh -= fresh
        count -= fresh
        while count:
            key, size = self._free.popitem(last=False)
            if size > count:
                self._free[key] = size - count
                self._free.move_to_end(key, last=False)
                return
            count -= size

    def deallocate(self, seq: Sequence, num_blocks: int) -> None:
        """Take all blocks of a sequence back, ``num_blocks`` with those it shares.

        The last is the first to be given out again.
        """
        keys = seq.block_keys
        if not self._shares_across_requests and not keys:
            self.num_used -= num_blocks
        else:
            self._give_back(num_blocks - len(keys))
            for key in reversed(keys):
                self._release(key)
            seq.block_keys = []
        seq.num_computed = 0

    def _identify(self, key: Hashable) -> Hashable | None:
        """Name a counted block that is in use; None if another block has this content already."""
        if key in self._num_holders or key in self._free:
            return None
        self._num_holders[key] = 1
        return key

    def _cached_prefix(self, seq: Sequence) -> list[Hashable]:
        keys: list[Hashable] = []
        for block_hash in seq.request.prompt.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
            key = self._key(seq, block_hash)
            if key not in self._num_holders and key not in self._free:
                break
            keys.append(key)
        return keys

    def _key(self, seq: Sequence, block_hash: Hashable) -> Hashable:
        return block_hash if self._shares_across_requests else (seq.request.request_id, block_hash)

    def _hold(self, key: Hashable) -> None:
        if key in self._num_holders:
            self._num_holders[key] += 1
        else:
            del self._free[key]
            self._num_holders[key] = 1
            self.num_used += 1

    def _release(self, key: Hashable | None) -> None:
        if key is None:
            self._give_back(1)
        elif self._num_holders[key] > 1:
            self._num_holders[key] -= 1
        else:
            del self._num_holders[key]
            self.num_used -= 1
            if self._shares_across_requests:
                self._free[key] = 1

    def _give_back(self, count: int) -> None:
        """Free blocks without content."""
        self.num_used -= count
        if self._shares_across_requests and count:
            self._num_runs += 1
            self._free[self._num_runs] = count
