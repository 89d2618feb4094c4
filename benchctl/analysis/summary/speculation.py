"""Measured speculation beside the law: tokens per step, time per step and speed-up of every arm that drafts.

The acceptance of a position is pooled over all arms and blocks: given that all tokens before were accepted, it does
not depend on how many follow. From it the law expects the tokens per step of each arm, with the last step of each
request cut at the length that was measured. Time per step is that of decoding steps over the baseline's; tokens
over time is the expected speed-up, and the measured one is the baseline's TPOT over the arm's.

Intervals of measured values are over blocks, those of the acceptance over drafts taken as independent.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy.stats import chi2

from benchctl.analysis.experiment.arms import Arm
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.analysis.metrics.request_timing import measured
from benchctl.analysis.metrics.speculation import DraftCounts, draft_counts
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.analysis.summary.draft_costs import fit_costs, mean_over_blocks
from benchctl.errors import UsageError
from benchctl.steptime.speculation.acceptance import Acceptance, PositionCounts, counted
from benchctl.steptime.speculation.estimate import Estimate, estimate, quotient
from benchctl.steptime.speculation.law import DraftCost, steps_by_length, tokens_by_drafts, tokens_per_step

_LONGEST_OUTPUT: Final = 4096
"""Outputs from here on are taken as endless: their last step hardly counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArm:
    """One arm that drafts; ratios to the baseline are None where it has none without drafts."""

    label: str
    num_draft_tokens: int
    bonus: bool
    num_blocks: int
    drafts: int
    accepted_by_position: tuple[int, ...]
    endless_tokens: Estimate
    """Tokens per step that the law expects of an endless request."""
    expected_tokens: Estimate
    """The same with the last step of each request cut at its length."""
    measured_tokens: Estimate | None
    step_ratio: Estimate | None
    """Time of a decoding step over the baseline's."""
    expected_speed_up: Estimate | None
    """``expected_tokens / step_ratio``."""
    measured_speed_up: Estimate | None
    """The baseline's time per output token over this arm's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeculation:
    """All arms of a result directory that draft."""

    baseline: str | None
    """Label of the arm that the ratios refer to; None without one that does not draft."""
    arms: tuple[SpeculativeArm, ...]
    acceptance: Acceptance
    """Pooled over the arms."""
    same_everywhere_p: float | None
    """p of the hypothesis that all positions have one acceptance; None for a single position."""
    draft_cost: Estimate | None
    """Time that one more draft token adds to a step, as a share of the baseline's."""
    backfill_cost: Estimate | None
    """Time that bonus tokens add; None unless arms with and without them were measured."""

    @property
    def cost(self) -> DraftCost | None:
        """The measured costs; None without a baseline. A negative one, which noise can give, counts as 0."""
        if self.draft_cost is None:
            return None
        backfill = 0.0 if self.backfill_cost is None else max(0.0, self.backfill_cost.value)
        return DraftCost(draft=max(0.0, self.draft_cost.value), backfill=backfill)


def agrees(expected: Estimate | None, measured: Estimate | None) -> bool | None:
    """True if the two differ by no more than their intervals add up to, in squares of logarithms; None if unknown."""
    if expected is None or measured is None:
        return None
    widths = expected.log_half_width, measured.log_half_width
    if widths[0] is None or widths[1] is None:
        return None
    return abs(math.log(measured.value / expected.value)) <= math.hypot(widths[0], widths[1])


def measured_speculation(experiment: Experiment) -> MeasuredSpeculation:
    """Speculation of an experiment beside the law. Raises UsageError where no run counted drafts by position."""
    counts = {arm.label: _arm_counts(arm) for arm in experiment.arms}
    drafting = [arm for arm in experiment.arms if _drafts(counts[arm.label])]
    if not drafting:
        raise UsageError(
            f"{experiment.path}: no usable run counts accepted drafts by position; measure with speculation and a "
            "step log, or state counts with --drafts and --accepted"
        )
    acceptance = counted(_pooled([counts[arm.label] for arm in drafting]))
    pairs = {pair.b.label: PairedRuns.of(pair, (experiment, experiment)) for pair in baseline_pairs(experiment)}
    arms = tuple(
        _speculative_arm(experiment, arm, counts[arm.label], acceptance, _plain_pair(pairs.get(arm.label), counts))
        for arm in drafting
    )
    ratios = {
        arm.label: ratio
        for arm in drafting
        if (pair := _plain_pair(pairs.get(arm.label), counts)) is not None
        and (ratio := pair.ratio("decode_step_ms")) is not None
    }
    draft_cost, backfill_cost = fit_costs({arm.label: (arm.num_draft_tokens, arm.bonus) for arm in arms}, ratios)
    return MeasuredSpeculation(
        baseline=next(
            (pair.pair.a.label for pair in pairs.values() if not _drafts(counts[pair.pair.a.label])), None
        ),
        arms=arms,
        acceptance=acceptance,
        same_everywhere_p=_same_everywhere_p(acceptance.counts),
        draft_cost=draft_cost,
        backfill_cost=backfill_cost,
    )


def _arm_counts(arm: Arm) -> DraftCounts:
    """Sums over the usable runs."""
    runs = [draft_counts(run.columns) for run in arm.runs.values()]
    drafted = [counts for counts in runs if counts.drafts and counts.accepted_by_position]
    longest = max((len(counts.accepted_by_position or ()) for counts in drafted), default=0)
    sums = [0] * longest
    for counts in drafted:
        for position, accepted in enumerate(counts.accepted_by_position or ()):
            sums[position] += accepted
    return DraftCounts(
        drafts=sum(counts.drafts or 0 for counts in drafted),
        draft_tokens=sum(counts.draft_tokens or 0 for counts in drafted),
        accepted_tokens=sum(sums),
        accepted_by_position=tuple(sums),
    )


def _drafts(counts: DraftCounts) -> bool:
    return bool(counts.drafts and counts.accepted_by_position)


def _pooled(arms: Sequence[DraftCounts]) -> list[PositionCounts]:
    """Accepted of judged at each position, over the arms that draft so far; one that none reached ends the list."""
    totals: list[list[int]] = []
    for counts in arms:
        before = (counts.drafts or 0, *(counts.accepted_by_position or ()))
        for position, accepted in enumerate(before[1:]):
            if position == len(totals):
                totals.append([0, 0])
            totals[position][0] += accepted
            totals[position][1] += before[position]
    return [PositionCounts(accepted=accepted, judged=judged) for accepted, judged in totals if judged]


def _plain_pair(pair: PairedRuns | None, counts: Mapping[str, DraftCounts]) -> PairedRuns | None:
    """The pair if its first side does not draft."""
    return None if pair is None or _drafts(counts[pair.pair.a.label]) else pair


def _speculative_arm(
    experiment: Experiment, arm: Arm, counts: DraftCounts, acceptance: Acceptance, pair: PairedRuns | None
) -> SpeculativeArm:
    accepted = counts.accepted_by_position or ()
    num, bonus = len(accepted), _has_bonus(experiment, arm)
    endless = _endless_tokens(acceptance, num, bonus=bonus)
    expected = endless.times(_cut_share(arm, acceptance.of(num), bonus=bonus))
    step_ratio = None if pair is None else _ratio_estimate(pair.ratio("decode_step_ms"))
    tpot = None if pair is None else _ratio_estimate(pair.ratio("tpot_ms"))
    return SpeculativeArm(
        label=arm.label,
        num_draft_tokens=num,
        bonus=bonus,
        num_blocks=len(arm.runs),
        drafts=counts.drafts or 0,
        accepted_by_position=accepted,
        endless_tokens=endless,
        expected_tokens=expected,
        measured_tokens=mean_over_blocks(
            [experiment.counted_metrics(run)["tokens_per_step"] for run in arm.runs.values()]
        ),
        step_ratio=step_ratio,
        expected_speed_up=None if step_ratio is None else quotient(expected, step_ratio),
        measured_speed_up=None if tpot is None else quotient(Estimate(1.0, 1.0, 1.0), tpot),
    )


def _has_bonus(experiment: Experiment, arm: Arm) -> bool:
    """False where the engine's setting ``bonus_token`` says so; engines without that setting have bonus tokens."""
    run = next(iter(arm.runs.values()))
    settings = experiment.settings(run.record)
    return settings is None or bool(getattr(settings.server, "bonus_token", True))


def _endless_tokens(acceptance: Acceptance, num: int, *, bonus: bool) -> Estimate:
    draws = tokens_by_drafts(acceptance.survival_draws(num), bonus=bonus)[-1]
    return estimate(tokens_per_step(acceptance.of(num), bonus=bonus), draws)


def _cut_share(arm: Arm, acceptance: Sequence[float], *, bonus: bool) -> float:
    """Tokens per step of requests as long as those measured over those of endless ones.

    The first token of a request comes from its prompt.
    """
    lengths: Counter[int] = Counter()
    for run in arm.runs.values():
        for request in measured(run.requests):
            if request.completion_tokens and request.choices:
                lengths[round(request.completion_tokens / len(request.choices)) - 1] += len(request.choices)
    decoded = {tokens: number for tokens, number in lengths.items() if 0 < tokens <= _LONGEST_OUTPUT}
    if not decoded:
        return 1.0
    by_length = steps_by_length(max(decoded), acceptance, bonus=bonus)
    tokens = sum(tokens * number for tokens, number in decoded.items())
    steps = sum(by_length[tokens] * number for tokens, number in decoded.items())
    return tokens / steps / tokens_per_step(acceptance, bonus=bonus)


def _same_everywhere_p(counts: Sequence[PositionCounts]) -> float | None:
    """Chi-square test of one acceptance: sum of (k - n a)^2 / (n a (1 - a)) with positions - 1 degrees of freedom."""
    if len(counts) < 2:
        return None
    total = sum(each.judged for each in counts)
    mean = sum(each.accepted for each in counts) / total
    if mean in {0.0, 1.0}:
        return 1.0
    statistic = sum(
        (each.accepted - each.judged * mean) ** 2 / (each.judged * mean * (1 - mean)) for each in counts
    )
    return float(chi2.sf(statistic, len(counts) - 1))
