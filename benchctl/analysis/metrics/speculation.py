"""Speculative decoding: tokens drafted and accepted, in all and by position, of a run and of an arm.

Also the source of the drafts: the model that a server's options name for them.
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
from benchctl.errors import UsageError
from benchctl.profile.choices import ServerOptions
from benchctl.records.columns import StepColumns
from benchctl.records.loaded import LoadedRun

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Sums over the load of a run, or of all runs of an arm; None where they are not counted."""

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    """Drafts whose first, second, … token was accepted."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of speculative decoding; unknown without the counts that they need."""
        accepted_per_draft = quotient(self.accepted_tokens, self.drafts)
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": quotient(self.accepted_tokens, self.draft_tokens),
            "acceptance_length": None if accepted_per_draft is None else 1 + accepted_per_draft,
        }

    @property
    def positions(self) -> tuple["PositionAcceptance", ...]:
        """Acceptance at each position; empty where either count is unknown."""
        if self.drafts is None or self.accepted_by_position is None:
            return ()
        before = (self.drafts, *self.accepted_by_position)
        return tuple(
            PositionAcceptance(
                position=position,
                accepted=accepted,
                survival=quotient(accepted, self.drafts),
                conditional=quotient(accepted, before[position - 1]),
            )
            for position, accepted in enumerate(self.accepted_by_position, start=1)
        )


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
    survival_interval: Interval | None = None
    """At 95 %, by Student's t over the runs of an arm, within 0 and 1; None for one run."""
    conditional_interval: Interval | None = None


def draft_counts(steps: StepColumns) -> DraftCounts:
    """Tokens drafted and accepted in these steps."""
    positions = steps.accepted_by_position
    counts = {name: steps.known_values(name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    return DraftCounts(
        **{name: int(values.sum()) for name, values in counts.items() if len(values)},
        accepted_by_position=None
        if positions is None
        else tuple(np.nansum(positions, axis=0).astype(int).tolist()),
    )


def run_drafts(run: LoadedRun) -> DraftCounts:
    """The drafts of a run by its steps; by the growth of the server's counters where steps do not count them."""
    by_steps = draft_counts(run.columns)
    if by_steps.draft_tokens is not None:
        return by_steps
    counters = {name: getattr(COUNTERS, name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    grown = {name: measure_growth(run.prometheus, names) for name, names in counters.items()}
    return DraftCounts(
        **{name: growth.count for name, growth in grown.items() if growth is not None},
        accepted_by_position=measure_growth_by_position(run.prometheus, COUNTERS.accepted_by_position) or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDrafts:
    """Drafts of all usable runs of an arm."""

    counts: DraftCounts
    """Summed over the runs."""
    positions: tuple[PositionAcceptance, ...]
    """All runs together, with the scatter of the runs; empty where a run does not count them."""


def arm_drafts(runs: Sequence[LoadedRun]) -> ArmDrafts | None:
    """The drafts of an arm; None where no run verified a draft token. A count that any run lacks is None."""
    by_run = [run_drafts(run) for run in runs]
    by_position = [each for counts in by_run if (each := counts.accepted_by_position) is not None]
    accepted = tuple(map(sum, zip_longest(*by_position, fillvalue=0)))
    counts = DraftCounts(
        drafts=total([counts.drafts for counts in by_run]),
        draft_tokens=total([counts.draft_tokens for counts in by_run]),
        accepted_tokens=total([counts.accepted_tokens for counts in by_run]),
        accepted_by_position=accepted if len(by_position) == len(by_run) else None,
    )
    if not counts.draft_tokens:
        return None
    of_runs = [counts.positions for counts in by_run]
    positions = []
    for i, pooled in enumerate(counts.positions):
        reaching = [run[i] for run in of_runs if i < len(run)]
        survival = _interval(pooled.survival, [run.survival for run in reaching])
        conditional = _interval(pooled.conditional, [run.conditional for run in reaching])
        positions.append(replace(pooled, survival_interval=survival, conditional_interval=conditional))
    return ArmDrafts(counts=counts, positions=tuple(positions))


def _interval(centre: float | None, shares: Sequence[float | None]) -> Interval | None:
    values = known_values(shares)
    if centre is None or len(values) < 2:
        return None
    quantile = t_quantile(1 - (1 - CONFIDENCE) / 2, len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return max(0.0, centre - half), min(1.0, centre + half)


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
    source = server.draft_source
    shape, problem = None, source.problem
    try:
        shape = None if source.model is None else shape_for(source.model)
    except UsageError as error:
        problem = str(error)
    return Drafter(
        shape=shape, problem=problem, has_backfill=source.has_backfill, is_in_use=bool(server.speculates)
    )
