"""Speculation: findings, counts by position, its FLOPs, its costs beside the law; and what cannot be known."""

import math
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.results.builders import change_steps, run_ids, write_results
from support.results.planted import NUM_SEQS, write_drafted
from support.steps import records_of, with_steps

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.flops import count_run_flops
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
from benchctl.analysis.metrics.run import Drafter, drafter_of
from benchctl.analysis.statistics.estimate import BlockDesign, side_ratio
from benchctl.costs.flops import observed_flops
from benchctl.costs.run_work import Lengths, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.engines.sim.options import SimOptions
from benchctl.engines.vllm_options import VllmOptions
from benchctl.errors import UsageError
from benchctl.profile.choices import ServerOptions
from benchctl.records.columns import columns_from
from benchctl.records.loaded import load_results
from benchctl.records.schema import StepRecord
from benchctl.steptime.speculation_law import Estimate, PositionCounts, law_at, of_counters

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


def test_drafts_that_were_declared_and_never_seen_measure_another_path(tmp_path):
    results, code = write_drafted(tmp_path / "r", ACCEPTED), "speculation-never-drafted"
    assert code not in findings_of(results)
    for run_id in run_ids(results):
        change_steps(results, run_id, **NO_DRAFTS)
    assert code not in findings_of(results), "by the server's counters"
    for run_id in run_ids(results):
        (results.run(run_id).path / "prometheus.jsonl").unlink()
    assert code not in findings_of(results), "each sequence gains several tokens"
    for run_id in run_ids(results):
        change_steps(results, run_id, output_tokens=8)
    finding = findings_of(results)[code]
    assert finding.numbers == {"num_steps": 21, "num_runs": 3}
    assert finding.sentence.startswith("guided top_k=5 never drafted a token in 21 steps of its 3 runs")


def test_acceptance_of_an_arm_is_that_of_all_its_runs_with_an_interval_over_them(tmp_path):
    plain, cell = analyze_directory(write_drafted(tmp_path / "r", ACCEPTED).path).cells
    drafts = cell.drafts()
    assert (plain.drafts(), drafts.counts.accepted_by_position) == (None, (8 * 15, 8 * 12, 8 * 9))
    assert [at.survival for at in drafts.positions] == pytest.approx([15 / 18, 12 / 18, 9 / 18])
    assert [at.conditional for at in drafts.positions] == pytest.approx([15 / 18, 12 / 15, 9 / 12])
    assert all(at.survival_interval == pytest.approx((at.survival,) * 2) for at in drafts.positions)
    length = drafts.counts.metrics["acceptance_length"]
    assert length == pytest.approx(cell.centre("tokens_per_step")) == 1 + 36 / 18


def test_flops_explain_a_slowdown_by_drafts_only_where_all_that_drafts_cost_is_charged(tmp_path):
    results = write_drafted(tmp_path / "r", ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0)), step_factor=9.0)
    assert "unexplained-by-flops" not in findings_of(results)
    results.write_profile(results.profile_yaml().replace("draft_cost: 0.05", "draft_model: llama-68m"))
    finding = findings_of(results)["unexplained-by-flops"]
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
    for counts, p_value in (
        ([positions((800, 1000), (640, 800))], 1),
        ([positions((800, 1000), (400, 800))], 0),
        ([positions((800, 1000))], None),
        ([positions((9, 9), (9, 9))], 1),
        # Requests that differ show in arms of different length: those that accept little take the more drafts.
        (counts_by_position([few, many]), 0),
        (counts_by_position([few, few]), 1),
        (counts_by_position([few, long]), 1),
        (counts_by_position([few]), None),
    ):
        assert same_acceptance_p(counts) == (None if p_value is None else pytest.approx(p_value, abs=1e-6)), counts
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
    for cost, truth in ((costs.draft, 0.06), (costs.backfill, 0.03), (costs.step(4, bonus=True), 1.27)):
        assert cost.low <= truth <= cost.high
    expected = costs.step(4, bonus=True)
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
    assert (sharp.draft.value, sharp.backfill, fit_costs(arms, {})) == (pytest.approx(0.05), None, None)


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
        change_steps(results, planned.run_id, **counts)
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
    assert (measured.baseline, arm.measured_tokens) == ("baseline", Estimate(1.0, 1.0, 1.0))
    assert (arm.expected_tokens.value, arm.tokens_agree) == (1, True)
    assert arm.measured_speed_up.value == pytest.approx(1 / arm.measured_step.value)


def codes(account):
    return [warning.code for warning in account.warnings]


BASE, DRAFT = shape_for("qwen2.5-7b"), shape_for("llama-68m")
COUNTS = (3, 1, 3, 0)
DRAFTED = (Lengths(20, 1 + sum(COUNTS) + len(COUNTS)),) * NUM_SEQS
PREFILLED = StepLogCounts(base_prefill_tokens=160)
VERIFIED = replace(PREFILLED, verification_tokens=len(COUNTS) * 4 * NUM_SEQS)
PASSES = replace(
    VERIFIED,
    draft_prefill_tokens=20 * NUM_SEQS,
    draft_tokens=len(COUNTS) * 3 * NUM_SEQS,
    backfill_tokens=2 * NUM_SEQS,
)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
    return load_results(write_drafted(tmp_path_factory.mktemp("drafts") / "r", [COUNTS]).path).runs[1]


def count(run, drafter):
    return count_run_flops(run, base=BASE, value_model=None, top_k=0, prepared=(), drafter=drafter)


def test_verification_and_the_passes_of_a_known_draft_model_are_charged(run):
    whole = count(run, Drafter(shape=DRAFT))
    assert (whole.observed, whole.warnings) == (observed_flops(DRAFTED, PASSES, base=BASE, draft_model=DRAFT), ())
    assert whole.published.total + sum(step.flops for step in whole.corrections) == whole.observed.total
    without_backfill = count(run, Drafter(shape=DRAFT, has_backfill=False)).observed
    passes = replace(PASSES, backfill_tokens=0)
    assert without_backfill == observed_flops(DRAFTED, passes, base=BASE, draft_model=DRAFT)
    # No draft reaches beyond the end of its output, so the server's counters say what its steps do.
    silent = with_steps(
        run, [msgspec.structs.replace(step, draft_tokens=None, drafts=None) for step in records_of(run)]
    )
    assert count(silent, Drafter(shape=DRAFT)).observed == whole.observed
    told = codes(count(replace(silent, prometheus=()), Drafter(shape=DRAFT)))
    assert (told, codes(count(replace(silent, prometheus=()), None))) == (["drafts-not-charged"], [])


@pytest.mark.parametrize(
    ("drafter", "code"),
    [
        (Drafter(), "drafts-without-model"),
        (Drafter(problem="unknown model 'nobody/knows'"), "drafts-not-charged"),
        (None, "drafts-not-charged"),
    ],
)
def test_verification_is_charged_without_a_known_model_and_the_result_says_what_drafted(run, drafter, code):
    charged = count(run, drafter)
    assert charged.observed == observed_flops(DRAFTED, VERIFIED, base=BASE)
    assert codes(charged) == [code]
    assert charged.charges_drafts == (code == "drafts-without-model")


def test_the_draft_model_of_a_profile_is_charged_in_its_results_and_a_draft_cost_names_none(tmp_path):
    results = write_drafted(tmp_path / "r", [COUNTS])
    experiment = load_experiment(results.path)
    plain, drafted = map(experiment.flops, experiment.results.runs)
    assert (codes(plain), codes(drafted)) == ([], ["drafts-not-charged"])
    assert "draft_cost states the time of its passes alone" in drafted.warnings[0].message
    model = "draft_model: llama-68m, backfill: prefill"
    results.write_profile(results.profile_yaml().replace("draft_cost: 0.05", model))
    experiment = load_experiment(results.path)
    plain, drafted = map(experiment.flops, experiment.results.runs)
    assert plain.observed == observed_flops(DRAFTED, PREFILLED, base=BASE)
    assert drafted.observed == observed_flops(DRAFTED, PASSES, base=BASE, draft_model=DRAFT)
    assert drafted.warnings == ()


SIM = {"num_speculative_tokens": 3, "acceptance": 0.8, "cost_model": "roofline", "draft_model": "llama-68m"}
ALONE = Drafter(shape=DRAFT, has_backfill=False)


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        (SimOptions(), None),
        (SimOptions(**SIM), ALONE),
        (SimOptions(**SIM, backfill="expansion"), Drafter(shape=DRAFT)),
        (SimOptions(**SIM, backfill="expansion", bonus_token=False), ALONE),
        (VllmOptions(), None),
        (VllmOptions(num_speculative_tokens=2, draft_model="JackFram/llama-68m"), Drafter(shape=DRAFT)),
        (VllmOptions(num_speculative_tokens=2, speculative_method="ngram"), Drafter()),
        (VllmOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), Drafter()),
        (
            VllmOptions(speculative_config={"method": "draft_model", "model": "llama-68m"}),
            Drafter(shape=DRAFT),
        ),
        (
            VllmOptions(num_speculative_tokens=2, speculative_method="eagle", draft_model="d"),
            Drafter(problem="eagle names no model of its own"),
        ),
        (ServerOptions(), Drafter(problem="the options do not say what drafts", is_in_use=False)),
    ],
)
def test_what_drafts_follows_from_the_options(options, drafter):
    assert drafter_of(options) == drafter


def test_a_model_of_the_hub_that_is_not_here_is_unknown_as_a_draft_model():
    unknown = drafter_of(VllmOptions(num_speculative_tokens=2, draft_model="nobody/knows"))
    assert (unknown.shape, "unknown model 'nobody/knows'" in unknown.problem) == (None, True)
