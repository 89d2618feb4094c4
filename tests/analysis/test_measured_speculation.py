"""Measured speculation beside the law: counts by position, fitted costs, agreement, and what cannot be known."""

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.results.builders import edit_steps, write_results

from benchctl.analysis.experiment.drafts import (
    DraftTally,
    agrees,
    count_drafts,
    counts_by_position,
    fit_costs,
    measured_speculation,
    pooled,
    same_acceptance_p,
)
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.statistics.estimate import BlockDesign, SideRatio, side_ratio
from benchctl.errors import UsageError
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.steptime.acceptance import Estimate, PositionCounts, of_counters
from benchctl.steptime.speculation_law import law_at


def step(number: int, **counts: object) -> StepRecord:
    return StepRecord(
        step=number, start_ns=10 * number, dur_ns=7, clock="virtual", phase="decode", num_seqs=4, **counts
    )


def ratio_of(blocks: list[float]) -> SideRatio:
    ratio = side_ratio([1.0] * len(blocks), blocks, BlockDesign(tuple(range(len(blocks)))))
    assert ratio is not None
    return ratio


def test_steps_with_shorter_drafts_are_left_out_where_most_are_whole() -> None:
    steps = [
        step(0, drafts=4, draft_tokens=8, accepted_tokens=5, accepted_by_position=(3, 2)),
        step(1, drafts=4, draft_tokens=8, accepted_tokens=4, accepted_by_position=(3, 1)),
        step(2, drafts=2, draft_tokens=3, accepted_tokens=3, accepted_by_position=(2, 1)),
        step(3),
    ]
    counts = count_drafts([columns_from(steps)])
    assert counts == DraftTally(drafts=8, accepted=(6, 3), whole_frac=0.8)
    assert counts.is_exact


def test_drafts_of_changing_length_all_count_and_say_so() -> None:
    steps = [step(i, drafts=1, draft_tokens=i % 3 + 1, accepted_by_position=(1, 0, 0)) for i in range(9)]
    counts = count_drafts([columns_from(steps)])
    assert counts.drafts == 9
    assert not counts.is_exact


def test_counts_of_arms_are_pooled_by_position() -> None:
    arms = [
        DraftTally(drafts=100, accepted=(80,), whole_frac=1.0),
        DraftTally(drafts=50, accepted=(40, 20, 0), whole_frac=1.0),
        DraftTally(drafts=10, accepted=(0, 0, 0, 0), whole_frac=1.0),
    ]
    counts = [(each.accepted, each.judged) for each in pooled(counts_by_position(arms))]
    assert counts == [(120, 160), (20, 40), (0, 20)]


def test_one_acceptance_for_all_positions_is_rejected_where_it_falls() -> None:
    same = [PositionCounts(accepted=800, judged=1000), PositionCounts(accepted=640, judged=800)]
    falling = [PositionCounts(accepted=800, judged=1000), PositionCounts(accepted=400, judged=800)]
    assert same_acceptance_p([same]) == pytest.approx(1)
    assert (same_acceptance_p([falling]) or 0) < 1e-6
    assert same_acceptance_p([same[:1]]) is None
    assert same_acceptance_p([[PositionCounts(accepted=9, judged=9)] * 2]) == 1


def test_requests_that_differ_show_in_arms_of_different_length() -> None:
    """Half of the requests accept nearly all, half nearly none; those take the more drafts the longer these are."""
    few, many = [DraftTally(drafts=n, accepted=(k,), whole_frac=1.0) for n, k in ((1000, 600), (1000, 450))]
    assert (same_acceptance_p(counts_by_position([few, many])) or 0) < 1e-6
    assert same_acceptance_p(counts_by_position([few, few])) == pytest.approx(1)
    assert same_acceptance_p(counts_by_position([few])) is None
    long = DraftTally(drafts=1000, accepted=(600, 360), whole_frac=1.0)
    assert same_acceptance_p(counts_by_position([few, long])) == pytest.approx(1)


def test_one_test_in_twenty_of_equal_positions_is_below_5_percent() -> None:
    stream = np.random.default_rng(5)
    below = 0
    for _ in range(400):
        counts = [PositionCounts(accepted=int(stream.binomial(200, 0.7)), judged=200) for _ in range(4)]
        below += (same_acceptance_p([counts]) or 0) < 0.05
    assert 8 <= below <= 34


def test_costs_are_found_again_and_hold_in_every_block() -> None:
    noise = random.Random(1)
    arms = {f"{num} {bonus}": (num, bonus) for num in (1, 2, 4, 8) for bonus in (True, False)}
    ratios = {
        label: ratio_of([1 + 0.06 * num + 0.03 * bonus + noise.gauss(0, 0.002) for _ in range(8)])
        for label, (num, bonus) in arms.items()
    }
    costs = fit_costs(arms, ratios)
    assert costs is not None
    draft, backfill = costs.draft, costs.backfill
    assert backfill is not None
    assert draft.low <= 0.06 <= draft.high
    assert backfill.low <= 0.03 <= backfill.high
    expected = costs.step(4, bonus=True)
    assert expected.value == pytest.approx(1.27, abs=0.005)
    assert expected.low < expected.value < expected.high
    drawn = costs.samples()
    assert drawn is not None
    low, high = np.quantile(drawn.step(4, bonus=True), [0.025, 0.975])
    assert low == pytest.approx(expected.low, abs=3e-4)
    assert high == pytest.approx(expected.high, abs=3e-4)


def test_costs_that_scatter_leave_the_best_length_open() -> None:
    acceptance = of_counters(100_000, [80_000, 64_000, 51_200])
    sharp = fit_costs({"a": (2, True)}, {"a": ratio_of([1.1, 1.1001, 1.0999])})
    wide = fit_costs({"a": (2, True)}, {"a": ratio_of([1.1, 1.2, 1.02])})
    assert sharp is not None
    assert wide is not None
    best = [law_at(acceptance, each.cost, [1], cost_samples=each.samples()).best for each in (sharp, wide)]
    assert best[0].high - best[0].low <= 1
    assert best[1].high - best[1].low > 3


def test_without_both_kinds_of_server_the_backfill_is_unknown() -> None:
    costs = fit_costs({"a": (2, True)}, {"a": ratio_of([1.1, 1.1, 1.1])})
    assert costs is not None
    assert costs.draft.value == pytest.approx(0.05)
    assert costs.backfill is None
    assert fit_costs({"a": (2, True)}, {}) is None


def test_agreement_needs_both_intervals_and_widens_with_the_number_of_comparisons() -> None:
    low, high = Estimate(2.0, 1.98, 2.02), Estimate(2.035, 2.015, 2.055)
    assert agrees(low, high) is False
    assert agrees(low, high, comparisons=10) is True
    assert agrees(low, Estimate(2.02, 2.0, 2.04)) is True
    assert agrees(low, Estimate(2.0)) is None
    assert agrees(None, low) is None
    assert agrees(Estimate(1.0, 1.0, 1.0), Estimate(math.nextafter(1, 2), 1.0, 1.0)) is True


def test_a_directory_without_drafts_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_results(tmp_path / "r")
    with pytest.raises(
        UsageError, match="no usable run counts accepted drafts by position; measure with speculation"
    ):
        measured_speculation(load_experiment(tmp_path / "r"))


def test_drafts_of_every_arm_leave_times_without_a_baseline(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")

    def drafting(record: StepRecord) -> StepRecord:
        return step(record.step, drafts=4, draft_tokens=8, accepted_tokens=5, accepted_by_position=(3, 2))

    for planned in results.plan().runs:
        edit_steps(results, planned.run_id, drafting)
    measured = measured_speculation(load_experiment(tmp_path / "r"))
    assert len(measured.arms) == 2
    assert measured.baseline is None
    assert measured.costs is None
    assert {(arm.num_draft_tokens, arm.bonus, arm.expected_step) for arm in measured.arms} == {(2, True, None)}
    assert measured.acceptance.values == (0.75, pytest.approx(2 / 3))


def test_rejected_drafts_yield_one_token_though_steps_with_prompts_count_none(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")

    def drafting(record: StepRecord) -> StepRecord:
        if record.phase == "prefill":
            return record
        counts = {"drafts": 8, "draft_tokens": 16, "accepted_tokens": 0, "accepted_by_position": (0, 0)}
        return msgspec.structs.replace(record, num_decode_tokens=24, **counts)

    for planned in results.plan().runs:
        if planned.variant == "guided":
            edit_steps(results, planned.run_id, drafting)
    measured = measured_speculation(load_experiment(tmp_path / "r"))
    (arm,) = measured.arms
    assert measured.baseline == "baseline"
    assert arm.measured_tokens == Estimate(1.0, 1.0, 1.0)
    assert arm.expected_tokens.value == 1
    assert arm.tokens_agree
    assert arm.measured_speed_up.value == pytest.approx(1 / arm.measured_step.value)
