"""Counted acceptance: its intervals, those of what follows from it, best and break-even draft lengths."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchctl.errors import UsageError
from benchctl.steptime.acceptance import PositionCounts, counted, of_counters, stated
from benchctl.steptime.speculation_law import LONGEST, DraftCost, law_at, speed_up, tokens_per_step

COST = DraftCost(draft=0.05)
COUNTS = st.integers(1, 500).flatmap(
    lambda judged: st.integers(0, judged).map(lambda accepted: PositionCounts(accepted=accepted, judged=judged))
)


def drawn_counters(alphas: list[float], num_drafts: int, stream: random.Random) -> list[int]:
    """Drafts accepted up to each position, as an engine counts them."""
    accepted = [0] * len(alphas)
    for _ in range(num_drafts):
        for position, alpha in enumerate(alphas):
            if stream.random() >= alpha:
                break
            accepted[position] += 1
    return accepted


def test_counters_of_an_engine_are_the_counts_of_each_position() -> None:
    acceptance = of_counters(100, [80, 60, 15])
    assert acceptance.values == (0.8, 0.75, 0.25)
    assert [(each.accepted, each.judged) for each in acceptance.counts] == [(80, 100), (60, 80), (15, 60)]
    (length,) = law_at(acceptance, COST, [3]).lengths
    assert length.tokens.value == pytest.approx(1 + (80 + 60 + 15) / 100)
    assert length.acceptance_rate.value == pytest.approx((80 + 60 + 15) / 300)
    assert length.survival.value == pytest.approx(0.15)


def test_a_position_that_no_draft_reached_ends_the_list() -> None:
    assert of_counters(10, [4, 0, 0]).values == (0.4, 0.0)


@pytest.mark.slow
def test_about_95_of_100_intervals_hold_the_truth() -> None:
    alphas, stream = [0.85, 0.7, 0.6], random.Random(3)
    true_tokens = tokens_per_step(alphas, bonus=True)
    true_gain = speed_up(tokens_per_step(alphas, bonus=False), 3, COST, bonus=False)
    held = {"tokens": 0, "speed-up": 0, "acceptance": 0}
    for seed in range(200):
        acceptance = of_counters(200, drawn_counters(alphas, 200, stream))
        (length,) = law_at(acceptance, COST, [3], seed=seed).lengths
        gain = length.speed_up_without_bonus
        held["tokens"] += length.tokens.low <= true_tokens <= length.tokens.high
        held["speed-up"] += gain.low <= true_gain <= gain.high
        held["acceptance"] += length.acceptance.low <= alphas[2] <= length.acceptance.high
    assert all(180 <= number <= 198 for number in held.values()), held


@pytest.mark.slow
@given(st.lists(COUNTS, min_size=1, max_size=6))
def test_every_interval_contains_its_value(counts: list[PositionCounts]) -> None:
    law = law_at(counted(counts), COST, range(1, len(counts) + 1))
    for length in law.lengths:
        for estimate in (length.acceptance, length.survival, length.tokens, length.speed_up, length.bonus_ratio):
            assert estimate.low <= estimate.value <= estimate.high
    assert law.best.low <= law.best.value <= law.best.high
    assert law.break_even.low <= law.break_even.value <= law.break_even.high


def test_drafts_that_were_all_accepted_leave_k_and_the_bonus_token_possible() -> None:
    (length,) = law_at(of_counters(45, [45, 45, 45]), COST, [3]).lengths
    assert length.tokens.value == length.tokens.high == 4
    assert 3.7 < length.tokens.low < 4


def test_more_drafts_narrow_the_interval() -> None:
    few, many = (law_at(of_counters(num, [num * 8 // 10]), COST, [1]).lengths[0].tokens for num in (50, 5000))
    assert many.high - many.low < (few.high - few.low) / 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_interval_that_follows_from_one_position_is_exact_whatever_the_seed(seed: int) -> None:
    one, two = law_at(of_counters(200, [160, 120]), COST, [1, 2], seed=seed).lengths
    low, high = stats.beta.ppf([0.025, 0.975], 160.5, 40.5)
    assert (one.acceptance.low, one.acceptance.high) == pytest.approx((low, high), rel=1e-6)
    assert (one.tokens.low, one.speed_up.high) == pytest.approx((1 + low, (1 + high) / 1.05), rel=1e-6)
    exact = stats.beta.ppf([0.025, 0.975], 120.5, 40.5)
    assert (two.acceptance.low, two.acceptance.high) == pytest.approx(tuple(exact), rel=1e-6)


def test_the_same_seed_gives_the_same_interval() -> None:
    acceptance = of_counters(100, [80, 60])
    assert law_at(acceptance, COST, [2], seed=1) == law_at(acceptance, COST, [2], seed=1)
    assert law_at(acceptance, COST, [2], seed=1) != law_at(acceptance, COST, [2], seed=2)


@given(st.floats(0, 0.97), st.floats(0.001, 0.6), st.booleans())
def test_no_draft_length_beats_the_best_and_none_pays_beyond_break_even(
    alpha: float, draft_cost: float, bonus: bool
) -> None:
    cost = DraftCost(draft=draft_cost)
    law = law_at(stated([alpha]), cost, [1], bonus=bonus)

    def gain(num: int) -> float:
        return speed_up(tokens_per_step([alpha] * num, bonus=bonus), num, cost, bonus=bonus)

    assert law.best_speed_up.value == pytest.approx(gain(law.best.value))
    assert all(gain(num) <= law.best_speed_up.value + 1e-12 for num in range(40))
    end = law.break_even.value
    assert gain(end) >= 1
    assert end == LONGEST or all(gain(end + i) <= 1 + 1e-12 for i in range(1, 20))


def test_the_best_length_has_the_share_of_draws_that_have_it() -> None:
    law = law_at(of_counters(60, [48, 38, 30, 24]), DraftCost(draft=0.08), [1, 2, 3, 4])
    assert law.best.low < law.best.value < law.best.high
    assert sum(share for _, share in law.best.shares) == pytest.approx(1)
    shares = dict(law.best.shares)
    assert shares[law.best.value] > 0.05


def test_rejected_drafts_never_pay() -> None:
    law = law_at(stated([0.0]), COST, [1, 2])
    assert law.best.value == law.break_even.value == 0
    assert law.best_speed_up.value == 1


def test_positions_beyond_the_list_repeat_the_last_and_say_so() -> None:
    law = law_at(stated([0.9, 0.5]), COST, [1, 2, 3])
    assert [length.is_extrapolated for length in law.lengths] == [False, False, True]
    assert law.lengths[2].tokens.value == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert not law_at(stated([0.9]), COST, [5]).lengths[0].is_extrapolated
    assert law_at(of_counters(10, [9]), COST, [5]).lengths[0].is_extrapolated


def test_draws_of_a_position_are_those_of_the_posterior() -> None:
    (samples,) = of_counters(100, [80]).samples(1)
    assert samples[0] == 0.8
    assert float(np.mean(samples[1:])) == pytest.approx(80.5 / 101, abs=0.003)


@pytest.mark.parametrize(
    ("num_drafts", "accepted", "message"),
    [(10, [11], "never increase"), (10, [5, 6], "at position 2"), (0, [0], "no acceptance")],
    ids=["more than drafts", "increasing", "no drafts"],
)
def test_counters_that_cannot_be_are_refused(num_drafts: int, accepted: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of_counters(num_drafts, accepted)


@pytest.mark.parametrize("num", [0, -1, LONGEST + 1])
def test_a_draft_length_out_of_range_is_refused(num: int) -> None:
    with pytest.raises(UsageError, match="draft tokens: a step drafts from 1"):
        law_at(stated([0.8]), COST, [num])
