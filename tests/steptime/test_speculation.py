"""The law of speculative decoding, intervals of counted acceptance, and speculation under load."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.steptime.queueing import RequestSize, ServerLimits, load_at_rate, step_time_source
from benchctl.steptime.speculation_law import (
    LONGEST,
    DraftCost,
    PositionCounts,
    backfill_limit,
    break_even_acceptance,
    counted,
    law_at,
    of_counters,
    speed_up,
    stated,
    steps_by_length,
    token_probabilities,
    tokens_per_step,
)
from benchctl.steptime.speculation_load import ServerSteps, Speculation, as_share
from benchctl.steptime.work import Deployment, one_step

ORACLE = json.loads((Path(__file__).parents[1] / "fixtures" / "spec_decode.json").read_text(encoding="utf-8"))
PROBABILITIES = st.floats(0, 1)
LENGTHS = st.integers(1, 12)
LISTS = st.lists(PROBABILITIES, min_size=1, max_size=12)
COSTS = st.floats(0, 0.5)


@pytest.mark.parametrize("row", ORACLE, ids=lambda row: f"{row['alpha']}-{row['gamma']}")
def test_every_row_of_the_oracle_within_1e_5(row):
    (length,) = law_at(stated([row["alpha"]]), DraftCost(draft=0.05), [int(row["gamma"])]).lengths
    computed = {
        "E_bonus": length.tokens,
        "E_nobonus": length.tokens_without_bonus,
        "ratio": length.bonus_ratio,
        "speedup_c0.05": length.speed_up,
        "speedup_nobonus_c0.05": length.speed_up_without_bonus,
        "acceptance_rate": length.acceptance_rate,
        "system_efficiency_v0": length.system_efficiency,
    }
    for name, estimate in computed.items():
        assert (estimate.value, estimate.low) == (pytest.approx(row[name], abs=1e-5), None), name


@pytest.mark.parametrize("num", [1, 2, 12])
def test_drafts_yield_all_and_the_bonus_token_or_the_token_that_replaces_the_first(num):
    assert [tokens_per_step([1.0] * num, bonus=bonus) for bonus in (True, False)] == [num + 1, num]
    assert [tokens_per_step([0.0] * num, bonus=bonus) for bonus in (True, False)] == [1, 1]


@settings(max_examples=50)
@given(LISTS, st.data())
def test_tokens_per_step_rise_with_the_acceptance_of_any_position_and_every_further_draft(acceptance, data):
    position = data.draw(st.integers(0, len(acceptance) - 1))
    better = [*acceptance]
    better[position] = data.draw(st.floats(acceptance[position], 1))
    longer = [*acceptance, data.draw(PROBABILITIES)]
    for bonus in (True, False):
        least = tokens_per_step(acceptance, bonus=bonus) - 1e-12
        assert min(tokens_per_step(more, bonus=bonus) for more in (better, longer)) >= least


@given(LISTS, PROBABILITIES)
def test_k_drafts_without_bonus_yield_what_one_less_yields_with_it(acceptance: list[float], last: float) -> None:
    assert tokens_per_step([*acceptance, last], bonus=False) == tokens_per_step(acceptance, bonus=True)


@settings(max_examples=50)
@given(st.floats(0, 0.999), LENGTHS)
def test_equal_acceptance_at_every_position_gives_the_closed_form(alpha, num):
    closed = (1 - alpha ** (num + 1)) / (1 - alpha)
    assert tokens_per_step([alpha] * num, bonus=True) == pytest.approx(closed)
    (of_number,) = law_at(stated([alpha]), DraftCost(draft=0.1), [num]).lengths
    (of_list,) = law_at(stated([alpha] * num), DraftCost(draft=0.1), [num]).lengths
    assert (of_number.tokens, of_number.speed_up) == (of_list.tokens, of_list.speed_up)


@given(LISTS, COSTS)
def test_a_backfill_at_its_limit_gains_exactly_nothing(acceptance: list[float], draft_cost: float) -> None:
    num, cost = len(acceptance), DraftCost(draft=draft_cost)
    tokens, without = (tokens_per_step(acceptance, bonus=bonus) for bonus in (True, False))
    limit = backfill_limit(tokens, without, num, cost)
    with_bonus = speed_up(tokens, num, DraftCost(draft=draft_cost, backfill=limit), bonus=True)
    assert with_bonus == pytest.approx(speed_up(without, num, cost, bonus=False))


@settings(max_examples=50)
@given(LENGTHS, COSTS, st.booleans())
def test_break_even_acceptance_gains_nothing_and_a_little_more_pays(num, draft_cost, bonus):
    cost = DraftCost(draft=draft_cost)
    alpha = break_even_acceptance(num, cost, bonus=bonus)
    tokens = tokens_per_step([1.0 if alpha is None else alpha] * num, bonus=bonus)
    gain = speed_up(tokens, num, cost, bonus=bonus)
    assert gain <= 1 if alpha is None else gain == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [1.2, -0.1, math.nan])
def test_an_acceptance_or_a_cost_that_is_not_a_share_is_refused(value):
    with pytest.raises(UsageError, match=r"position 2: it is a probability from 0 to 1"):
        tokens_per_step([0.5, value], bonus=True)
    with pytest.raises(UsageError, match="draft cost"):
        DraftCost(draft=math.inf if value > 0 else value)


@given(LISTS, st.booleans())
def test_the_tokens_of_a_step_have_probabilities_with_the_expected_mean(
    acceptance: list[float], bonus: bool
) -> None:
    gains = token_probabilities(acceptance, bonus=bonus)
    assert math.fsum(gains) == pytest.approx(1)
    assert math.fsum(i * p for i, p in enumerate(gains)) == pytest.approx(tokens_per_step(acceptance, bonus=bonus))


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6), st.booleans())
def test_a_long_sequence_loses_nothing_to_its_last_step(acceptance: list[float], bonus: bool) -> None:
    expected, steps = tokens_per_step(acceptance, bonus=bonus), steps_by_length(400, acceptance, bonus=bonus)
    assert 400 / steps[400] == pytest.approx(expected, rel=0.02)
    assert 400 / steps[400] <= expected + 1e-9
    assert steps[1] == pytest.approx(1)
    assert steps[0] == 0


COST = DraftCost(draft=0.05)
COUNTS = st.integers(1, 500).flatmap(
    lambda judged: st.integers(0, judged).map(lambda accepted: PositionCounts(accepted=accepted, judged=judged))
)


def drawn_counters(alphas, num_drafts, stream):
    """Drafts accepted up to each position, as an engine counts them."""
    hits = [[stream.random() < alpha for alpha in alphas] for _ in range(num_drafts)]
    return [sum(all(drawn[: i + 1]) for drawn in hits) for i in range(len(alphas))]


def test_counters_of_an_engine_are_the_counts_of_each_position():
    acceptance = of_counters(100, [80, 60, 15])
    assert acceptance.values == (0.8, 0.75, 0.25)
    assert [(each.accepted, each.judged) for each in acceptance.counts] == [(80, 100), (60, 80), (15, 60)]
    (length,) = law_at(acceptance, COST, [3]).lengths
    assert length.tokens.value == pytest.approx(1 + (80 + 60 + 15) / 100)
    assert length.acceptance_rate.value == pytest.approx((80 + 60 + 15) / 300)
    assert length.survival.value == pytest.approx(0.15)
    assert of_counters(10, [4, 0, 0]).values == (0.4, 0.0)  # no draft reached the last position


def test_about_95_of_100_intervals_hold_the_truth():
    alphas, stream = [0.85, 0.7, 0.6], random.Random(3)
    true_tokens = tokens_per_step(alphas, bonus=True)
    true_gain = speed_up(tokens_per_step(alphas, bonus=False), 3, COST, bonus=False)
    held = {"tokens": 0, "speed-up": 0, "acceptance": 0}
    for seed in range(50):
        acceptance = of_counters(200, drawn_counters(alphas, 200, stream))
        (length,) = law_at(acceptance, COST, [3], seed=seed).lengths
        gain = length.speed_up_without_bonus
        held["tokens"] += length.tokens.low <= true_tokens <= length.tokens.high
        held["speed-up"] += gain.low <= true_gain <= gain.high
        held["acceptance"] += length.acceptance.low <= alphas[2] <= length.acceptance.high
    assert all(42 <= number <= 50 for number in held.values()), held


@settings(max_examples=20)
@given(st.lists(COUNTS, min_size=1, max_size=6))
def test_every_interval_contains_its_value(counts):
    law = law_at(counted(counts), COST, range(1, len(counts) + 1))
    estimates = [law.best, law.break_even]
    for each in law.lengths:
        estimates += [each.acceptance, each.survival, each.tokens, each.speed_up, each.bonus_ratio]
    assert all(estimate.low <= estimate.value <= estimate.high for estimate in estimates)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_interval_that_follows_from_one_position_is_exact_whatever_the_seed(seed):
    one, two = law_at(of_counters(200, [160, 120]), COST, [1, 2], seed=seed).lengths
    low, high = stats.beta.ppf([0.025, 0.975], 160.5, 40.5)
    assert (one.acceptance.low, one.acceptance.high) == pytest.approx((low, high), rel=1e-6)
    assert (one.tokens.low, one.speed_up.high) == pytest.approx((1 + low, (1 + high) / 1.05), rel=1e-6)
    exact = stats.beta.ppf([0.025, 0.975], 120.5, 40.5)
    assert (two.acceptance.low, two.acceptance.high) == pytest.approx(tuple(exact), rel=1e-6)


@settings(max_examples=60)
@given(st.floats(0, 0.97), st.floats(0.001, 0.6), st.booleans())
def test_no_draft_length_beats_the_best_and_none_pays_beyond_break_even(alpha, draft_cost, bonus):
    cost = DraftCost(draft=draft_cost)
    law = law_at(stated([alpha]), cost, [1], bonus=bonus)
    end = law.break_even.value
    gains = [speed_up(tokens_per_step([alpha] * i, bonus=bonus), i, cost, bonus=bonus) for i in range(end + 41)]
    assert law.best_speed_up.value == pytest.approx(gains[law.best.value])
    assert max(gains[:40]) <= law.best_speed_up.value + 1e-12
    assert gains[end] >= 1
    assert end == LONGEST or max(gains[end + 1 : end + 20]) <= 1 + 1e-12


def test_the_best_length_has_the_share_of_draws_that_have_it_and_rejected_drafts_never_pay():
    best = law_at(of_counters(60, [48, 38, 30, 24]), DraftCost(draft=0.08), [1, 2, 3, 4]).best
    assert best.low < best.value < best.high
    assert sum(share for _, share in best.shares) == pytest.approx(1)
    assert dict(best.shares)[best.value] > 0.05
    rejected = law_at(stated([0.0]), COST, [1, 2])
    assert (rejected.best.value, rejected.break_even.value, rejected.best_speed_up.value) == (0, 0, 1)


def test_positions_beyond_the_list_repeat_the_last_and_say_so():
    law = law_at(stated([0.9, 0.5]), COST, [1, 2, 3])
    assert [length.is_extrapolated for length in law.lengths] == [False, False, True]
    assert law.lengths[2].tokens.value == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert not law_at(stated([0.9]), COST, [5]).lengths[0].is_extrapolated
    assert law_at(of_counters(10, [9]), COST, [5]).lengths[0].is_extrapolated


@pytest.mark.parametrize(
    ("num_drafts", "accepted", "lengths", "message"),
    [
        (10, [11], [1], "never increase"),
        (10, [5, 6], [1], "at position 2"),
        (0, [0], [1], "no acceptance"),
        (10, [8], [0], "draft tokens: a step drafts from 1"),
        (10, [8], [LONGEST + 1], "draft tokens: a step drafts from 1"),
    ],
    ids=["more than drafts", "increasing", "no drafts", "none", "too long"],
)
def test_counters_and_draft_lengths_that_cannot_be_are_refused(num_drafts, accepted, lengths, message):
    with pytest.raises(UsageError, match=message):
        law_at(of_counters(num_drafts, accepted), COST, lengths)


SIZE = RequestSize(prompt_tokens=800, output_tokens=200)


def roofline_s(model):
    return step_time_source(Deployment(shape=shape_for(model), hardware=hardware_for("h100-sxm"))).step_s


def dense(context=512, acceptance=None):
    steps = ServerSteps(target_s=roofline_s("qwen2.5-7b"), draft_s=roofline_s("qwen2.5-0.5b"), context=context)
    return Speculation(steps, acceptance or stated([0.8]), range(1, 9))


def line(fixed_s, row_s):
    """Step times that grow with the new tokens of decoding rows."""
    return lambda work: fixed_s + row_s * float(work.decode_tokens)


def test_a_row_that_verifies_drafts_has_tokens_positions_and_logits_for_each():
    work = one_step(num_decodes=3, context=100, row_tokens=4)
    assert (work.num_decodes, work.decode_tokens, work.decode_context, work.num_sampled) == (3, 12, 300, 12)
    assert work.decode_positions == sum(3 * (100 + i + 0.5) for i in range(4))


@settings(max_examples=50)
@given(st.floats(0, 1), st.floats(0, 0.5), st.integers(1, 8), st.integers(1, 500), st.booleans())
def test_constant_step_times_give_the_law(alpha, cost, num, rows, bonus):
    target_s = line(0.01, 0.0)
    steps = ServerSteps(target_s=target_s, draft_s=as_share(target_s, cost), context=100)
    point = Speculation(steps, stated([alpha]), [num], bonus=bonus).at_batch(rows).points[1]
    (length,) = law_at(stated([alpha]), DraftCost(draft=cost), [num]).lengths
    assert point.speed_up.value == pytest.approx(length.gain(bonus=bonus).value)
    assert point.goodput_per_s.value == pytest.approx(rows / point.tpot_s.value)


def test_a_batch_bound_by_arithmetic_pays_for_every_token_it_verifies():
    steps = ServerSteps(target_s=line(0.0, 1.0), draft_s=line(0.0, 0.0), context=100)
    point = Speculation(steps, stated([0.8]), [3]).at_batch(64).points[1]
    assert point.speed_up.value == pytest.approx(tokens_per_step([0.8] * 3, bonus=True) / 4)


def test_fewer_drafts_are_best_the_larger_the_batch_until_none_are():
    best = [dense().at_batch(rows).best.num_draft_tokens for rows in (1, 16, 64, 128, 256, 512, 1024)]
    assert best == sorted(best, reverse=True)
    assert best[0] >= 6
    assert best[-1] == 0


@pytest.mark.parametrize("num", [1, 4, 8])
def test_the_crossover_is_the_last_batch_that_gains(num):
    smallest, largest = dense().batches_that_pay(num, 4096)
    assert smallest == 1
    gains = [dense().at_batch(rows).points[num].speed_up.value for rows in (largest, largest + 1)]
    assert gains[0] > 1 >= gains[1]


def test_batches_that_pay_are_all_with_long_contexts_some_with_experts_and_none_with_rejected_drafts():
    assert dense(context=8192).batches_that_pay(4, 2048) == (1, 2048)  # caches bound the step
    steps = ServerSteps(target_s=roofline_s("qwen3-30b-a3b"), draft_s=roofline_s("qwen3-0.6b"), context=512)
    smallest, largest = Speculation(steps, stated([0.8]), range(1, 9)).batches_that_pay(8, 2048)
    assert 1 < smallest < largest < 2048  # each token of a small batch reads other experts
    assert dense(acceptance=stated([0.0])).batches_that_pay(3, 512) is None


@pytest.mark.parametrize(
    ("backfill", "expected_s"),
    [("none", 0.0), ("expansion", 0.01 * 8 * 0.25), ("prefill", (1 - 0.75**8) * 1.0 + 0.01 * 8 * 0.25)],
    ids=["none", "expansion", "prefill"],
)
def test_backfill_adds_rows_to_a_pass_or_a_pass_where_a_row_needs_it(backfill, expected_s):
    steps = ServerSteps(target_s=line(5.0, 0.0), draft_s=line(1.0, 0.01), context=100, backfill=backfill)
    with_bonus = steps.step(8, 2, 0.25, bonus=True)
    assert with_bonus.backfill_s == pytest.approx(expected_s)
    assert with_bonus.draft_s == pytest.approx(2 * (1.0 + 0.08))
    assert steps.step(8, 2, 0.25, bonus=False).backfill_s == 0


def test_at_a_low_rate_the_time_per_token_is_that_of_a_small_batch():
    load = dense().at_rate(0.01, SIZE, ServerLimits())
    small = dense(context=SIZE.mean_context).at_batch(1).points
    tpots_s = {num: predicted.tpot_s for num, predicted in load.loads}
    assert tpots_s == pytest.approx({num: small[num].tpot_s.value for num in tpots_s}, rel=0.03)
    assert load.best[0] >= 6
    busy = dense().at_rate(10, SIZE, ServerLimits())
    assert busy.without == load_at_rate(10, SIZE, roofline_s("qwen2.5-7b"), ServerLimits())
