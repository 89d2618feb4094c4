"""Speculation under load: goodput by batch, crossover, backfill, and latency at a rate of requests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.acceptance import stated
from benchctl.steptime.queueing import RequestSize, ServerLimits, load_at_rate, step_time_source
from benchctl.steptime.speculation_law import DraftCost, law_at, tokens_per_step
from benchctl.steptime.speculation_load import ServerSteps, Speculation, as_share
from benchctl.steptime.work import Deployment, one_step

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


def test_at_a_high_rate_fewer_drafts_are_best_and_a_saturated_server_drafts_least():
    limits = ServerLimits(max_num_seqs=256)
    best = [dense().at_rate(rate, SIZE, limits).best[0] for rate in (1, 30, 60, 200)]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
