"""FLOPs: the published numbers and hand-computed small runs."""

from dataclasses import replace

import pytest

from benchctl.costs.flops import (
    Convention,
    FlopsAccount,
    achieved_flops_per_s,
    observed_flops,
    published_flops,
    utilization_frac,
)
from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import forward_bytes, weight_read_bytes
from benchctl.costs.run_work import Lengths, RunTotals, StepLogCounts
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.units import PETA, TERA

BASE = shape_for("qwen2.5-7b")
VALUE = shape_for("qwen2.5-1.5b")
H100 = hardware_for("h100-sxm")
PUBLISHED_RUN = RunTotals(num_questions=50, num_sequences=800, prompt_tokens=5200, output_tokens=237_675)
GUIDED_RUN = replace(PUBLISHED_RUN, output_tokens=237_710)

# linear 2·(4·2·2·1 + 4·2·1·1 + 6·2·3) = 120, attention 2·4·2·1 = 16, lm_head 2·2·5 = 20
SMALL = ModelShape(name="small", layers=2, hidden=2, q_heads=2, kv_heads=1, head_dim=1, ffn=3, vocab=5)
# linear 4·1·1·2 + 6·1·1 = 14, attention 4, value head 2 + 2 = 4, lm_head 2·7 = 14
SMALL_VALUE = ModelShape(name="value", layers=1, hidden=1, q_heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=7)


def guided(top_k: int = 5, *, convention: Convention = "published", totals: RunTotals = GUIDED_RUN) -> FlopsAccount:
    return published_flops(totals, base=BASE, value_model=VALUE, top_k=top_k, convention=convention)


def petas(flops: int) -> float:
    return round(flops / PETA, 6)


def test_the_published_baseline_is_reproduced() -> None:
    account = published_flops(PUBLISHED_RUN, base=BASE)
    assert petas(account.of("base").linear) == 3.16868
    assert petas(account.of("base").attention) == 0.024239
    assert petas(account.of("base").head) == 0.264651
    assert petas(account.of("base_prefill").total) == 0.073641
    assert petas(account.of("base_decode").total) == 3.38393
    assert petas(account.of("base").total) == petas(account.total) == 3.45757
    assert account.gflops_per_output_token == pytest.approx(14.237634, abs=1e-6)
    assert account.of("value").total == 0
    assert account.ratio == 1.0


def test_the_published_guided_run_is_reproduced() -> None:
    account = guided()
    assert petas(account.of("value_prefill").total) == 0.013698
    assert petas(account.of("value_extend").total) == 0.634068
    assert petas(account.of("value_candidates").total) == 3.170341
    assert petas(account.of("value").total) == 3.818107
    assert petas(account.total) == 7.275677
    assert account.gflops_per_output_token == pytest.approx(30.239951, abs=1e-6)
    assert account.ratio == pytest.approx(2.1043, abs=5e-5)
    assert account.of("value_candidates").total / account.of("value").total == pytest.approx(0.83, abs=0.005)


def test_the_form_that_charged_the_vocabulary_head_to_the_value_model_is_reproduced() -> None:
    account = guided(convention="lm-head-value-model")
    assert petas(account.of("value_prefill").total) == 0.0161
    assert petas(account.of("value_extend").total) == 0.743846
    assert petas(account.of("value_candidates").total) == 3.719228
    assert petas(account.of("value").total) == 4.479173
    assert petas(account.total) == 7.936743
    assert account.gflops_per_output_token == pytest.approx(33.010823, abs=1e-6)
    assert account.ratio == pytest.approx(2.295, abs=5e-4)


def test_the_form_of_two_flops_for_each_parameter_is_reproduced() -> None:
    account = guided(convention="two-n", totals=PUBLISHED_RUN)
    baseline = published_flops(PUBLISHED_RUN, base=BASE, convention="two-n")
    assert baseline.gflops_per_output_token == pytest.approx(15.22, abs=1e-9)
    assert account.gflops_per_output_token == pytest.approx(33.70, abs=1e-9)
    assert account.ratio == pytest.approx(2.188, abs=5e-4)
    assert account.of("base").attention == account.of("base").head == account.of("value_prefill").total == 0
    # The published 2.17 compares with a guided run about 0.9 percent shorter.
    shorter = guided(convention="two-n", totals=replace(PUBLISHED_RUN, output_tokens=235_560))
    assert shorter.total / baseline.total == pytest.approx(2.17, abs=5e-3)


def test_two_n_of_an_unlisted_model_uses_its_parameters() -> None:
    account = published_flops(PUBLISHED_RUN, base=SMALL, convention="two-n")
    assert account.of("base_decode").total == 2 * SMALL.num_params() * 237_675


@pytest.mark.parametrize(
    ("top_k", "ratio", "gflops_per_token"),
    [(1, 1.3707, 19.573), (2, 1.5541, 22.241), (3, 1.7375, 24.909), (4, 1.9209, 27.577), (5, 2.1043, 30.244)],
)
def test_the_sweep_of_top_k_at_equal_lengths(top_k: int, ratio: float, gflops_per_token: float) -> None:
    account = guided(top_k, totals=PUBLISHED_RUN)
    assert account.ratio == pytest.approx(ratio, abs=5e-5)
    assert account.gflops_per_output_token == pytest.approx(gflops_per_token, abs=5e-4)


def test_a_smaller_value_model_saves_what_was_published() -> None:
    large = guided()
    small = published_flops(GUIDED_RUN, base=BASE, value_model=shape_for("qwen2.5-0.5b"), top_k=5)
    assert small.total / large.total - 1 == pytest.approx(-0.379, abs=5e-4)
    assert small.of("value").total / large.of("value").total - 1 == pytest.approx(-0.72, abs=5e-3)


def test_the_published_rates_are_reproduced() -> None:
    base = published_flops(PUBLISHED_RUN, base=BASE).total
    assert achieved_flops_per_s(base, 19.22) == pytest.approx(179.89 * TERA, rel=5e-5)
    assert achieved_flops_per_s(guided().total, 87.44) == pytest.approx(83.21 * TERA, rel=1e-4)
    assert utilization_frac(base, 19.22, H100) == pytest.approx(0.182, abs=5e-4)
    assert utilization_frac(guided().total, 87.44, H100) == pytest.approx(0.084, abs=5e-4)


def test_a_rate_without_time_or_device_is_unknown() -> None:
    assert achieved_flops_per_s(10, None) is None
    assert achieved_flops_per_s(10, 0.0) is None
    assert utilization_frac(10, 1.0, None) is None
    assert utilization_frac(10, None, H100) is None


def test_a_hand_computed_published_account() -> None:
    # P = round(7 / 2) = 4 (ties to even), O = round(10 / 4) = 2; prefill sees 1+2+3+4, decode sees 5 + 6.
    totals = RunTotals(num_questions=2, num_sequences=4, prompt_tokens=7, output_tokens=10)
    account = published_flops(totals, base=SMALL, value_model=SMALL_VALUE, top_k=3)
    assert account.of("base_prefill").linear == 2 * 120 * 4
    assert account.of("base_prefill").attention == 2 * 16 * 10
    assert account.of("base_prefill").head == 2 * 20 * 4
    assert account.of("base_decode").linear == 4 * 120 * 2
    assert account.of("base_decode").attention == 4 * 16 * 11
    assert account.of("base_decode").head == 4 * 20 * 2
    assert account.of("value_prefill").total == 2 * (14 * 4 + 4 * 10 + 4 * 4)
    extend = 4 * (14 * 2 + 4 * 11 + 4 * 2)
    assert account.of("value_extend").total == extend
    assert account.of("value_candidates").total == 3 * extend
    per_token = account.of("base_decode").total + 4 * extend
    assert account.flops_per_output_token == per_token / 10


def test_a_hand_computed_observed_account() -> None:
    # Two samples of a prompt of 2 with 3 and 1 tokens. Prompts see 1+2 positions each; the longer decodes two
    # tokens that see 3 and 4; all outputs see (3+4+5) + 3 positions, so four tokens see 15.
    sequences = (Lengths(2, 3), Lengths(2, 1))
    counts = StepLogCounts(base_prefill_tokens=2, value_prefill_tokens=4, value_extend_tokens=2, candidates=8)
    account = observed_flops(sequences, counts, base=SMALL, value_model=SMALL_VALUE)
    assert account.of("base_prefill").linear == 120 * 2
    assert account.of("base_prefill").attention == 16 * 3
    assert account.of("base_decode").linear == 120 * 2
    assert account.of("base_decode").attention == 16 * (3 + 4)
    assert account.of("base").head == 20 * 4  # one for each output token
    assert account.of("value_prefill").total == 14 * 4 + 4 * 6
    assert account.of("value_extend").total == 14 * 2 + 4 * 8  # two tokens at 15 / 4 positions, rounded
    assert account.of("value_candidates").total == 14 * 8 + 4 * 30 + 4 * 8
    assert account.output_tokens == 4


def test_a_run_in_which_nothing_was_scored_costs_nothing_extra_when_observed() -> None:
    sequences = (Lengths(10, 20),) * 3
    counts = StepLogCounts(base_prefill_tokens=30)
    plain = observed_flops(sequences, counts, base=BASE)
    assert observed_flops(sequences, counts, base=BASE, value_model=VALUE) == plain
    assert plain.of("value").total == 0
    # The published rule charges it nevertheless.
    totals = RunTotals(num_questions=3, num_sequences=3, prompt_tokens=30, output_tokens=60)
    assert published_flops(totals, base=BASE, value_model=VALUE, top_k=1).of("value").total > 0


def test_prefill_of_the_value_model_for_each_sample_costs_what_was_computed() -> None:
    lengths = PUBLISHED_RUN.evenly()
    per_sample = StepLogCounts(
        base_prefill_tokens=5200, value_prefill_tokens=104 * 800, value_extend_tokens=0, candidates=0
    )
    account = observed_flops(lengths.sequences, per_sample, base=BASE, value_model=VALUE)
    assert account.of("value_prefill").total / PETA == pytest.approx(0.219, abs=1e-3)


@pytest.mark.parametrize("top_k", [0, -1])
def test_the_published_rule_charges_nothing_without_a_top_k(top_k: int) -> None:
    assert published_flops(PUBLISHED_RUN, base=BASE, value_model=VALUE, top_k=top_k).of("value").total == 0


@pytest.mark.parametrize("candidate_cost", [-0.1, float("nan"), float("inf")])
def test_an_impossible_candidate_cost_is_refused(candidate_cost: float) -> None:
    with pytest.raises(UsageError, match=r"candidate_cost is .*finite number from 0"):
        published_flops(PUBLISHED_RUN, base=BASE, candidate_cost=candidate_cost)


@pytest.mark.parametrize("name", ["num_questions", "num_sequences", "prompt_tokens", "output_tokens"])
def test_empty_totals_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0; FLOPs need at least 1"):
        replace(PUBLISHED_RUN, **{name: 0})


def test_an_account_of_nothing_has_no_ratio_and_no_flops_per_token() -> None:
    nothing = observed_flops((), StepLogCounts(base_prefill_tokens=0), base=BASE)
    assert nothing.total == 0
    assert nothing.ratio is None
    assert nothing.gflops_per_output_token is None


def test_bytes_of_a_step() -> None:
    # Projections have 60 parameters, the head 10; the cache holds 2·2·1·1 elements for each token.
    assert weight_read_bytes(SMALL) == 2 * 70
    assert weight_read_bytes(SMALL, 1) == 70
    assert forward_bytes(SMALL, 100, 1) == weight_read_bytes(SMALL) + 800
    # An untied 7B model reads all but its embedding.
    assert BASE.weight_bytes() - weight_read_bytes(BASE) == pytest.approx(2 * 152064 * 3584, rel=1e-3)
