"""Guidance of one decode step: from the logits of a batch to logits that a server samples as guidance wants it.

A server divides logits by the temperature T and samples the softmax. Rows that are guided get T ln p' at their
candidates and -inf elsewhere, which makes that softmax p' itself. The server must not filter such a row again: its
top_p or min_p, applied to p', would cut the guided distribution once more.

Rows that are not guided in a step keep their logits bit for bit, unless the server leaves filtering them to this
room (``GuideRow.is_server_filtering``): then they get T ln p of the same filters. Whether a row is guided never
depends on the rows beside it.

A step launches its work on the device and reads nothing back, with one exception: ``GuideSettings.skips_early``
makes it wait once for the numbers of candidates of all rows, one copy of B integers, because they show which rows
need no value model. Without it, even the counts for a log arrive later (``Guide.pending``).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from benchctl.guided.candidates import Candidates, select_candidates
from benchctl.guided.errors import GuidanceError
from benchctl.guided.guide_step import Arriving, GuideStep, PendingStep
from benchctl.guided.modes import candidate_values, log_tilt, mode_batch
from benchctl.guided.params import GuidanceParams, is_noop
from benchctl.guided.timing import StepTimer, Timer

GREEDY_TEMPERATURE: Final = 1e-5
"""At or below, a server takes the most probable token, and guidance leaves it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideRow:
    """A sequence of the batch that asks for guidance. ``tokens`` may be a live view that grows with the answer."""

    index: int
    """Its row of the logits."""
    key: Hashable
    """Identity of the request for as long as it lives."""
    params: GuidanceParams
    tokens: Sequence[int]
    """Prompt and output so far."""
    num_prompt: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    is_server_filtering: bool = True
    """False where the server samples this request without filters of its own, because they are applied here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSettings:
    """Settings of a server's guidance."""

    max_candidates: int = 64
    """Most candidates of a row; requests are checked against it with ``params.check_top_k`` when they come in."""
    is_eager: bool = True
    """True to load the value model at once, rather than in the first step that scores."""
    skips_early: bool = True
    """True to keep rows with one candidate, or below their entropy threshold, from the value model. That waits once
    per step for the base model; if false, all rows are scored, nothing waits, and the tokens are the same."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end an answer beside those that the value model names, such as the tokenizer's."""


class Counters(Protocol):
    """Totals that a scorer keeps since its start."""

    @property
    def prefill_tokens(self) -> int: ...
    @property
    def extended_tokens(self) -> int: ...
    @property
    def fused(self) -> int: ...


class ValueModel(Protocol):
    @property
    def eos_ids(self) -> Collection[int]: ...


class Scorer(Protocol):
    """A value model with the prefixes that it knows; see ``scoring``."""

    @property
    def model(self) -> ValueModel: ...
    @property
    def counters(self) -> Counters: ...
    def score(self, rows: Sequence[GuideRow], ids: Tensor, mask: Tensor, /) -> Tensor:
        """Outputs of the head [B, K], before the sigmoid, for each candidate after the tokens of its row."""
        ...

    def forget(self, keys: Iterable[Hashable], /) -> None: ...


class Guide:
    """Guides the steps of one server; ``pending`` and ``step`` are the counts of the last one."""

    def __init__(
        self, make_scorer: Callable[[], Scorer], settings: GuideSettings | None = None, timer: Timer | None = None
    ) -> None:
        self._make_scorer = make_scorer
        self._settings = settings or GuideSettings()
        self._timer = timer or StepTimer(None)
        self._scorer = make_scorer() if self._settings.is_eager else None  # no time of a step
        self._eos_ids: Tensor | None = None
        self._counted = GuideStep()
        self._counts: Arriving | None = None

    def _load(self) -> Scorer:
        """The value model; the first step that needs it pays for loading it, where it was not loaded before."""
        if self._scorer is None:
            with self._timer.section("value_model_load"):
                self._scorer = self._make_scorer()
        return self._scorer

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop what is kept of requests that ended."""
        if self._scorer is not None:
            self._scorer.forget(list(keys))

    @property
    def pending(self) -> PendingStep:
        """Counts of the last step, without waiting for them; where rows are skipped early, they are known."""
        return PendingStep(self._counted, self._counts)

    @property
    def step(self) -> GuideStep:
        """Counts of the last step; where rows are not skipped early, asking for them waits for the device."""
        return self.pending.step

    @torch.no_grad()
    def apply(self, logits: Tensor, rows: Sequence[GuideRow]) -> Tensor:
        """Guide these rows of ``logits`` [B, V], in place, and return it.

        A row is not guided where its temperature is 0, its stride leaves the step out, its guidance would change
        nothing (``skip_noop``), it has one candidate, or their entropy is at its threshold or below. GuidanceError
        when a row lets in more candidates than ``max_candidates``.
        """
        self._counted, self._counts = GuideStep(), None
        due = [_is_due(row) for row in rows]
        computed = [
            (row, is_due)
            for row, is_due in zip(rows, due, strict=True)
            if is_due or (not row.is_server_filtering and row.temperature > GREEDY_TEMPERATURE)
        ]
        if computed:
            with self._timer.section("lvm_apply_outer"):
                self._apply(logits, [row for row, _ in computed], [is_due for _, is_due in computed])
        return logits

    def _apply(self, logits: Tensor, rows: list[GuideRow], due: list[bool]) -> None:
        with self._timer.section("lvm_build_pending"):
            index = torch.tensor([row.index for row in rows]).to(logits.device, non_blocking=True)
            with self._timer.section("candidate_selection"):
                candidates, heat, is_open = self._candidates(logits.index_select(0, index), rows, due)
            scored = self._scored(candidates, is_open, due)
        log_probs = torch.log(candidates.probs)
        if scored:
            log_probs = self._guided(log_probs, candidates, rows, scored, is_open)
        with self._timer.section("lvm_apply_guidance"):
            scores = (heat * log_probs).to(logits.dtype)
            if self._settings.skips_early or not any(row.is_server_filtering for row in rows):
                guided = set(scored)
                written = [i for i, row in enumerate(rows) if i in guided or not row.is_server_filtering]
                _write(logits, index, candidates.ids, scores, written)
            else:
                is_ours = torch.tensor([not row.is_server_filtering for row in rows], dtype=torch.bool)
                is_written = is_open | is_ours.to(logits.device, non_blocking=True)
                _write_where(logits, index, candidates.ids, scores, is_written)

    def _candidates(
        self, logits: Tensor, rows: list[GuideRow], due: list[bool]
    ) -> tuple[Candidates, Tensor, Tensor]:
        """Candidates, temperatures [b, 1], and which rows are due and have a choice worth guiding [b]."""
        thresholds = (row.params.value_entropy_threshold for row in rows)
        numbers = [
            (row.temperature, row.top_k, row.top_p, row.min_p, -torch.inf if limit is None else limit, is_due)
            for row, limit, is_due in zip(rows, thresholds, due, strict=True)
        ]
        table = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
        temperature, top_k, top_p, min_p, threshold, is_due_row = table.unbind(dim=1)
        candidates = select_candidates(
            logits,
            temperature,
            top_k.long(),
            top_p,
            min_p,
            self._width(rows, logits.shape[1]),
            is_top_p_open=all(row.top_p >= 1 for row in rows),
        )
        is_open = (is_due_row > 0) & ~candidates.is_deterministic & (candidates.entropy > threshold)
        return candidates, temperature.to(candidates.probs.dtype)[:, None], is_open

    def _width(self, rows: list[GuideRow], vocabulary: int) -> int:
        """Columns that the candidates of these rows need."""
        widest = 1
        for row in rows:
            width = min(row.top_k, vocabulary) if row.top_k > 0 else vocabulary
            if width > self._settings.max_candidates:
                raise GuidanceError(
                    f"guidance: request {row.key!r} has top_k {row.top_k}, which lets in {width} candidates; "
                    f"set it to {self._settings.max_candidates} or less"
                )
            widest = max(widest, width)
        return widest

    def _scored(self, candidates: Candidates, is_open: Tensor, due: list[bool]) -> list[int]:
        """Positions of the rows that go to the value model; the counts of the step are taken here."""
        counts = candidates.counts * is_open
        if not self._settings.skips_early:
            self._counts = Arriving(torch.stack([is_open.sum(), counts.sum()]))
            return [position for position, is_due in enumerate(due) if is_due]
        numbers = counts.tolist()
        scored = [position for position, count in enumerate(numbers) if count]
        self._counted = replace(self._counted, guided_rows=len(scored), candidates=sum(numbers))
        return scored

    def _guided(
        self, log_probs: Tensor, candidates: Candidates, rows: list[GuideRow], scored: list[int], is_open: Tensor
    ) -> Tensor:
        """ln p' in the rows that are scored and have a choice, ln p in all others."""
        chosen = [rows[position] for position in scored]
        positions = torch.tensor(scored).to(log_probs.device, non_blocking=True)
        ids, probs, mask = (
            part.index_select(0, positions) for part in (candidates.ids, candidates.probs, candidates.mask)
        )
        raw = self._score(chosen, ids, mask).to(probs.dtype)
        with self._timer.section("lvm_apply_guidance"):
            params = [row.params for row in chosen]
            batch = mode_batch(params, probs.device, [len(row.tokens) - row.num_prompt for row in chosen])
            tilted = log_tilt(probs, candidate_values(raw, ids, self._ends(probs.device)), raw, mask, batch)
            has_choice = is_open.index_select(0, positions)[:, None]
            tilted = torch.where(has_choice, tilted, log_probs.index_select(0, positions))
            return log_probs.index_copy(0, positions, tilted)

    def _score(self, rows: list[GuideRow], ids: Tensor, mask: Tensor) -> Tensor:
        scorer = self._load()
        before = scorer.counters
        prefilled, extended, fused = before.prefill_tokens, before.extended_tokens, before.fused
        with self._timer.section("lvm_forward"):
            raw = scorer.score(rows, ids, mask)
        after = scorer.counters
        self._counted = replace(
            self._counted,
            value_prefill_tokens=after.prefill_tokens - prefilled,
            value_extend_tokens=after.extended_tokens - extended,
            fused=after.fused > fused,
        )
        return raw

    def _ends(self, device: torch.device) -> Tensor:
        if self._eos_ids is None:
            ends = self._settings.eos_ids.union(self._load().model.eos_ids)
            self._eos_ids = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        return self._eos_ids


def _is_due(row: GuideRow) -> bool:
    """True for a step of the request that is guided as far as the host can tell.

    A stride counts the tokens of the answer, not calls: a server that prefills a prompt in several steps, or takes
    up a preempted request again, calls more often than there are tokens.
    """
    if row.temperature <= GREEDY_TEMPERATURE or (row.params.skip_noop and is_noop(row.params)):
        return False
    return (len(row.tokens) - row.num_prompt) % row.params.stride == 0


def _write(logits: Tensor, index: Tensor, ids: Tensor, scores: Tensor, written: list[int]) -> None:
    """Put ``scores`` [b, K] at ``ids``, and -inf elsewhere, of those rows of ``index`` that are ``written``."""
    if not written:
        return
    positions = torch.tensor(written).to(logits.device, non_blocking=True)
    rows = index.index_select(0, positions)
    logits.index_fill_(0, rows, -torch.inf)
    logits.index_put_((rows[:, None], ids.index_select(0, positions)), scores.index_select(0, positions))


def _write_where(logits: Tensor, index: Tensor, ids: Tensor, scores: Tensor, is_written: Tensor) -> None:
    """The same where only the device knows which rows are written [b]; reads and writes whole rows."""
    rows = logits.index_select(0, index)
    is_kept = ~is_written[:, None]
    scores = torch.where(is_kept, rows.gather(1, ids), scores)
    logits.index_copy_(0, index, rows.masked_fill(~is_kept, -torch.inf).scatter(1, ids, scores))
