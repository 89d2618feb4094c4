"""Raw values of candidates, from a value model that remembers the prefix of each request.

A step brings each row's missing tokens and its candidates, and both go through the model in one forward pass,
however far a row lags (see ``layout``). Only what is long, a new prompt above all, goes before in passes of its
own; a prompt that several requests share goes once. Where the next token of a row can only be one of its
candidates, the keys and values of that candidate are kept, and the token does not go through the model again
(``reuse``).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchctl.guided.operations import Arriving
from benchctl.guided.params import GuidanceError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.timing import StepTimer
from benchctl.guided.value_model.forward import Counters, CudaGraphs, ForwardPass
from benchctl.guided.value_model.layout import Memory, RowWork, Work
from benchctl.guided.value_model.prefixes import PrefixCache, Slot, SlotTable
from benchctl.guided.value_model.sizes import MAX_LAG, MAX_PREFILL_TOKENS, MAX_ROW_TOKENS, cells_per_slot
from benchctl.guided.value_model.value_model import ValueModel

_Pair = tuple[ScoredRow, Slot]


class Scorer:
    """A value model with a cache of prefixes for ``max_slots`` requests of up to ``max_tokens`` tokens each.

    ``fused=False`` extends prefixes and scores candidates in two forward passes, to the same values; nothing is
    reused then. ``reuse=False`` computes every token of a prefix, also where it was a candidate before. ``graphs``
    rounds the sizes of passes up and records them, as CUDA graphs where there is CUDA; by default only there.
    ``record`` names the numbers of candidates whose passes are recorded at once. A prompt that another request had
    is copied, with ``share_prompts``. ``timer`` takes the time of passes beside the scoring one. Not safe for
    several threads.
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
        reuse: bool = True,
        graphs: bool | None = None,
        record: Sequence[int] = (),
        share_prompts: bool = True,
        timer: StepTimer | None = None,
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
        self._is_fused, self._reuses = fused, reuse and fused
        self._timer = timer or StepTimer(None)
        memory = Memory(slots=max_slots + 1, cells=cells_per_slot(max_tokens, max_candidates))
        self._cache = PrefixCache(
            model.config,
            memory,
            cache_device,
            model.dtype,
            max_candidates=max_candidates,
            operations=model.operations,
        )
        self._slots = SlotTable(max_slots, shares_prompts=share_prompts)
        # Without graphs, partial repeats a pass: it is padded and its input copied as on a GPU, and it runs.
        recorder = (CudaGraphs() if is_cuda else partial) if (is_cuda if graphs is None else graphs) else None
        self._done = Counters()
        self._forward = ForwardPass(model, self._cache, recorder, self._done)
        self._unknown: Arriving | None = None
        self._width, self._no_candidates = 1, torch.zeros((0, 1), dtype=torch.int64, device=cache_device)
        with torch.no_grad():
            for candidates in record:
                self._forward.record(max_slots, candidates)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache; the model's own is ``model.num_bytes``."""
        return self._cache.num_bytes

    @property
    def num_recorded(self) -> int:
        """Passes that are recorded now."""
        return self._forward.num_recorded

    @property
    def counters(self) -> Counters:
        """Totals so far; the device is not asked."""
        return replace(self._done, evictions=self._slots.evictions, slots=self._slots.num_used)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoredRow], ids: Tensor, waiting: Sequence[ScoredRow] = ()) -> Tensor:
        """Raw values [B, K] of the candidates ``ids`` [B, K], each as if it came next in its row.

        In float32, or float64 of such a model. Columns that are absent in a row are computed as well, so ids must
        be valid there. ``waiting`` are other rows that may be scored in later steps: those that begin to lag far
        behind are extended along. GuidanceError where a row or the batch is larger than was allowed for.
        """
        self._check(rows, ids)
        if not rows:
            return torch.zeros(ids.shape, dtype=torch.promote_types(self.model.dtype, torch.float32)).to(ids.device)
        slots = self._slots.take(rows)
        self._catch_up(rows, slots)
        return self._score(list(zip(rows, slots, strict=True)), ids, self._lagging(waiting))

    @torch.no_grad()
    def keep_up(self, waiting: Sequence[ScoredRow]) -> None:
        """Extend those of the ``waiting`` rows that begin to lag far behind, in a step in which none is scored."""
        if lagging := self._lagging(waiting):
            work = Work([self._row_work(row, slot, most=MAX_LAG) for row, slot in lagging], self._width)
            self._forward.score(work, self._no_candidates)
            self._commit(lagging, work)

    @torch.no_grad()
    def prepare(self, rows: Sequence[ScoredRow]) -> None:
        """Bring rows that lack much, new prompts above all, within reach of ``score``, before candidates exist."""
        self._catch_up(rows, self._slots.take(rows))

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of requests that ended; keys that were never scored are passed over.

        Raises GuidanceError where a row drew a token that was none of its candidates.
        """
        self._slots.forget(keys)
        if self._unknown is not None and self._unknown.is_here and any(self._unknown.read()):
            raise GuidanceError(
                "a token was sampled that was none of the candidates of its request, so the values after it are "
                "wrong; switch reuse off, and report this with the server's other logits processors"
            )
        if self._reuses and self.model.device.type != "meta":
            self._unknown = Arriving(self._cache.unknown.reshape(1))

    def _check(self, rows: Sequence[ScoredRow], ids: Tensor) -> None:
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

    def _score(self, pairs: Sequence[_Pair], ids: Tensor, lagging: Sequence[_Pair]) -> Tensor:
        behind = [] if self._is_fused else [(row, slot) for row, slot in pairs if slot.cached < len(row.tokens)]
        if behind:
            with self._timer.section("value_extend"):
                self._extend(behind, MAX_LAG)
        scored = [self._row_work(row, slot, line) for line, (row, slot) in enumerate(pairs)]
        extended = [self._row_work(row, slot, most=MAX_LAG) for row, slot in lagging]
        work = Work([*scored, *extended], ids.shape[1])
        raw = self._forward.score(work, ids)
        self._commit([*pairs, *lagging], work)
        self._width, self._no_candidates = ids.shape[1], ids[:0]
        self._done.steps += 1
        self._done.fused += self._is_fused
        return raw

    def _lagging(self, waiting: Sequence[ScoredRow]) -> list[_Pair]:
        """Rows that are not scored now and would need a pass of their own if they lacked one token more."""
        held = [(row, slot) for row in waiting if (slot := self._slots.held(row)) is not None]
        for row, slot in held:
            slot.pass_over(row.tokens)
        return [(row, slot) for row, slot in held if len(row.tokens) - slot.cached >= MAX_LAG]

    def _catch_up(self, rows: Sequence[ScoredRow], slots: Sequence[Slot]) -> None:
        """Bring every row within reach of the fused pass, each shared prompt once."""
        waiting = self._far_behind(zip(rows, slots, strict=True))
        while waiting:
            leaders, followers = self._split(waiting)
            with self._timer.section("value_prefill"):
                for group in _groups(leaders):
                    while still := [(row, slot) for row, slot in group if slot.cached < len(row.tokens)]:
                        self._extend(still, MAX_ROW_TOKENS)
            waiting = self._far_behind(followers)

    def _far_behind(self, pairs: Iterable[_Pair]) -> list[_Pair]:
        """Those that lack much, after taking over what other requests hold of their prompts."""
        far = []
        for row, slot in pairs:
            if self._lag(row, slot) > MAX_LAG:
                self._take_over(row, slot)
            if self._lag(row, slot) > MAX_LAG:
                far.append((row, slot))
        return far

    def _lag(self, row: ScoredRow, slot: Slot) -> int:
        """Tokens that are to be computed for a row."""
        return len(row.tokens) - slot.cached - (slot.drawn(row.tokens) is not None)

    def _take_over(self, row: ScoredRow, slot: Slot) -> None:
        holder = self._slots.holder(slot)
        if holder is None:
            return
        shared = min(holder.cached, len(slot.prompt))
        if shared > slot.cached:
            self._cache.copy_prefix(holder.number, slot.number, slot.cached, shared)
            self._done.shared_tokens += shared - slot.cached
            slot.record(row.tokens, shared)

    def _split(self, waiting: Sequence[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
        """The first row of each prompt, and those that can take over from it afterwards."""
        leaders: dict[Hashable, _Pair] = {}
        followers = []
        for row, slot in waiting:
            is_prompt_missing = slot.cached < len(slot.prompt)
            name: Hashable = slot.prompt if is_prompt_missing else ("", slot.number)
            if name in leaders:
                followers.append((row, slot))
            else:
                leaders[name] = (row, slot)
        return list(leaders.values()), followers

    def _extend(self, pairs: Sequence[_Pair], most: int) -> None:
        """Put up to ``most`` missing tokens of each row into the cache."""
        work = Work([self._row_work(row, slot, most=most) for row, slot in pairs], 0)
        self._forward.extend(work)
        self._commit(pairs, work)

    def _row_work(self, row: ScoredRow, slot: Slot, line: int | None = None, most: int | None = None) -> RowWork:
        drawn = slot.drawn(row.tokens)
        start = slot.cached + (drawn is not None)
        end = len(row.tokens) if most is None else start + most
        missing = row.tokens[start:end]
        for token in missing if drawn is None else (drawn, *missing):
            if not 0 <= token < self.model.config.vocab:
                raise GuidanceError(
                    f"token {token} of {row.key!r} is none of the value model's {self.model.config.vocab}; a "
                    "server that overlaps its scheduler has to tell the tokens of the last step before it samples"
                )
        return RowWork(slot=slot.number, cached=start, missing=missing, candidates_of=line, drawn=drawn)

    def _commit(self, pairs: Sequence[_Pair], work: Work) -> None:
        for (row, slot), done in zip(pairs, work.rows, strict=True):
            of_prompt = min(max(row.num_prompt - done.cached, 0), len(done.missing))
            self._done.prefill_tokens += of_prompt
            self._done.extended_tokens += len(done.missing) - of_prompt
            self._done.reused_tokens += done.drawn is not None
            is_scored = self._reuses and row.draws_candidates and done.candidates_of is not None
            slot.record(row.tokens, done.cached + len(done.missing), scored=is_scored)


def _groups(pairs: Sequence[_Pair]) -> Iterable[list[_Pair]]:
    """Rows that lack about as much, as many together as one pass should have; the longest first."""
    by_length = sorted(pairs, key=lambda pair: pair[1].cached - len(pair[0].tokens))
    while by_length:
        row, slot = by_length[0]
        columns = min(len(row.tokens) - slot.cached, MAX_ROW_TOKENS)
        size = max(1, MAX_PREFILL_TOKENS // columns)
        yield by_length[:size]
        by_length = by_length[size:]
