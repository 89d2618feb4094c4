"""Prefixes of requests: the slots that hold them, and the memory of their keys and values."""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.operations import PLAIN, Operations
from benchctl.guided.params import GuidanceError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.layout import Layout, Memory
from benchctl.guided.value_model.value_model import ValueModelConfig


@dataclass(slots=True)
class Slot:
    """The cached prefix of one request."""

    number: int
    key: Hashable = None
    prompt: tuple[int, ...] = ()
    cached: int = 0
    """Number of tokens of the prefix that are in the cache."""
    last_token: int = -1
    """The last cached one, which shows whether a sequence has only grown."""
    used_at: int = 0
    scored_at: int = -1
    """Length of the prefix behind which scored candidates lie, of which the next token is one; -1 for none."""

    def record(self, tokens: Sequence[int], cached: int, *, scored: bool = False) -> None:
        """Record that the first ``cached`` of ``tokens`` are in the cache, and if candidates lie behind them."""
        self.cached = cached
        self.last_token = tokens[cached - 1] if cached else -1
        self.scored_at = cached if scored else -1

    def drawn(self, tokens: Sequence[int]) -> int | None:
        """The token that was drawn among the candidates behind the prefix; None if there is none yet."""
        return tokens[self.cached] if self.scored_at == self.cached < len(tokens) else None

    def pass_over(self, tokens: Sequence[int]) -> None:
        """Take note of a step without candidates: whatever it draws is none of those that lie behind the prefix.

        They are there where the server drew nothing in the step that scored them, as in the middle of a prompt.
        """
        if self.scored_at == len(tokens):
            self.scored_at = -1


class SlotTable:
    """Slots by request; evicts the longest unused one where none is free."""

    def __init__(self, num_slots: int, *, shares_prompts: bool) -> None:
        self._slots = [Slot(number) for number in range(num_slots)]
        self._free = list(range(num_slots))  # a heap: low numbers first keep the used ones together
        self._by_key: dict[Hashable, Slot] = {}
        self._by_prompt: dict[tuple[int, ...], set[int]] = {}
        self._shares_prompts = shares_prompts
        self._clock = 0
        self.evictions = 0

    @property
    def num_used(self) -> int:
        return len(self._by_key)

    def held(self, row: ScoredRow) -> Slot | None:
        """The slot of a row that was scored before and has only grown since; None for any other."""
        slot = self._by_key.get(row.key)
        return slot if slot is not None and _has_grown(slot, row) else None

    def take(self, rows: Sequence[ScoredRow]) -> list[Slot]:
        """The slot of each row; those of new requests hold nothing. GuidanceError where there are too few."""
        if len(rows) > len(self._slots):
            raise GuidanceError(
                f"{len(rows)} sequences are to be guided in one step and there are {len(self._slots)} slots for "
                f"prefixes, {rows[len(self._slots)].key!r} has none; give max_slots of {len(rows)} or more"
            )
        keys = [row.key for row in rows]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise GuidanceError(f"{twice!r} is given twice; each row of a step needs a key of its own")
        self._clock += 1
        slots = [self._by_key.get(key) for key in keys]
        for slot in filter(None, slots):
            slot.used_at = self._clock
        return [self._checked(slot, row) if slot else self._new(row) for slot, row in zip(slots, rows, strict=True)]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of requests that ended; unknown keys are ignored."""
        for key in keys:
            if (slot := self._by_key.pop(key, None)) is not None:
                slot.key = None
                heapq.heappush(self._free, slot.number)

    def holder(self, slot: Slot) -> Slot | None:
        """The other slot that holds most of a request of the same prompt, of several the one of lowest number."""
        others = [self._slots[number] for number in sorted(self._by_prompt.get(slot.prompt, ()))]
        return max((other for other in others if other is not slot), key=lambda other: other.cached, default=None)

    def _new(self, row: ScoredRow) -> Slot:
        if not self._free:
            oldest = min(self._by_key.values(), key=lambda slot: slot.used_at)
            self.evictions += 1
            self.forget([oldest.key])
        slot = self._slots[heapq.heappop(self._free)]
        prompt = tuple(row.tokens[: row.num_prompt]) if self._shares_prompts else ()
        # A request of the same prompt may have been here before: what there is of the prompt stays.
        slot.record(row.tokens, min(slot.cached, len(prompt)) if prompt == slot.prompt else 0)
        self._index(slot, prompt)
        slot.key, slot.used_at = row.key, self._clock
        self._by_key[row.key] = slot
        return slot

    def _index(self, slot: Slot, prompt: tuple[int, ...]) -> None:
        if holders := self._by_prompt.get(slot.prompt):
            holders.discard(slot.number)
            if not holders:
                del self._by_prompt[slot.prompt]
        slot.prompt = prompt
        if prompt:
            self._by_prompt.setdefault(prompt, set()).add(slot.number)

    def _checked(self, slot: Slot, row: ScoredRow) -> Slot:
        """The slot, emptied where the row's tokens are not those that it holds, grown."""
        if _has_grown(slot, row):
            return slot
        self.forget([slot.key])
        slot.record((), 0)
        return self._new(row)


def _has_grown(slot: Slot, row: ScoredRow) -> bool:
    """False where the row's tokens do not begin with those that the slot holds, as far as its last one tells."""
    return slot.cached <= len(row.tokens) and (slot.cached == 0 or row.tokens[slot.cached - 1] == slot.last_token)


class PrefixCache:
    """Static memory for keys and values: slots of equal size, each for one sequence.

    It also remembers which candidates lie behind the prefix of each slot, so that the one which the server draws
    can become part of the prefix.
    """

    def __init__(
        self,
        config: ValueModelConfig,
        memory: Memory,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_candidates: int,
        operations: Operations = PLAIN,
    ) -> None:
        self.memory, self._operations = memory, operations
        size = (config.layers, memory.slots * memory.cells, 2, config.kv_heads, config.head_dim)
        # Cells that nothing was written to are masked, but must hold numbers: 0 times what is not one is not 0.
        self._cells = torch.zeros(size, device=device, dtype=dtype)
        self._ids = torch.full((memory.slots, max_candidates), -1, device=device, dtype=torch.int64)
        self.unknown = torch.zeros((), device=device, dtype=torch.int64)
        """On the device: the drawn tokens since the start that were none of their rows' candidates."""

    @property
    def num_bytes(self) -> int:
        return int(self._cells.nbytes)

    def layer(self, number: int) -> Tensor:
        """Keys and values of a layer [slots * cells, 2, kv_heads, head_dim]."""
        return self._cells[number]

    def copy_prefix(self, source: int, target: int, start: int, end: int) -> None:
        """Give a slot the tokens from ``start`` to ``end`` of another one."""
        by_slot = self._cells.unflatten(1, (self.memory.slots, self.memory.cells))
        by_slot[:, target, start:end] = by_slot[:, source, start:end]

    def keep_drawn(self, layout: Layout) -> None:
        """Move the drawn candidate of each row, in all layers, to the end of its prefix."""
        self._operations.keep_drawn(
            self._cells, self._ids, self.unknown, layout.slots, layout.cached, layout.drawn, self.memory.cells
        )

    def remember(self, layout: Layout) -> None:
        """Remember the candidates of each row."""
        absent = self._ids.shape[1] - layout.candidates.shape[1]
        self._ids.index_copy_(0, layout.slots, functional.pad(layout.candidates, (0, absent), value=-1))
