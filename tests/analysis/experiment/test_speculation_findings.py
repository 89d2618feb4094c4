"""Measured speculation: findings, counts by position, and its costs beside the law; and what cannot be known."""

import math
import random

import numpy as np
import pytest
from support.results.builders import change_steps, edit_steps, run_ids, write_results
from support.results.drafted import write_drafted

from benchctl.analysis.analyzed import analyze_directory
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
from benchctl.analysis.metrics.speculation import arm_drafts
from benchctl.analysis.statistics.estimate import BlockDesign, side_ratio
from benchctl.errors import UsageError
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.steptime.acceptance import Estimate, PositionCounts, of_counters
from benchctl.steptime.speculation_law import law_at

ACCEPTED = ((3, 2, 0, 3, 1, 3), (2, 3, 3, 0, 3, 1), (1, 3, 2, 3, 0, 3))
ONE_TOKEN = ((1, 0, 1, 1), (1, 1, 0, 1), (0, 1, 1, 1))
NO_DRAFTS = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "accepted_by_position"))


def findings_of(results):
    return {finding.code: finding for finding in analyze_directory(results.path).findings}


def test_one_draft_token_without_a_bonus_token_cannot_win(tmp_path):
    results = write_drafted(tmp_path / "r", ONE_TOKEN, num_draft_tokens=1, has_bonus=False, step_factor=1.05)
    findings = findings_of(results)
    finding = findings["speculation-cannot-win"]
    assert finding.numbers["tokens_per_step"] == 1
    assert "of one draft token and no bonus token one token comes" in finding.sentence
    assert "speculation-never-drafted" not in findings


def test_drafts_that_were_declared_and_never_seen_measure_another_path(tmp_path):
    results, code = write_drafted(tmp_path / "r", ACCEPTED), "speculation-never-drafted"
    assert code not in findings_of(results)
    for run_id in run_ids(results):
        change_steps(results, run_id, **NO_DRAFTS)
    assert code not in findings_of(results)  # by the server's counters
    for run in results.runs():
        (run.path / "prometheus.jsonl").unlink()
    assert code not in findings_of(results)  # each sequence gains several tokens
    for run_id in run_ids(results):
        change_steps(results, run_id, output_tokens=8)
    finding = findings_of(results)[code]
    assert finding.numbers == {"num_steps": 21, "num_runs": 3}
    assert finding.sentence.startswith("guided top_k=5 never drafted a token in 21 steps of its 3 runs")


def test_acceptance_of_an_arm_is_that_of_all_its_runs_with_an_interval_over_them(tmp_path):
    analysis = analyze_directory(write_drafted(tmp_path / "r", ACCEPTED).path)
    plain, cell = analysis.cells
    drafts = arm_drafts([run.run for run in cell.runs])
    assert drafts.counts.accepted_by_position == (8 * 15, 8 * 12, 8 * 9)
    assert [at.survival for at in drafts.positions] == pytest.approx([15 / 18, 12 / 18, 9 / 18])
    assert [at.conditional for at in drafts.positions] == pytest.approx([15 / 18, 12 / 15, 9 / 12])
    assert all(at.survival_interval == pytest.approx((at.survival,) * 2) for at in drafts.positions)
    assert (
        drafts.counts.metrics["acceptance_length"] == pytest.approx(cell.centre("tokens_per_step")) == 1 + 36 / 18
    )
    assert plain.drafts() is None


@pytest.mark.parametrize(("draft", "is_charged"), [("draft_model: llama-68m", True), ("draft_cost: 0.05", False)])
def test_flops_explain_a_slowdown_by_drafts_only_where_all_that_drafts_cost_is_charged(tmp_path, draft, is_charged):
    results = write_drafted(tmp_path / "r", ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0)), step_factor=9.0)
    results.write_profile(results.profile_yaml().replace("draft_cost: 0.05", draft))
    finding = findings_of(results).get("unexplained-by-flops")
    assert (finding is not None) == is_charged
    if finding is not None:
        # 20 prompt tokens beside 16 verified ones in place of 5 decoded ones; the draft adds about 1 %
        assert finding.numbers["flops_ratio_observed"] == pytest.approx(36 / 25, rel=0.05)


def step(number, **counts):
    return StepRecord(
        step=number, start_ns=10 * number, dur_ns=7, clock="virtual", phase="decode", num_seqs=4, **counts
    )


def tally(drafts, *accepted):
    return DraftTally(drafts=drafts, accepted=accepted, whole_frac=1.0)


def positions(*counts):
    return [PositionCounts(accepted=accepted, judged=judged) for accepted, judged in counts]


def ratio_of(*blocks):
    return side_ratio([1.0] * len(blocks), blocks, BlockDesign(tuple(range(len(blocks)))))


def test_steps_with_shorter_drafts_are_left_out_where_most_are_whole_and_changing_lengths_all_count():
    steps = [
        step(0, drafts=4, draft_tokens=8, accepted_tokens=5, accepted_by_position=(3, 2)),
        step(1, drafts=4, draft_tokens=8, accepted_tokens=4, accepted_by_position=(3, 1)),
        step(2, drafts=2, draft_tokens=3, accepted_tokens=3, accepted_by_position=(2, 1)),
        step(3),
    ]
    counts = count_drafts([columns_from(steps)])
    assert (counts, counts.is_exact) == (DraftTally(drafts=8, accepted=(6, 3), whole_frac=0.8), True)
    steps = [step(i, drafts=1, draft_tokens=i % 3 + 1, accepted_by_position=(1, 0, 0)) for i in range(9)]
    counts = count_drafts([columns_from(steps)])
    assert (counts.drafts, counts.is_exact) == (9, False)
    by_position = pooled(counts_by_position([tally(100, 80), tally(50, 40, 20, 0), tally(10, 0, 0, 0, 0)]))
    assert [(each.accepted, each.judged) for each in by_position] == [(120, 160), (20, 40), (0, 20)]


def test_one_acceptance_for_all_positions_and_arms_is_rejected_where_it_falls():
    few, many, long = tally(1000, 600), tally(1000, 450), tally(1000, 600, 360)
    assert same_acceptance_p([positions((800, 1000), (640, 800))]) == pytest.approx(1)
    assert same_acceptance_p([positions((800, 1000), (400, 800))]) < 1e-6
    assert same_acceptance_p([positions((800, 1000))]) is None
    assert same_acceptance_p([positions((9, 9), (9, 9))]) == 1
    # Requests that differ show in arms of different length: those that accept little take the more drafts.
    assert same_acceptance_p(counts_by_position([few, many])) < 1e-6
    assert same_acceptance_p(counts_by_position([few, few])) == pytest.approx(1)
    assert same_acceptance_p(counts_by_position([few, long])) == pytest.approx(1)
    assert same_acceptance_p(counts_by_position([few])) is None
    stream = np.random.default_rng(5)
    drawn = (positions(*((int(k), 200) for k in stream.binomial(200, 0.7, size=4))) for _ in range(400))
    assert 8 <= sum(same_acceptance_p([counts]) < 0.05 for counts in drawn) <= 34, "one in twenty by chance"


def test_costs_are_measured_again_and_hold_in_every_block():
    noise = random.Random(1)
    arms = {f"{num} {bonus}": (num, bonus) for num in (1, 2, 4, 8) for bonus in (True, False)}
    ratios = {
        label: ratio_of(*(1 + 0.06 * num + 0.03 * bonus + noise.gauss(0, 0.002) for _ in range(8)))
        for label, (num, bonus) in arms.items()
    }
    costs = fit_costs(arms, ratios)
    assert costs.draft.low <= 0.06 <= costs.draft.high
    assert costs.backfill.low <= 0.03 <= costs.backfill.high
    expected = costs.step(4, bonus=True)
    assert expected.value == pytest.approx(1.27, abs=0.005)
    assert expected.low < expected.value < expected.high
    quantiles = np.quantile(costs.samples().step(4, bonus=True), [0.025, 0.975])
    assert quantiles == pytest.approx([expected.low, expected.high], abs=3e-4)


def test_costs_that_scatter_leave_the_best_length_open_and_one_kind_of_server_the_backfill():
    arms, acceptance = {"a": (2, True)}, of_counters(100_000, [80_000, 64_000, 51_200])
    sharp, wide = (
        fit_costs(arms, {"a": ratio_of(*blocks)}) for blocks in ((1.1, 1.1001, 1.0999), (1.1, 1.2, 1.02))
    )
    best = [law_at(acceptance, each.cost, [1], cost_samples=each.samples()).best for each in (sharp, wide)]
    assert best[0].high - best[0].low <= 1
    assert best[1].high - best[1].low > 3
    assert (sharp.draft.value, sharp.backfill) == (pytest.approx(0.05), None)
    assert fit_costs(arms, {}) is None


def test_agreement_needs_both_intervals_and_widens_with_the_number_of_comparisons():
    low, high = Estimate(2.0, 1.98, 2.02), Estimate(2.035, 2.015, 2.055)
    assert agrees(low, high) is False
    assert agrees(low, high, comparisons=10) is agrees(low, Estimate(2.02, 2.0, 2.04)) is True
    assert agrees(low, Estimate(2.0)) is agrees(None, low) is None
    assert agrees(Estimate(1.0, 1.0, 1.0), Estimate(math.nextafter(1, 2), 1.0, 1.0)) is True


def test_drafts_of_every_arm_leave_times_without_a_baseline_and_of_none_are_refused_with_a_remedy(tmp_path):
    results = write_results(tmp_path / "r")
    remedy = "no usable run counts accepted drafts by position; measure with speculation"
    with pytest.raises(UsageError, match=remedy):
        measured_speculation(load_experiment(results.path))
    counts = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 5, "accepted_by_position": (3, 2)}
    for planned in results.plan().runs:
        edit_steps(results, planned.run_id, lambda record: step(record.step, **counts))
    measured = measured_speculation(load_experiment(results.path))
    assert (len(measured.arms), measured.baseline, measured.costs) == (2, None, None)
    assert {(arm.num_draft_tokens, arm.bonus, arm.expected_step) for arm in measured.arms} == {(2, True, None)}
    assert measured.acceptance.values == (0.75, pytest.approx(2 / 3))


def test_rejected_drafts_yield_one_token_though_steps_with_prompts_count_none(tmp_path):
    results = write_results(tmp_path / "r")
    counts = {"drafts": 8, "draft_tokens": 16, "accepted_tokens": 0, "accepted_by_position": (0, 0)}
    for run_id in run_ids(results):
        change_steps(results, run_id, *range(2, 9), num_decode_tokens=24, **counts)
    measured = measured_speculation(load_experiment(results.path))
    (arm,) = measured.arms
    assert measured.baseline == "baseline"
    assert (arm.measured_tokens, arm.expected_tokens.value) == (Estimate(1.0, 1.0, 1.0), 1)
    assert arm.tokens_agree
    assert arm.measured_speed_up.value == pytest.approx(1 / arm.measured_step.value)
