"""Raw values of candidates, from a value model that remembers the prefix of each request.

A step brings each row's missing tokens and its candidates, and both go through the model in one forward pass,
however far a row lags (see ``layout``). Only what is long, a new prompt above all, goes before in passes of its
own; a prompt that several requests share goes once.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchctl.guided.errors import GuidanceError
from benchctl.guided.timing import StepTimer, Timer
from benchctl.guided.value_model.forward import ForwardPass
from benchctl.guided.value_model.layout import MAX_LAG, Memory, Work, rounded
from benchctl.guided.value_model.prefix_cache import PrefixCache
from benchctl.guided.value_model.slots import Row, ScoredRow, Slot, SlotTable
from benchctl.guided.value_model.value_model import ValueModel

__all__ = ["Counters", "ScoredRow", "Scorer"]

_PREFILL_ROW_TOKENS = 512
_PREFILL_TOKENS = 4096
"""Of one forward pass, in one row and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals of a scorer over all steps, all known from lengths on the host."""

    steps: int = 0
    """Calls that scored."""
    fused: int = 0
    """Of these, calls whose missing output tokens and candidates went through the model together."""
    forwards: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that went through the model."""
    extended_tokens: int = 0
    """Output tokens that did."""
    computed_tokens: int = 0
    """All that went through the model, padding included."""
    shared_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another request."""
    evictions: int = 0
    """Requests that lost their slot to others; if they come again, their prefix is computed again."""
    graph_captures: int = 0
    graph_replays: int = 0
    slots: int = 0
    """In use now."""
    num_bytes: int = 0
    """Memory of the cache, taken once."""


class Scorer:
    """A value model with a cache of prefixes for ``max_slots`` requests of up to ``max_tokens`` tokens each.

    ``fused=False`` extends prefixes and scores candidates in two forward passes, to the same values. ``graphs``
    records the work of each size as a CUDA graph, the second time that it occurs, and rounds sizes up so that few
    occur; by default where there is CUDA, and without it rounding is all that it does. ``stream`` computes on a
    stream of its own, in order with the caller's. A prompt that another request had is copied, with
    ``share_prompts``. ``timer`` takes the time of passes beside the scoring one. Not safe for several threads.
    """

    def __init__(
        self,
        model: ValueModel,
        max_slots: int,
        max_tokens: int,
        device: str | torch.device | None = None,
        *,
        max_candidates: int = 64,
        fused: bool = True,
        graphs: bool | None = None,
        stream: bool = False,
        share_prompts: bool = True,
        timer: Timer | None = None,
    ) -> None:
        if max_slots < 1 or max_tokens < 1 or max_candidates < 1:
            raise GuidanceError(
                f"max_slots {max_slots}, max_tokens {max_tokens}, max_candidates {max_candidates}: each must be 1 "
                "or more"
            )
        cache_device = model.device if device is None else torch.device(device)
        is_cuda = cache_device.type == "cuda"
        self.model = model
        self.max_tokens, self.max_candidates = max_tokens, max_candidates
        self._is_fused = fused
        self._timer = timer or StepTimer(None)
        cells = rounded(max_tokens + MAX_LAG + max_candidates, 64)
        self._memory = Memory(slots=max_slots + 1, cells=cells)
        self._cache = PrefixCache(model.config, self._memory, cache_device, model.dtype)
        self._slots = SlotTable(max_slots, shares_prompts=share_prompts)
        self._forward = ForwardPass(model, self._cache, graphs=is_cuda if graphs is None else graphs)
        self._stream = torch.cuda.Stream(cache_device) if stream and is_cuda else None
        self._done: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Memory of the cache; the model's own is ``model.num_bytes``."""
        return self._cache.num_bytes

    @property
    def counters(self) -> Counters:
        """Totals so far; the device is not asked."""
        return Counters(
            **self._done,
            forwards=self._forward.num_forwards,
            computed_tokens=self._forward.num_tokens,
            graph_captures=self._forward.num_captures,
            graph_replays=self._forward.num_replays,
            evictions=self._slots.evictions,
            slots=self._slots.num_used,
            num_bytes=self.num_bytes,
        )

    @torch.no_grad()
    def score(self, rows: Sequence[Row], ids: Tensor, mask: Tensor) -> Tensor:
        """Raw values [B, K] of the candidates ``ids`` [B, K], each as if it came next in its row; 0 where absent.

        In float32, or float64 of such a model. What ``mask`` marks as absent is computed as well, so ids must be
        valid there. GuidanceError where a row or the batch is larger than was allowed for.
        """
        self._check(rows, ids)
        if not rows:
            return torch.zeros(ids.shape, dtype=torch.promote_types(self.model.dtype, torch.float32)).to(ids.device)
        with self._on_stream():
            slots = self._slots.take(rows)
            self._catch_up(rows, slots)
            raw = self._score(rows, slots, ids)
            raw = raw.masked_fill(~mask, 0)
        self._join_stream(raw)
        return raw

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of requests that ended; keys that were never scored are passed over."""
        self._slots.forget(keys)

    def _check(self, rows: Sequence[Row], ids: Tensor) -> None:
        if ids.shape[0] != len(rows) or not 1 <= ids.shape[1] <= self.max_candidates:
            raise GuidanceError(
                f"candidates are {tuple(ids.shape)} for {len(rows)} rows; give one line for each row and 1 to "
                f"{self.max_candidates} candidates, or a larger max_candidates"
            )
        for row in rows:
            if not 1 <= len(row.tokens) <= self.max_tokens:
                raise GuidanceError(
                    f"{row.key!r} has {len(row.tokens)} tokens; guidance was prepared for 1 to {self.max_tokens}, "
                    "so give a larger max_tokens"
                )

    def _score(self, rows: Sequence[Row], slots: Sequence[Slot], ids: Tensor) -> Tensor:
        is_fused = self._is_fused
        if not is_fused:
            lagging = [pair for pair in zip(rows, slots, strict=True) if pair[1].cached < len(pair[0].tokens)]
            if lagging:
                with self._timer.section("value_extend"):
                    self._advance(lagging, MAX_LAG)
        work = _work(rows, slots, ids.shape[1])
        raw = self._forward(work, ids)
        self._commit(rows, slots, work)
        self._done["steps"] += 1
        self._done["fused"] += is_fused
        return raw

    def _catch_up(self, rows: Sequence[Row], slots: Sequence[Slot]) -> None:
        """Bring every row within reach of the fused pass, each shared prompt once."""
        waiting = self._far_behind(zip(rows, slots, strict=True))
        while waiting:
            leaders, followers = self._split(waiting)
            with self._timer.section("value_prefill"):
                for group in _groups(leaders):
                    while still := [(row, slot) for row, slot in group if slot.cached < len(row.tokens)]:
                        self._advance(still, _PREFILL_ROW_TOKENS)
            waiting = self._far_behind(followers)

    def _far_behind(self, pairs: Iterable[tuple[Row, Slot]]) -> list[tuple[Row, Slot]]:
        """Those that lack much, after taking over what other requests hold of their prompts."""
        far = []
        for row, slot in pairs:
            if len(row.tokens) - slot.cached > MAX_LAG:
                self._take_over(row, slot)
            if len(row.tokens) - slot.cached > MAX_LAG:
                far.append((row, slot))
        return far

    def _take_over(self, row: Row, slot: Slot) -> None:
        holder = self._slots.holder(slot)
        if holder is None:
            return
        shared = min(holder.cached, len(slot.prompt))
        if shared > slot.cached:
            self._cache.copy_prefix(holder.number, slot.number, slot.cached, shared)
            self._done["shared_tokens"] += shared - slot.cached
            slot.record(row.tokens, shared)

    def _split(self, waiting: Sequence[tuple[Row, Slot]]) -> tuple[list[tuple[Row, Slot]], list[tuple[Row, Slot]]]:
        """The first row of each prompt, and those that can take over from it afterwards."""
        leaders: dict[Hashable, tuple[Row, Slot]] = {}
        followers = []
        for row, slot in waiting:
            is_prompt_missing = slot.cached < len(slot.prompt)
            name: Hashable = slot.prompt if is_prompt_missing else ("", slot.number)
            if name in leaders:
                followers.append((row, slot))
            else:
                leaders[name] = (row, slot)
        return list(leaders.values()), followers

    def _advance(self, pairs: Sequence[tuple[Row, Slot]], most: int) -> None:
        """Put up to ``most`` missing tokens of each row into the cache."""
        rows, slots = [row for row, _ in pairs], [slot for _, slot in pairs]
        work = _work(rows, slots, 0, most)
        self._forward(work, None)
        self._commit(rows, slots, work)

    def _commit(self, rows: Sequence[Row], slots: Sequence[Slot], work: Work) -> None:
        prompt = output = 0
        for row, slot, tokens in zip(rows, slots, work.missing, strict=True):
            of_prompt = min(max(row.num_prompt - slot.cached, 0), len(tokens))
            prompt += of_prompt
            output += len(tokens) - of_prompt
            slot.record(row.tokens, slot.cached + len(tokens))
        self._done["prefill_tokens"] += prompt
        self._done["extended_tokens"] += output

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def _join_stream(self, result: Tensor) -> None:
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            result.record_stream(current)


def _work(rows: Sequence[Row], slots: Sequence[Slot], candidates: int, most: int | None = None) -> Work:
    cached = [slot.cached for slot in slots]
    ends = [len(row.tokens) if most is None else start + most for row, start in zip(rows, cached, strict=True)]
    return Work(
        slots=[slot.number for slot in slots],
        cached=cached,
        missing=[row.tokens[start:end] for row, start, end in zip(rows, cached, ends, strict=True)],
        candidates=candidates,
    )


def _groups(pairs: Sequence[tuple[Row, Slot]]) -> Iterable[list[tuple[Row, Slot]]]:
    """Rows that lack about as much, as many together as one pass should have; the longest first."""
    by_length = sorted(pairs, key=lambda pair: pair[1].cached - len(pair[0].tokens))
    while by_length:
        row, slot = by_length[0]
        columns = min(len(row.tokens) - slot.cached, _PREFILL_ROW_TOKENS)
        size = max(1, _PREFILL_TOKENS // columns)
        yield by_length[:size]
        by_length = by_length[size:]
