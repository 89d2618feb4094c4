"""Speculative decoding of a run: tokens drafted and accepted, in all and by position.

Drafts in the FLOPs of a run: the model that drafts, and the counts of what both models did for drafts.
Speculative decoding of one arm over its blocks: counts in all, acceptance by position with its interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import stdev
from typing import Final

import numpy as np

from benchctl.analysis.metrics.latency import known_values, quotient, total
from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth, measure_growth_by_position
from benchctl.analysis.statistics.intervals import Interval, t_quantile
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.costs.work import RunLengths, StepLogCounts
from benchctl.errors import UsageError
from benchctl.profile.engine_options import ServerOptions
from benchctl.records.columns import StepColumns
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import PrometheusSample


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
    positions = steps.accepted_by_position
    return DraftCounts(
        drafts=_known_total(steps, "drafts"),
        draft_tokens=_known_total(steps, "draft_tokens"),
        accepted_tokens=_known_total(steps, "accepted_tokens"),
        accepted_by_position=None
        if positions is None
        else tuple(np.nansum(positions, axis=0).astype(int).tolist()),
    )


def run_drafts(run: LoadedRun) -> DraftCounts:
    """The drafts of a run by its steps; by the server's counters where its steps do not count them."""
    by_steps = draft_counts(run.columns)
    return counted_drafts(run.prometheus) if by_steps.draft_tokens is None else by_steps


def counted_drafts(samples: Sequence[PrometheusSample]) -> DraftCounts:
    """Growth of the server's own counters during the load."""
    grown = {
        "drafts": measure_growth(samples, COUNTERS.drafts),
        "draft_tokens": measure_growth(samples, COUNTERS.draft_tokens),
        "accepted_tokens": measure_growth(samples, COUNTERS.accepted_tokens),
    }
    return DraftCounts(
        **{name: None if growth is None else growth.count for name, growth in grown.items()},
        accepted_by_position=measure_growth_by_position(samples, COUNTERS.accepted_by_position) or None,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The source of the drafts of a run; without ``shape`` and ``problem``, no pass of any model."""

    shape: ModelShape | None = None
    problem: str | None = None
    """The reason why the shape of the model is unknown."""
    has_backfill: bool = True
    """See ``DraftSource``."""
    is_in_use: bool = True
    """The options say that the server speculates; False where they do not say."""


def drafter_of(server: ServerOptions) -> Drafter | None:
    """The drafter of a server with these options; None where they say that it does not speculate."""
    if server.speculates is False:
        return None
    source, is_in_use = server.draft_source, bool(server.speculates)
    if source.model is None:
        return Drafter(problem=source.problem, is_in_use=is_in_use)
    try:
        shape = shape_for(source.model)
    except UsageError as error:
        return Drafter(problem=str(error), is_in_use=is_in_use)
    return Drafter(shape=shape, has_backfill=source.has_backfill, is_in_use=is_in_use)


def with_drafts(
    counts: StepLogCounts, run: LoadedRun, lengths: RunLengths, drafter: Drafter | None, messages: dict[str, str]
) -> StepLogCounts:
    """The counts with the drafts of a run; what is unknown is not charged, and ``messages`` say so."""
    drafts = run_drafts(run)
    if not drafts.draft_tokens:
        if drafts.draft_tokens is None and drafter is not None and drafter.is_in_use:
            message = (
                "observed FLOPs: drafts are not counted, so they are not charged, neither proposed nor verified"
            )
            messages.setdefault("drafts-not-charged", message)
        return counts
    verified = _verification_tokens(run, lengths, drafts)
    if verified is None:
        message = (
            "observed FLOPs: accepted drafts are not counted, so drafts are not charged, not even verified ones"
        )
        messages.setdefault("drafts-not-charged", message)
        return counts
    counts = replace(counts, verification_tokens=verified)
    return _with_passes(counts, drafts, drafter or Drafter(problem="the profile names no drafts"), messages)


def _verification_tokens(run: LoadedRun, lengths: RunLengths, drafts: DraftCounts) -> int | None:
    """Tokens that the base model forwarded for decoding sequences, drafts among them; None where it is unknown.

    By the step log where it counts drafts; else each output token but the first, and the rejected drafts, without
    those after the end of an output.
    """
    logged = run.columns.total("num_decode_tokens")
    if logged is not None and len(run.columns.known_values("draft_tokens")):
        return logged
    if drafts.draft_tokens is None or drafts.accepted_tokens is None:
        return None
    decoded = sum(max(output - 1, 0) for _, output in lengths.sequences)
    return decoded + drafts.draft_tokens - drafts.accepted_tokens


def _with_passes(
    counts: StepLogCounts, drafts: DraftCounts, drafter: Drafter, messages: dict[str, str]
) -> StepLogCounts:
    """The counts with the draft model's passes.

    It forwards the prompts that the base model prefills, and a token for each that it proposes. Of a draft accepted
    whole, the last token is not in its cache when a bonus token follows: a backfill computes it.
    """
    if drafter.problem is not None:
        messages.setdefault(
            "drafts-not-charged",
            f"observed FLOPs: verification is charged, the passes that proposed drafts are not: {drafter.problem}",
        )
        return counts
    if drafter.shape is None:
        messages.setdefault(
            "drafts-without-model",
            "observed FLOPs: drafts are looked up in text, which costs no FLOPs; their verification is charged",
        )
        return counts
    by_position = drafts.accepted_by_position
    if drafter.has_backfill and by_position is None:
        messages.setdefault(
            "drafts-not-charged",
            "observed FLOPs: acceptance by position is unknown, so the backfill of bonus tokens is not charged",
        )
    return replace(
        counts,
        draft_prefill_tokens=counts.base_prefill_tokens,
        draft_tokens=drafts.draft_tokens or 0,
        backfill_tokens=by_position[-1] if drafter.has_backfill and by_position else 0,
    )


CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionOverBlocks:
    """One position of an arm's drafts: all its runs together, and the scatter of its runs."""

    pooled: PositionAcceptance
    survival_interval: Interval | None
    """At 95 %, by Student's t over the runs, within 0 and 1; None for one run."""
    conditional_interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDrafts:
    """Drafts of all usable runs of an arm."""

    counts: DraftCounts
    """Summed over the runs."""
    acceptance_rate: float | None
    acceptance_length: float | None
    positions: tuple[PositionOverBlocks, ...]
    """Empty where a run does not count them."""


def arm_drafts(runs: Sequence[LoadedRun]) -> ArmDrafts | None:
    """The drafts of an arm; None where no run verified a draft token."""
    by_run = [run_drafts(run) for run in runs]
    counts = _summed(by_run)
    if not counts.draft_tokens:
        return None
    rates = speculation_metrics(counts)
    return ArmDrafts(
        counts=counts,
        acceptance_rate=rates["acceptance_rate"],
        acceptance_length=rates["acceptance_length"],
        positions=_positions(by_run, counts),
    )


def _summed(by_run: Sequence[DraftCounts]) -> DraftCounts:
    """Sums over the runs; None for a count that any run lacks."""
    positions = [each for counts in by_run if (each := counts.accepted_by_position) is not None]
    accepted = tuple(map(sum, zip_longest(*positions, fillvalue=0)))
    return DraftCounts(
        drafts=total([counts.drafts for counts in by_run]),
        draft_tokens=total([counts.draft_tokens for counts in by_run]),
        accepted_tokens=total([counts.accepted_tokens for counts in by_run]),
        accepted_by_position=accepted if len(positions) == len(by_run) else None,
    )


def _positions(by_run: Sequence[DraftCounts], counts: DraftCounts) -> tuple[PositionOverBlocks, ...]:
    runs = [acceptance_by_position(each) for each in by_run]
    return tuple(
        PositionOverBlocks(
            pooled=pooled,
            survival_interval=_interval(pooled.survival, [run[i].survival for run in runs if i < len(run)]),
            conditional_interval=_interval(
                pooled.conditional, [run[i].conditional for run in runs if i < len(run)]
            ),
        )
        for i, pooled in enumerate(acceptance_by_position(counts))
    )


def _interval(centre: float | None, shares: Sequence[float | None]) -> Interval | None:
    values = known_values(shares)
    if centre is None or len(values) < 2:
        return None
    quantile = t_quantile(1 - (1 - CONFIDENCE) / 2, len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return max(0.0, centre - half), min(1.0, centre + half)
