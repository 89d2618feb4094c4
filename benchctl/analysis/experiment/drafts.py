"""Measured speculation beside the law: acceptance by position, the costs of drafts, and the speed-up of every arm.

Acceptance is counted in each arm, pooled over arms, and tested for being one number; the costs are the time that a
draft token and bonus tokens add to a step.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Final

import numpy as np
import scipy  # loads scipy.special when it is called for the first time: 0.1 s

from benchctl.analysis.experiment.experiment import Arm, Experiment
from benchctl.analysis.experiment.pairing import ArmPair, baseline_pairs
from benchctl.analysis.metrics.latency import measured
from benchctl.analysis.statistics.estimate import SideRatio
from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.errors import UsageError
from benchctl.records.columns import Floats, StepColumns
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.speculation_law import (
    LEVEL,
    NUM_DRAWS,
    Acceptance,
    DraftCost,
    Estimate,
    PositionCounts,
    counted,
    estimate,
    quotient,
    steps_by_length,
    tokens_by_drafts,
    tokens_per_step,
)

_ENOUGH_FRAC: Final = 0.5
NEGLIGIBLE_FRAC: Final = 0.005
"""A relative difference that counts as agreement however narrow the intervals: virtual times hardly scatter, and
step times are not exactly a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTally:
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


def count_drafts(runs: Sequence[StepColumns]) -> DraftTally:
    """Drafts of the runs of one arm, without the warm-up, in the steps that count them by position."""
    tables = []
    for run in runs:
        accepted, drafts, tokens = run.accepted_by_position, run.optional("drafts"), run.optional("draft_tokens")
        if accepted is not None and drafts is not None:
            drafts = np.nan_to_num(drafts)
            tokens = drafts * accepted.shape[1] if tokens is None else np.nan_to_num(tokens)
            table = np.column_stack([tokens, drafts, accepted])
            tables.append(table[~np.isnan(accepted).any(axis=1)])
    width = max((table.shape[1] for table in tables), default=2)
    steps = np.vstack([np.zeros((0, width)), *(np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables)])
    is_whole = steps[:, 0] == steps[:, 1] * (width - 2)
    all_steps, whole_steps = steps[:, 1:].sum(axis=0), steps[is_whole, 1:].sum(axis=0)
    if not all_steps[0]:
        return DraftTally(drafts=0, accepted=(), whole_frac=0.0)
    whole_frac = float(whole_steps[0] / all_steps[0])
    drafts_of, *accepted_of = map(int, whole_steps if whole_frac >= _ENOUGH_FRAC else all_steps)
    return DraftTally(drafts=drafts_of, accepted=tuple(accepted_of), whole_frac=whole_frac)


def counts_by_position(arms: Sequence[DraftTally]) -> list[list[PositionCounts]]:
    """Accepted of judged in each arm that drafted at a position; a position that no draft reached ends the list."""
    groups = []
    for position in range(max((arm.num_draft_tokens for arm in arms), default=0)):
        reached = [(arm.drafts, *arm.accepted)[position : position + 2] for arm in arms]
        group = [PositionCounts(accepted=n[1], judged=n[0]) for n in reached if len(n) > 1 and n[0]]
        if not group:
            break
        groups.append(group)
    return groups


def pooled(groups: Sequence[Sequence[PositionCounts]]) -> list[PositionCounts]:
    """Accepted of judged in each group."""
    return [
        PositionCounts(accepted=sum(each.accepted for each in group), judged=sum(each.judged for each in group))
        for group in groups
    ]


def same_acceptance_p(groups: Sequence[Sequence[PositionCounts]]) -> float | None:
    """Chi-square test that each group has one acceptance a: sum of (k - n a)^2 / (n a (1 - a)).

    Its degrees of freedom are counts minus groups; None for 0. A group whose drafts were all accepted, or none,
    cannot contradict.
    """
    statistic = 0.0
    for counts, whole in zip(groups, pooled(groups), strict=True):
        mean = whole.acceptance
        if 0 < mean < 1:
            statistic += sum(
                (each.accepted - each.judged * mean) ** 2 / (each.judged * mean * (1 - mean)) for each in counts
            )
    degrees = sum(len(counts) - 1 for counts in groups)
    return float(scipy.special.chdtrc(degrees, statistic)) if degrees else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCosts:
    """c and, where arms differ in bonus tokens, d of step ratio = 1 + K c + d, fitted in each block."""

    by_block: Floats
    """A row for each block, a column for each cost."""

    @property
    def draft(self) -> Estimate:
        """Time that one more draft token adds to a step, as a share of the baseline's."""
        return self._along(1, bonus=False)

    @property
    def backfill(self) -> Estimate | None:
        """Time that bonus tokens add; None unless arms with and without them were measured."""
        return self._along(0, bonus=True) if self.by_block.shape[1] > 1 else None

    @property
    def cost(self) -> DraftCost:
        """The means over blocks. A negative one, which noise can give, counts as 0."""
        backfill = self.backfill
        return DraftCost(
            draft=max(0.0, self.draft.value), backfill=0.0 if backfill is None else max(0.0, backfill.value)
        )

    def step(self, num_draft_tokens: int, *, bonus: bool) -> Estimate:
        """1 + K c + d, without d for a server without bonus tokens or where it is unknown."""
        added = self._along(num_draft_tokens, bonus=bonus)
        bounds = (None if bound is None else max(0.0, 1 + bound) for bound in (added.low, added.high))
        return Estimate(1 + added.value, *bounds)

    def samples(self, seed: int = 0) -> DraftCost | None:
        """The means and draws of them: multivariate t with the covariance of the blocks. None for one block."""
        num_blocks, num_costs = self.by_block.shape
        if num_blocks < 2:
            return None
        stream = np.random.default_rng([seed, num_blocks])
        covariance = np.atleast_2d(np.cov(self.by_block, rowvar=False)) / num_blocks
        scale = np.sqrt((num_blocks - 1) / stream.chisquare(num_blocks - 1, NUM_DRAWS))
        normal = stream.multivariate_normal(np.zeros(num_costs), covariance, NUM_DRAWS)
        means = self.by_block.mean(axis=0)
        samples = np.maximum(np.vstack([means, means + normal * scale[:, None]]), 0.0)
        return DraftCost(draft=samples[:, 0], backfill=samples[:, 1] if num_costs > 1 else 0.0)

    def _along(self, num_draft_tokens: int, *, bonus: bool) -> Estimate:
        """K c + d with the interval over blocks."""
        weights = np.array([num_draft_tokens, bonus], dtype=float)[: self.by_block.shape[1]]
        return mean_over_blocks((self.by_block * weights).sum(axis=1).tolist())


def fit_costs(drafts: Mapping[str, tuple[int, bool]], ratios: Mapping[str, SideRatio]) -> FittedCosts | None:
    """The costs by least squares in each block that all arms share; None without one.

    ``drafts`` has the draft tokens of each arm and whether it has bonus tokens, ``ratios`` its step time over that
    of the baseline.
    """
    labels = [label for label in drafts if label in ratios]
    if not labels:
        return None
    has_both = all(len(set(values)) > 1 for values in zip(*(drafts[label] for label in labels), strict=True))
    design = np.array([drafts[label][: 2 if has_both else 1] for label in labels], dtype=float)
    of_blocks = [ratios[label].block_ratios for label in labels]
    shared = sorted(set.intersection(*(set(each) for each in of_blocks)))
    added = [np.array([each[block] - 1 for each in of_blocks], dtype=float) for block in shared]
    costs = [np.linalg.lstsq(design, each)[0] for each in added]
    return FittedCosts(by_block=np.array(costs)) if costs else None


def mean_over_blocks(values: Sequence[float]) -> Estimate:
    """Mean over blocks, of which there is at least one, with the interval of Student's t."""
    mean, num = fmean(values), len(values)
    if num < 2:
        return Estimate(mean)
    half = t_quantile((1 + LEVEL) / 2, num - 1) * float(np.std(values, ddof=1)) / num**0.5
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeArm:
    """One arm that drafts; what refers to the baseline is None where it has none without drafts."""

    label: str
    bonus: bool
    num_blocks: int
    counts: DraftTally
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
    tokens_agree: bool | None
    """Law and measurement of the tokens per step agree, in all arms at once with 95 %; None where it is unknown."""
    speed_up_agrees: bool | None
    """The same of the speed-up of decoding."""

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
    """p of the hypothesis that a position has one acceptance in all arms, which pooling takes for granted.

    It fails where requests differ in acceptance: those that accept little take more steps and more of the drafts,
    the more so the longer the drafts are.
    """
    costs: FittedCosts | None
    """None without a baseline."""


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
    quantile = NormalDist().inv_cdf
    wider = quantile(1 - (1 - LEVEL) / comparisons / 2) / quantile((1 + LEVEL) / 2)
    allowed = max(NEGLIGIBLE_FRAC, wider * math.hypot(widths[0], widths[1]))
    return abs(math.log(measured.value / expected.value)) <= allowed


def measured_speculation(experiment: Experiment) -> MeasuredSpeculation:
    """Speculation of an experiment beside the law. Raises UsageError where no run counted drafts by position."""
    tallies = {arm.label: count_drafts([run.columns for run in arm.runs.values()]) for arm in experiment.arms}
    drafting = [arm for arm in experiment.arms if tallies[arm.label].num_draft_tokens]
    if not drafting:
        raise UsageError(
            f"{experiment.path}: no usable run counts accepted drafts by position; measure with speculation and "
            "a step log, or state counts with --drafts and --accepted"
        )
    by_position = counts_by_position([tallies[arm.label] for arm in drafting])
    acceptance = counted(pooled(by_position))
    pairs = {  # arms that draft with the baseline that does not
        pair.b.label: pair
        for pair in baseline_pairs(experiment)
        if tallies[pair.b.label].num_draft_tokens and not tallies[pair.a.label].num_draft_tokens
    }
    ratios = {label: ratio for label, pair in pairs.items() if (ratio := pair.ratio("decode_step_ms")) is not None}
    kinds = {arm.label: (tallies[arm.label].num_draft_tokens, _has_bonus(experiment, arm)) for arm in drafting}
    costs = fit_costs(kinds, ratios)
    return MeasuredSpeculation(
        baseline=next((pair.a.label for pair in pairs.values()), None),
        arms=tuple(
            _speculative_arm(
                arm,
                tallies[arm.label],
                acceptance,
                costs,
                pairs.get(arm.label),
                bonus=kinds[arm.label][1],
                comparisons=len(drafting),
            )
            for arm in drafting
        ),
        acceptance=acceptance,
        same_everywhere_p=same_acceptance_p([acceptance.counts]),
        same_in_arms_p=same_acceptance_p(by_position),
        costs=costs,
    )


def _has_bonus(experiment: Experiment, arm: Arm) -> bool:
    """False where the engine's setting ``bonus_token`` says so; engines without that setting have bonus tokens."""
    settings = experiment.settings(arm)
    return settings is None or bool(getattr(settings.server, "bonus_token", True))


def _speculative_arm(
    arm: Arm,
    counts: DraftTally,
    acceptance: Acceptance,
    costs: FittedCosts | None,
    pair: ArmPair | None,
    *,
    bonus: bool,
    comparisons: int,
) -> SpeculativeArm:
    num = counts.num_draft_tokens
    endless = estimate(tokens_by_drafts(tuple(acceptance.survival(num)), bonus=bonus)[-1])
    expected = endless.times(_cut_share(arm, acceptance.of(num), bonus=bonus))
    of_blocks = [each for run in arm.runs.values() if (each := _tokens_per_row(run)) is not None]
    tokens = mean_over_blocks(of_blocks) if of_blocks else None
    expected_step = None if costs is None else costs.step(num, bonus=bonus)
    step, tpot = (
        None if pair is None else _estimate_of(pair.ratio(name)) for name in ("decode_step_ms", "tpot_ms")
    )
    expected_speed_up = None if expected_step is None else quotient(expected, expected_step)
    measured_speed_up = None if tokens is None or step is None else quotient(tokens, step)
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
        expected_speed_up=expected_speed_up,
        measured_speed_up=measured_speed_up,
        tpot_speed_up=None if tpot is None else quotient(Estimate(1.0, 1.0, 1.0), tpot),
        tokens_agree=agrees(expected, tokens, comparisons=comparisons),
        speed_up_agrees=agrees(expected_speed_up, measured_speed_up, comparisons=comparisons),
    )


def _estimate_of(ratio: SideRatio | None) -> Estimate | None:
    return None if ratio is None else Estimate(ratio.estimate.ratio, ratio.estimate.ci_low, ratio.estimate.ci_high)


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
    for request in (each for run in arm.runs.values() for each in measured(run.requests)):
        if request.completion_tokens and request.choices:
            lengths[round(request.completion_tokens / len(request.choices)) - 1] += len(request.choices)
    # Longer outputs are taken as endless: their last step hardly counts
    decoded = {tokens: number for tokens, number in lengths.items() if 0 < tokens <= 4096}
    if not decoded:
        return 1.0
    by_length = steps_by_length(max(decoded), acceptance, bonus=bonus)
    tokens = sum(tokens * number for tokens, number in decoded.items())
    steps = sum(by_length[tokens] * number for tokens, number in decoded.items())
    return tokens / steps / tokens_per_step(acceptance, bonus=bonus)
