"""Speculative decoding of a run: tokens drafted and accepted, in all and by position.

Definitions are vLLM's (``vllm:spec_decode_*``). Sums are over the steps that count drafts; an engine that counts
none in a step without drafts means 0. A server without a step log has its counters instead. A draft shorter than
others has no token at their last positions, which the rates by position count like a rejected one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchctl.analysis.metrics.server_counters import (
    ACCEPTED_BY_POSITION,
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    DRAFTS,
    measure_growth,
    measure_growth_by_position,
)
from benchctl.analysis.metrics.unknown import quotient
from benchctl.records.columns.step_columns import StepColumns
from benchctl.records.loaded import LoadedRun
from benchctl.records.samples import PrometheusSample


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Sums over the load of a run; None where they are not counted."""

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    """Drafts whose first, second, … token was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAcceptance:
    """Acceptance at one position of the drafts."""

    position: int
    """Counted from 1."""
    accepted: int
    """Drafts accepted up to it."""
    survival: float | None
    """Those over all drafts, the marginal rate; None without drafts."""
    conditional: float | None
    """Those over the drafts accepted up to the position before; None where these are none."""


def draft_counts(steps: StepColumns) -> DraftCounts:
    """Tokens drafted and accepted in these steps."""
    return DraftCounts(
        drafts=_known_total(steps, "drafts"),
        draft_tokens=_known_total(steps, "draft_tokens"),
        accepted_tokens=_known_total(steps, "accepted_tokens"),
        accepted_by_position=_known_by_position(steps),
    )


def run_drafts(run: LoadedRun) -> DraftCounts:
    """The drafts of a run by its steps; by the server's counters where its steps do not count them."""
    by_steps = draft_counts(run.columns)
    return counted_drafts(run.prometheus) if by_steps.draft_tokens is None else by_steps


def counted_drafts(samples: Sequence[PrometheusSample]) -> DraftCounts:
    """Growth of the server's own counters during the load."""
    grown = {
        "drafts": measure_growth(samples, DRAFTS),
        "draft_tokens": measure_growth(samples, DRAFT_TOKENS),
        "accepted_tokens": measure_growth(samples, ACCEPTED_TOKENS),
    }
    return DraftCounts(
        **{name: None if growth is None else growth.count for name, growth in grown.items()},
        accepted_by_position=measure_growth_by_position(samples, ACCEPTED_BY_POSITION) or None,
    )


def speculation_metrics(counts: DraftCounts) -> dict[str, float | None]:
    """Metrics of speculative decoding; unknown without the counts that they need."""
    accepted_per_draft = quotient(counts.accepted_tokens, counts.drafts)
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "acceptance_rate": quotient(counts.accepted_tokens, counts.draft_tokens),
        "acceptance_length": None if accepted_per_draft is None else 1 + accepted_per_draft,
    }


def acceptance_by_position(counts: DraftCounts) -> tuple[PositionAcceptance, ...]:
    """Marginal and conditional acceptance of each position; empty where either count is unknown."""
    if counts.drafts is None or counts.accepted_by_position is None:
        return ()
    before = (counts.drafts, *counts.accepted_by_position)
    return tuple(
        PositionAcceptance(
            position=position,
            accepted=accepted,
            survival=quotient(accepted, counts.drafts),
            conditional=quotient(accepted, before[position - 1]),
        )
        for position, accepted in enumerate(counts.accepted_by_position, start=1)
    )


def _known_total(steps: StepColumns, name: str) -> int | None:
    counts = steps.known_values(name)
    return int(counts.sum()) if len(counts) else None


def _known_by_position(steps: StepColumns) -> tuple[int, ...] | None:
    accepted = steps.accepted_by_position
    if accepted is None:
        return None
    return tuple(int(count) for count in np.nansum(accepted, axis=0))
