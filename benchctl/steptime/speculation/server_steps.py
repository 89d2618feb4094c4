"""Times of the steps of a server that speculates, from step times of its target and its draft model.

A step with K drafts of B rows that hold S tokens each has

    drafting       K passes of the draft over B rows, at contexts S, S + 1, ..., S + K - 1
    verification   one pass of the target over B (K + 1) tokens, with logits for each of them
    backfill       the draft's keys and values of the bonus token of the rows that accepted all K, whose last draft
                   was never an input of the draft; B P(K) rows on average

A backfill by ``expansion`` puts those tokens as further rows into the first draft pass; one by ``prefill`` is a
pass of its own, in the steps in which a row needs it: 1 - (1 - P(K))^B of them. Step times are taken at mean rows.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from benchctl.steptime.queueing import StepSeconds
from benchctl.steptime.work import one_step

Backfill: TypeAlias = Literal["none", "expansion", "prefill"]
"""``none`` costs nothing: a draft without a cache, such as n-grams, or one that is a head of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """Seconds of the parts of one step; without drafts ``verify_s`` is the step."""

    draft_s: float
    verify_s: float
    backfill_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.backfill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """Step times of both models of one server, whose rows hold ``context`` tokens in the cache."""

    target_s: StepSeconds
    draft_s: StepSeconds
    context: float
    backfill: Backfill = "none"

    def plain_s(self, rows: float) -> float:
        """A step without speculation."""
        return self.target_s(one_step(num_decodes=rows, context=self.context))

    def step(self, rows: float, num_draft_tokens: int, all_accepted: float, *, bonus: bool) -> SpeculativeStep:
        """A step with K drafts of each row, all of which are accepted with probability ``all_accepted``."""
        if not num_draft_tokens:
            return SpeculativeStep(draft_s=0.0, verify_s=self.plain_s(rows), backfill_s=0.0)
        verified = one_step(num_decodes=rows, context=self.context, row_tokens=num_draft_tokens + 1)
        return SpeculativeStep(
            draft_s=sum(self._pass_s(rows, position) for position in range(num_draft_tokens)),
            verify_s=self.target_s(verified),
            backfill_s=self._backfill_s(rows, all_accepted) if bonus else 0.0,
        )

    def _pass_s(self, rows: float, position: int) -> float:
        return self.draft_s(one_step(num_decodes=rows, context=self.context + position))

    def _backfill_s(self, rows: float, all_accepted: float) -> float:
        """Time that the backfill adds to a step on average."""
        if self.backfill == "none" or not all_accepted:
            return 0.0
        if self.backfill == "expansion":
            return self._pass_s(rows * (1 + all_accepted), 0) - self._pass_s(rows, 0)
        share: float = 1 - (1 - all_accepted) ** rows
        return share * self._pass_s(rows * all_accepted / share, 0)


def as_share(target_s: StepSeconds, share: float) -> StepSeconds:
    """Step times of a draft that is known by its cost alone: a share of the target's step of the same work."""
    return lambda work: share * target_s(work)
