"""The law of speculative decoding: the oracle's rows, and what holds for every acceptance and draft length."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.errors import UsageError
from benchctl.steptime.acceptance import stated, survival
from benchctl.steptime.speculation_law import (
    DraftCost,
    backfill_limit,
    break_even_acceptance,
    law_at,
    speed_up,
    steps_by_length,
    token_probabilities,
    tokens_per_step,
)

ORACLE = json.loads((Path(__file__).parents[1] / "fixtures" / "spec_decode.json").read_text(encoding="utf-8"))
PROBABILITIES = st.floats(0, 1)
LENGTHS = st.integers(1, 12)
LISTS = st.lists(PROBABILITIES, min_size=1, max_size=12)
COSTS = st.floats(0, 0.5)


@pytest.mark.parametrize("row", ORACLE, ids=lambda row: f"{row['alpha']}-{row['gamma']}")
def test_every_row_of_the_oracle_within_1e_5(row: dict[str, float]) -> None:
    num, cost = int(row["gamma"]), DraftCost(draft=0.05)
    (length,) = law_at(stated([row["alpha"]]), cost, [num]).lengths
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
        assert estimate.value == pytest.approx(row[name], abs=1e-5), name
        assert estimate.low is None


def test_the_oracle_has_the_24_rows_of_four_acceptances_and_six_lengths() -> None:
    assert len(ORACLE) == 24
    assert {row["gamma"] for row in ORACLE} == {1, 2, 3, 4, 5, 8}


@given(LISTS)
def test_a_bonus_token_never_yields_less(acceptance: list[float]) -> None:
    assert tokens_per_step(acceptance, bonus=True) >= tokens_per_step(acceptance, bonus=False)


@given(st.floats(0, 0.99))
def test_the_gain_of_the_bonus_token_vanishes_with_long_drafts(alpha: float) -> None:
    ratios = [
        tokens_per_step([alpha] * num, bonus=True) / tokens_per_step([alpha] * num, bonus=False)
        for num in (1, 10, 100, 1000)
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(1 + alpha)
    assert ratios[-1] == pytest.approx(1, abs=2e-3)


@given(LENGTHS)
def test_drafts_that_are_always_accepted_yield_k_and_the_bonus_token(num: int) -> None:
    assert tokens_per_step([1.0] * num, bonus=True) == num + 1
    assert tokens_per_step([1.0] * num, bonus=False) == num


@given(LENGTHS)
def test_drafts_that_are_never_accepted_yield_the_token_that_replaces_the_first(num: int) -> None:
    assert tokens_per_step([0.0] * num, bonus=True) == tokens_per_step([0.0] * num, bonus=False) == 1


@given(LISTS, st.data())
def test_tokens_per_step_rise_with_the_acceptance_of_any_position(
    acceptance: list[float], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(acceptance) - 1))
    better = [*acceptance]
    better[position] = data.draw(st.floats(acceptance[position], 1))
    for bonus in (True, False):
        assert tokens_per_step(better, bonus=bonus) >= tokens_per_step(acceptance, bonus=bonus) - 1e-12


@given(LISTS, PROBABILITIES)
def test_tokens_per_step_rise_with_every_further_draft(acceptance: list[float], further: float) -> None:
    for bonus in (True, False):
        longer = tokens_per_step([*acceptance, further], bonus=bonus)
        assert longer >= tokens_per_step(acceptance, bonus=bonus)


@given(LISTS, PROBABILITIES)
def test_k_drafts_without_bonus_yield_what_one_less_yields_with_it(acceptance: list[float], last: float) -> None:
    assert tokens_per_step([*acceptance, last], bonus=False) == tokens_per_step(acceptance, bonus=True)


@given(st.floats(0, 0.999), LENGTHS)
def test_equal_acceptance_at_every_position_gives_the_closed_form(alpha: float, num: int) -> None:
    closed = (1 - alpha ** (num + 1)) / (1 - alpha)
    assert tokens_per_step([alpha] * num, bonus=True) == pytest.approx(closed)
    (of_number,) = law_at(stated([alpha]), DraftCost(draft=0.1), [num]).lengths
    (of_list,) = law_at(stated([alpha] * num), DraftCost(draft=0.1), [num]).lengths
    assert of_number.tokens == of_list.tokens
    assert of_number.speed_up_without_bonus == of_list.speed_up_without_bonus


@given(PROBABILITIES, COSTS)
def test_one_draft_without_bonus_only_costs_its_pass(alpha: float, draft_cost: float) -> None:
    tokens = tokens_per_step([alpha], bonus=False)
    assert speed_up(tokens, 1, DraftCost(draft=draft_cost), bonus=False) == pytest.approx(1 / (1 + draft_cost))


@given(LISTS, COSTS)
def test_a_backfill_at_its_limit_gains_exactly_nothing(acceptance: list[float], draft_cost: float) -> None:
    num, cost = len(acceptance), DraftCost(draft=draft_cost)
    tokens, without = (tokens_per_step(acceptance, bonus=bonus) for bonus in (True, False))
    limit = backfill_limit(tokens, without, num, cost)
    with_bonus = speed_up(tokens, num, DraftCost(draft=draft_cost, backfill=limit), bonus=True)
    assert with_bonus == pytest.approx(speed_up(without, num, cost, bonus=False))


@given(LISTS)
def test_rate_and_efficiency_are_accepted_and_emitted_shares(acceptance: list[float]) -> None:
    num = len(acceptance)
    (length,) = law_at(stated(acceptance), DraftCost(draft=0.1), [num]).lengths
    assert length.acceptance_rate.value == pytest.approx(math.fsum(survival(acceptance)[1:]) / num)
    assert length.system_efficiency.value * (num + 1) == pytest.approx(length.tokens.value)


@given(LENGTHS, COSTS, st.booleans())
def test_break_even_acceptance_gains_nothing_and_a_little_more_pays(
    num: int, draft_cost: float, bonus: bool
) -> None:
    cost = DraftCost(draft=draft_cost)
    alpha = break_even_acceptance(num, cost, bonus=bonus)
    if alpha is None:
        best = speed_up(tokens_per_step([1.0] * num, bonus=bonus), num, cost, bonus=bonus)
        assert best <= 1
        return
    assert speed_up(tokens_per_step([alpha] * num, bonus=bonus), num, cost, bonus=bonus) == pytest.approx(
        1, abs=1e-6
    )


def test_one_draft_without_bonus_pays_at_no_acceptance() -> None:
    assert break_even_acceptance(1, DraftCost(draft=0.05), bonus=False) is None
    assert break_even_acceptance(4, DraftCost(draft=0.0), bonus=True) == 0
    assert break_even_acceptance(1, DraftCost(draft=0.05), bonus=True) == pytest.approx(0.05)


@pytest.mark.parametrize("acceptance", [[1.2], [0.5, -0.1], [math.nan]])
def test_an_acceptance_that_is_not_a_probability_is_refused(acceptance: list[float]) -> None:
    with pytest.raises(UsageError, match=r"position \d: it is a probability from 0 to 1"):
        tokens_per_step(acceptance, bonus=True)


@pytest.mark.parametrize("share", [-0.1, math.inf, math.nan])
def test_a_cost_that_is_not_a_share_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="draft cost"):
        DraftCost(draft=share)


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


def test_two_tokens_need_a_second_step_unless_the_first_draft_is_accepted() -> None:
    assert steps_by_length(2, [0.8, 0.5], bonus=True)[2] == pytest.approx(1.2)
    assert steps_by_length(2, [0.8], bonus=False)[2] == 2
