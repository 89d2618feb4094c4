"""Acceptance by position of measured drafts: counted in each arm, pooled over arms, tested for being one number.

Where some drafts are shorter than others, as before the last token of a request, a step does not tell which of its
drafts had a token at a position. Steps whose drafts all have the full length are enough then: acceptance does not
depend on them. Where fewer than half of the drafts are in such steps, all count, and a missing token counts like a
rejected one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import chi2

from benchctl.records.columns.step_columns import Floats, StepColumns
from benchctl.steptime.speculation.acceptance import PositionCounts

_ENOUGH_FRAC: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDrafts:
    """Drafts of one arm and how many of them were accepted up to each position."""

    drafts: int
    accepted: tuple[int, ...]
    whole_frac: float
    """Share of all drafts that are in steps whose drafts have the full length; only these count if it is enough."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a draft of full length; 0 without drafts."""
        return len(self.accepted)

    @property
    def is_exact(self) -> bool:
        """True unless tokens that were never drafted count as rejected."""
        return self.whole_frac >= _ENOUGH_FRAC


def count_drafts(runs: Sequence[StepColumns]) -> ArmDrafts:
    """Drafts of the runs of one arm, without the warm-up."""
    drafted = [columns for run in runs if (columns := _columns(run)) is not None]
    longest = max((accepted.shape[1] for _, accepted, _ in drafted), default=0)
    all_steps, whole_steps = np.zeros(longest + 1), np.zeros(longest + 1)
    for drafts, accepted, draft_tokens in drafted:
        num = accepted.shape[1]
        counts = np.column_stack([drafts, accepted])
        all_steps[: num + 1] += counts.sum(axis=0)
        whole_steps[: num + 1] += counts[draft_tokens == drafts * longest].sum(axis=0)
    if not all_steps[0]:
        return ArmDrafts(drafts=0, accepted=(), whole_frac=0.0)
    whole_frac = float(whole_steps[0] / all_steps[0])
    counted = whole_steps if whole_frac >= _ENOUGH_FRAC else all_steps
    return ArmDrafts(drafts=int(counted[0]), accepted=tuple(int(n) for n in counted[1:]), whole_frac=whole_frac)


def _columns(run: StepColumns) -> tuple[Floats, Floats, Floats] | None:
    """Drafts, accepted drafts by position and draft tokens of the steps that count them; None without any."""
    accepted = run.accepted_by_position
    drafts, tokens = run.optional("drafts"), run.optional("draft_tokens")
    if accepted is None or drafts is None:
        return None
    drafts = np.nan_to_num(drafts)
    tokens = drafts * accepted.shape[1] if tokens is None else np.nan_to_num(tokens)
    has_counts = ~np.isnan(accepted).any(axis=1)
    return drafts[has_counts], accepted[has_counts], tokens[has_counts]


def pooled(arms: Sequence[ArmDrafts]) -> list[PositionCounts]:
    """Accepted of judged at each position over all arms; a position that no draft reached ends the list."""
    totals: list[PositionCounts] = []
    for position in range(max((arm.num_draft_tokens for arm in arms), default=0)):
        reached = [(arm.drafts, *arm.accepted) for arm in arms if arm.num_draft_tokens > position]
        judged = sum(counts[position] for counts in reached)
        if not judged:
            break
        totals.append(PositionCounts(accepted=sum(counts[position + 1] for counts in reached), judged=judged))
    return totals


def same_everywhere_p(counts: Sequence[PositionCounts]) -> float | None:
    """p of the hypothesis that all positions have one acceptance; None for fewer than two positions."""
    return _chi_square_p([counts])


def same_in_arms_p(arms: Sequence[ArmDrafts]) -> float | None:
    """p of the hypothesis that each position has one acceptance in all arms; None where no two arms share one.

    It fails where requests differ in acceptance: those that accept little take more steps and more of the drafts,
    the more so the longer the drafts are.
    """
    groups = []
    for position in range(max((arm.num_draft_tokens for arm in arms), default=0)):
        reached = [(arm.drafts, *arm.accepted) for arm in arms if arm.num_draft_tokens > position]
        groups.append(
            [PositionCounts(accepted=n[position + 1], judged=n[position]) for n in reached if n[position]]
        )
    return _chi_square_p(groups)


def _chi_square_p(groups: Sequence[Sequence[PositionCounts]]) -> float | None:
    """Chi-square test that each group has one acceptance a: sum of (k - n a)^2 / (n a (1 - a)).

    Its degrees of freedom are counts minus groups. A group whose drafts were all accepted, or none, cannot
    contradict.
    """
    statistic, degrees = 0.0, 0
    for counts in groups:
        if len(counts) < 2:
            continue
        mean = sum(each.accepted for each in counts) / sum(each.judged for each in counts)
        degrees += len(counts) - 1
        if 0 < mean < 1:
            statistic += sum(
                (each.accepted - each.judged * mean) ** 2 / (each.judged * mean * (1 - mean)) for each in counts
            )
    return float(chi2.sf(statistic, degrees)) if degrees else None
