"""Measured speculation beside the law: tokens per step, time per step and speed-up of every arm that drafts.

The acceptance of a position is pooled over all arms and blocks: given that all tokens before were accepted, it does
not depend on how many follow. From it the law expects the tokens per step of each arm, with the last step of each
request cut at the length that was measured. Its costs are fitted to decoding steps, ratio to the baseline = 1 + K c
+ d over all arms, so that a line that step times do not follow is visible in each of them. The speed-up of decoding
is tokens over time; that of the time per output token (TPOT) has the steps with prompts of other requests in it.

Intervals of measured values are over blocks, those of the acceptance over drafts taken as independent.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from benchctl.analysis.experiment.arms import Arm
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.analysis.metrics.request_timing import measured
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.analysis.summary.draft_acceptance import (
    ArmDrafts,
    count_drafts,
    pooled,
    same_everywhere_p,
    same_in_arms_p,
)
from benchctl.analysis.summary.draft_costs import FittedCosts, fit_costs, mean_over_blocks
from benchctl.errors import UsageError
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.speculation.acceptance import LEVEL, Acceptance, counted
from benchctl.steptime.speculation.estimate import Estimate, estimate, quotient
from benchctl.steptime.speculation.law import steps_by_length, tokens_by_drafts, tokens_per_step

NEGLIGIBLE_FRAC: Final = 0.005
"""A relative difference that counts as agreement however narrow the intervals: virtual times hardly scatter, and
step times are not exactly a line."""
_LONGEST_OUTPUT: Final = 4096
"""Longer outputs are taken as endless: their last step hardly counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArm:
    """One arm that drafts; what refers to the baseline is None where it has none without drafts."""

    label: str
    bonus: bool
    num_blocks: int
    counts: ArmDrafts
    endless_tokens: Estimate
    """Tokens per step that the law expects of an endless request."""
    expected_tokens: Estimate
    """The same with the last step of each request cut at its length."""
    measured_tokens: Estimate | None
    expected_step: Estimate | None
    """1 + K c + d with the fitted costs: the time of a decoding step over the baseline's."""
    measured_step: Estimate | None
    expected_speed_up: Estimate | None
    """``expected_tokens / expected_step``."""
    measured_speed_up: Estimate | None
    """``measured_tokens / measured_step``."""
    tpot_speed_up: Estimate | None
    """The baseline's time per output token over this arm's, steps with prompts included."""

    @property
    def num_draft_tokens(self) -> int:
        return self.counts.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeculation:
    """All arms of a result directory that draft."""

    baseline: str | None
    """Label of the arm that ratios refer to; None without one that does not draft."""
    arms: tuple[SpeculativeArm, ...]
    acceptance: Acceptance
    """Pooled over the arms."""
    same_everywhere_p: float | None
    """p of the hypothesis that all positions have one acceptance; None for a single position."""
    same_in_arms_p: float | None
    """p of the hypothesis that a position has one acceptance in all arms, which pooling takes for granted."""
    costs: FittedCosts | None
    """None without a baseline."""

    def tokens_agree(self, arm: SpeculativeArm) -> bool | None:
        """True if law and measurement of the tokens per step of an arm agree, in all arms at once with 95 %."""
        return agrees(arm.expected_tokens, arm.measured_tokens, comparisons=len(self.arms))

    def speed_up_agrees(self, arm: SpeculativeArm) -> bool | None:
        """The same of the speed-up of decoding."""
        return agrees(arm.expected_speed_up, arm.measured_speed_up, comparisons=len(self.arms))


def agrees(expected: Estimate | None, measured: Estimate | None, *, comparisons: int = 1) -> bool | None:
    """True if the two differ by no more than their half-widths add up to in squares, or negligibly.

    Of so many ``comparisons`` all hold with the confidence of one: half-widths grow by the quotient of the normal
    quantiles (Bonferroni). None where an interval is unknown.
    """
    if expected is None or measured is None:
        return None
    widths = expected.log_half_width, measured.log_half_width
    if widths[0] is None or widths[1] is None:
        return None
    wider = _quantile((1 - LEVEL) / comparisons) / _quantile(1 - LEVEL)
    allowed = max(NEGLIGIBLE_FRAC, wider * math.hypot(widths[0], widths[1]))
    return abs(math.log(measured.value / expected.value)) <= allowed


def _quantile(alpha: float) -> float:
    """Normal quantile of a two-sided interval."""
    return NormalDist().inv_cdf(1 - alpha / 2)


def measured_speculation(experiment: Experiment) -> MeasuredSpeculation:
    """Speculation of an experiment beside the law. Raises UsageError where no run counted drafts by position."""
    drafts = {arm.label: count_drafts([run.columns for run in arm.runs.values()]) for arm in experiment.arms}
    drafting = [arm for arm in experiment.arms if drafts[arm.label].num_draft_tokens]
    if not drafting:
        raise UsageError(
            f"{experiment.source}: no usable run counts accepted drafts by position; measure with speculation and "
            "a step log, or state counts with --drafts and --accepted"
        )
    acceptance = counted(pooled([drafts[arm.label] for arm in drafting]))
    pairs = _plain_pairs(experiment, drafts)
    kinds = {arm.label: (drafts[arm.label].num_draft_tokens, _has_bonus(experiment, arm)) for arm in drafting}
    costs = fit_costs(kinds, _step_ratios(pairs))
    arms = []
    for arm in drafting:
        num, bonus = kinds[arm.label]
        expected_step = None if costs is None else costs.step(num, bonus=bonus)
        arms.append(
            _speculative_arm(arm, drafts[arm.label], acceptance, expected_step, pairs.get(arm.label), bonus=bonus)
        )
    return MeasuredSpeculation(
        baseline=next((pair.pair.a.label for pair in pairs.values()), None),
        arms=tuple(arms),
        acceptance=acceptance,
        same_everywhere_p=same_everywhere_p(acceptance.counts),
        same_in_arms_p=same_in_arms_p([drafts[arm.label] for arm in drafting]),
        costs=costs,
    )


def _plain_pairs(experiment: Experiment, drafts: Mapping[str, ArmDrafts]) -> dict[str, PairedRuns]:
    """Arms that draft with the baseline that does not, by label."""
    return {
        pair.b.label: PairedRuns.of(pair, (experiment, experiment))
        for pair in baseline_pairs(experiment)
        if drafts[pair.b.label].num_draft_tokens and not drafts[pair.a.label].num_draft_tokens
    }


def _step_ratios(pairs: Mapping[str, PairedRuns]) -> dict[str, SideRatio]:
    ratios = {label: pair.ratio("decode_step_ms") for label, pair in pairs.items()}
    return {label: ratio for label, ratio in ratios.items() if ratio is not None}


def _speculative_arm(
    arm: Arm,
    counts: ArmDrafts,
    acceptance: Acceptance,
    expected_step: Estimate | None,
    pair: PairedRuns | None,
    *,
    bonus: bool,
) -> SpeculativeArm:
    num = counts.num_draft_tokens
    endless = _endless_tokens(acceptance, num, bonus=bonus)
    expected = endless.times(_cut_share(arm, acceptance.of(num), bonus=bonus))
    tokens = mean_over_blocks([_tokens_per_row(run) for run in arm.runs.values()])
    step = None if pair is None else _ratio_estimate(pair.ratio("decode_step_ms"))
    tpot = None if pair is None else _ratio_estimate(pair.ratio("tpot_ms"))
    return SpeculativeArm(
        label=arm.label,
        bonus=bonus,
        num_blocks=len(arm.runs),
        counts=counts,
        endless_tokens=endless,
        expected_tokens=expected,
        measured_tokens=tokens,
        expected_step=expected_step,
        measured_step=step,
        expected_speed_up=None if expected_step is None else quotient(expected, expected_step),
        measured_speed_up=None if tokens is None or step is None else quotient(tokens, step),
        tpot_speed_up=None if tpot is None else quotient(Estimate(1.0, 1.0, 1.0), tpot),
    )


def _has_bonus(experiment: Experiment, arm: Arm) -> bool:
    """False where the engine's setting ``bonus_token`` says so; engines without that setting have bonus tokens."""
    run = next(iter(arm.runs.values()))
    settings = experiment.settings(run.record)
    return settings is None or bool(getattr(settings.server, "bonus_token", True))


def _endless_tokens(acceptance: Acceptance, num: int, *, bonus: bool) -> Estimate:
    draws = tokens_by_drafts(acceptance.survival_draws(num), bonus=bonus)[-1]
    return estimate(tokens_per_step(acceptance.of(num), bonus=bonus), draws)


def _tokens_per_row(run: LoadedRun) -> float | None:
    """Tokens of decoding rows over these rows, in all steps: those with prompts have the ends of many requests.

    The first token of each request comes from its prompt. Steps that count no draft tokens have none.
    """
    steps = run.columns
    output, computed = steps.total("output_tokens"), steps.total("num_decode_tokens")
    if output is None or computed is None:
        return None
    drafted = float(steps.known_values("draft_tokens").sum())
    firsts = sum(len(request.choices) for request in measured(run.requests) if request.completion_tokens)
    return (output - firsts) / (computed - drafted) if computed > drafted else None


def _cut_share(arm: Arm, acceptance: Sequence[float], *, bonus: bool) -> float:
    """Tokens per step of requests as long as those measured over those of endless ones."""
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


def _ratio_estimate(ratio: SideRatio | None) -> Estimate | None:
    return None if ratio is None else Estimate(ratio.estimate.ratio, ratio.estimate.ci_low, ratio.estimate.ci_high)
