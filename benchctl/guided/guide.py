"""One guided step of a server: which rows are guided, by which values, and what it counted."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from benchctl.guided.operations import PLAIN, Arriving, Operations, to_device
from benchctl.guided.params import GuidanceError, GuideStep
from benchctl.guided.rows import GREEDY_TEMPERATURE, Candidates, GuideRow, RowTable, row_table, select_candidates
from benchctl.guided.timing import PendingStep, StepTimer

if TYPE_CHECKING:
    from benchctl.guided.value_model.scoring import Scorer


WORTH_WAITING: Final = 0.25
"""Share of rows without a choice from which waiting is worth it: the wait leaves a device idle for about a quarter
of what a pass of the value model takes."""
_AGE: Final = 2
"""Steps after which counts are looked at: by then they have arrived, and a decision never depends on how soon."""


class Skipping:
    """Decides for each step; ``is_on`` None by the share of rows without a choice two steps ago."""

    def __init__(self, is_on: bool | None) -> None:
        self._is_on = is_on
        self._steps: deque[tuple[int, int | Arriving]] = deque(maxlen=_AGE)

    def is_worth_it(self) -> bool:
        """True to wait in the step that comes now."""
        if self._is_on is not None:
            return self._is_on
        if len(self._steps) < _AGE:
            return False
        num_due, open_rows = self._steps[0]
        num_open = open_rows if isinstance(open_rows, int) else sum(count > 0 for count in open_rows.read())
        return num_due - num_open >= WORTH_WAITING * num_due

    def note(self, num_due: int, open_rows: int | Arriving) -> None:
        """Note how many of the due rows of this step had a choice, or the numbers of candidates that will tell."""
        if self._is_on is None and num_due:
            self._steps.append((num_due, open_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSettings:
    """Settings of a server's guidance."""

    max_candidates: int = 64
    """Most candidates of a row; requests are checked against it with ``params.check_top_k`` when they come in."""
    is_eager: bool = True
    """True to load the value model at once, rather than in the first step that scores."""
    skips_early: bool | None = None
    """True to keep rows with one candidate, or below their entropy threshold, from the value model. That waits once
    per step for the base model; if false, all rows are scored, nothing waits, and the tokens are the same. None:
    true while a quarter of the rows or more need no values."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end an answer beside those that the value model names, such as the tokenizer's."""


class Guide:
    """Guides the steps of one server; ``pending`` are the counts of the last one."""

    def __init__(
        self,
        make_scorer: "Callable[[], Scorer]",
        settings: GuideSettings | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        self._make_scorer = make_scorer
        self._settings = settings or GuideSettings()
        self._timer = timer or StepTimer(None)
        self._scorer = make_scorer() if self._settings.is_eager else None  # no time of a step
        self._skipping = Skipping(self._settings.skips_early)
        self._eos_ids: Tensor | None = None
        self._counted = GuideStep()
        self._counts: Arriving | None = None

    def _load(self) -> "Scorer":
        """The value model; the first step that needs it pays for loading it, where it was not loaded before."""
        if self._scorer is None:
            with self._timer.section("value_model_load"):
                self._scorer = self._make_scorer()
        return self._scorer

    @property
    def _operations(self) -> Operations:
        """Those of the value model, torch's before there is one."""
        return PLAIN if self._scorer is None else self._scorer.model.operations

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop what is kept of requests that ended."""
        if self._scorer is not None:
            self._scorer.forget(list(keys))

    @property
    def pending(self) -> PendingStep:
        """Counts of the last step, without waiting for them; where rows are skipped early, they are known."""
        return PendingStep(self._counted, self._counts)

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
            if is_due or (row.draws_candidates and row.temperature > GREEDY_TEMPERATURE)
        ]
        if computed:
            with self._timer.section("lvm_apply_outer"):
                computed_indices = {row.index for row, _ in computed}
                others = [row for row in rows if row.index not in computed_indices]
                self._apply(logits, [row for row, _ in computed], [is_due for _, is_due in computed], others)
        return logits

    def _apply(self, logits: Tensor, rows: list[GuideRow], due: list[bool], others: list[GuideRow]) -> None:
        skips = self._skipping.is_worth_it()
        with self._timer.section("lvm_build_pending"):
            table = row_table(rows, due, logits.device)
            with self._timer.section("candidate_selection"):
                candidates = select_candidates(
                    logits.index_select(0, table.index),
                    table.limits,
                    self._width(rows, logits.shape[1]),
                    is_top_p_open=all(row.top_p >= 1 for row in rows),
                    operations=self._operations,
                )
            scored = self._scored(candidates, due, skips=skips)
        is_scored = set(scored)
        others = [*(row for position, row in enumerate(rows) if position not in is_scored), *others]
        if scored:
            log_probs = self._guided(candidates, table, rows, scored, others)
        else:
            log_probs = torch.log(candidates.probs)
            if self._scorer is not None:  # extend rows of a step in which nothing is scored
                with self._counting(self._scorer):
                    self._scorer.keep_up(others)
        with self._timer.section("lvm_apply_guidance"):
            self._operations.write_candidates(
                logits, table.index, candidates.ids, log_probs, candidates.counts, table.limits
            )

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

    def _scored(self, candidates: Candidates, due: list[bool], *, skips: bool) -> list[int]:
        """Positions of the rows that go to the value model; the counts of the step are taken here."""
        if not skips:
            self._counts = Arriving(candidates.counts)
            self._skipping.note(sum(due), self._counts)
            return [position for position, is_due in enumerate(due) if is_due]
        numbers = candidates.counts.tolist()
        scored = [position for position, number in enumerate(numbers) if number]
        self._skipping.note(sum(due), len(scored))
        self._counted = replace(self._counted, guided_rows=len(scored), candidates=sum(numbers))
        return scored

    def _guided(
        self,
        candidates: Candidates,
        table: RowTable,
        rows: list[GuideRow],
        scored: list[int],
        others: list[GuideRow],
    ) -> Tensor:
        """ln p' in the rows that are scored and have a choice, ln p in all others."""
        ids, lines = candidates.ids, table.lines
        if len(scored) < len(rows):
            positions = to_device(torch.tensor(scored), ids.device)
            lines = torch.full_like(lines, -1).index_copy_(
                0, positions, torch.arange(len(scored), device=ids.device)
            )
            ids = ids.index_select(0, positions)
        scorer = self._load()
        with self._timer.section("lvm_forward"), self._counting(scorer):
            raw = scorer.score([rows[position] for position in scored], ids, others)
        with self._timer.section("lvm_apply_guidance"):
            return self._operations.tilt_candidates(
                candidates.probs, candidates.mask, candidates.counts, candidates.ids, raw, lines,
                self._ends(ids.device), table.modes.table, table.modes.rules,
            )  # fmt: skip

    @contextmanager
    def _counting(self, scorer: "Scorer") -> Iterator[None]:
        """Add to the step what the scorer does inside."""
        before = scorer.counters
        yield
        after = scorer.counters
        num_passes = after.recordable - before.recordable
        self._counted = replace(
            self._counted,
            value_prefill_tokens=after.prefill_tokens - before.prefill_tokens,
            value_extend_tokens=after.extended_tokens - before.extended_tokens,
            value_reuse_tokens=after.reused_tokens - before.reused_tokens,
            fused=after.fused > before.fused if after.steps > before.steps else None,
            value_replayed=after.replays - before.replays == num_passes if num_passes else None,
            value_recordings=after.recordings - before.recordings if num_passes else None,
        )

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
    if row.temperature <= GREEDY_TEMPERATURE or (row.params.skip_noop and row.params.is_neutral):
        return False
    return (len(row.tokens) - row.num_prompt) % row.params.stride == 0
