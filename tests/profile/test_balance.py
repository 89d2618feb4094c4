"""Balanced orders: what any number of arms and blocks keeps, and the figures that say how balanced one is."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.profile.planning import Imbalance, balanced_numbers, balanced_orders, cycle_length, imbalance_of
from benchctl.records.record import PlannedRun


def orders_of(num_arms, num_blocks, seed=0):
    return balanced_orders(num_arms, num_blocks, random.Random(f"{seed}:plan"))


def imbalance(num_arms, num_blocks, seed=0):
    return imbalance_of(planned(orders_of(num_arms, num_blocks, seed)), "baseline")


def planned(orders):
    """Arm 0 is ``baseline``, the others are cells of ``guided``."""
    return [
        PlannedRun(
            index=block * len(order) + position,
            run_id=f"{block}-{position}",
            block=block,
            position=position,
            variant="guided" if arm else "baseline",
            cell={"k": arm} if arm else {},
        )
        for block, order in enumerate(orders)
        for position, arm in enumerate(order)
    ]


def least_difference(num_arms, num_blocks):
    """No design has a smaller largest difference of the sums of positions to the baseline, where the counts of
    positions differ by at most one: only the positions taken once more, ``rest`` of each arm, make a difference.
    """
    rest = num_blocks % num_arms
    if rest == 0:
        return 0
    if rest in {1, num_arms - 1}:  # each position is the odd one of one arm
        return num_arms // 2
    if rest * (num_arms - 1) % 2:  # the mean of the sums is no whole number
        return 1
    return 1 if num_arms % 2 and rest in {2, num_arms - 2} else 0  # the middle position has no partner


@pytest.mark.parametrize("num_arms", range(2, 13))
def test_every_design_is_complete_and_nearly_as_balanced_in_positions_as_can_be(num_arms):
    for num_blocks in range(1, 25):
        orders = orders_of(num_arms, num_blocks)
        assert [sorted(order) for order in orders] == [list(range(num_arms))] * num_blocks
        figures = imbalance_of(planned(orders), "baseline")
        assert figures.position_spread == (1 if num_blocks % num_arms else 0)
        least = least_difference(num_arms, num_blocks)
        assert least - 1e-9 <= figures.position_difference * num_blocks <= least + 3
        assert figures.predecessor_spread <= 3


@pytest.mark.parametrize("num_arms", range(2, 13))
def test_whole_cycles_are_balanced_in_what_follows_what_as_well(num_arms):
    length = cycle_length(num_arms)
    assert imbalance(num_arms, length).is_balanced
    assert imbalance(num_arms, 2 * length).is_balanced
    followers = Counter(pair for order in orders_of(num_arms, length) for pair in pairwise(order))
    assert set(followers.values()) == {length // num_arms}
    assert len(followers) == num_arms * (num_arms - 1)


@settings(max_examples=50)
@given(num_arms=st.sampled_from([2, 4, 6, 8]), num_blocks=st.integers(1, 12), seed=st.integers(0, 1000))
def test_an_experiment_that_ends_after_an_even_number_of_blocks_has_equal_mean_positions(
    num_arms, num_blocks, seed
):
    begun = orders_of(num_arms, 24, seed)[: 2 * num_blocks]
    assert imbalance_of(planned(begun), "baseline").position_difference == 0


@settings(max_examples=50)
@given(num_arms=st.integers(2, 12), num_blocks=st.integers(1, 24), seed=st.integers(0, 1000))
def test_the_same_stream_gives_the_same_orders_and_more_cycles_only_extend_them(num_arms, num_blocks, seed):
    orders = orders_of(num_arms, num_blocks, seed)
    assert orders == orders_of(num_arms, num_blocks, seed)
    whole = num_blocks // cycle_length(num_arms) * cycle_length(num_arms)
    assert orders_of(num_arms, whole + 30, seed)[:whole] == orders[:whole]


def test_many_arms_are_planned_as_well_and_a_lone_baseline_is_balanced():
    figures = imbalance(31, 8)
    assert (figures.position_spread, figures.position_difference <= 2) == (1, True)
    assert imbalance_of([], "baseline").is_balanced
    assert imbalance_of(planned([(0,), (0,)]), "baseline").is_balanced


@pytest.mark.parametrize(
    ("num_arms", "num_blocks", "numbers"), [(6, 8, (6, 12)), (6, 3, (0, 6)), (5, 12, (10, 20)), (2, 7, (6, 8))]
)
def test_the_nearest_balanced_numbers_of_blocks_are_multiples_of_a_cycle(num_arms, num_blocks, numbers):
    assert balanced_numbers(num_arms, num_blocks) == numbers


def test_the_imbalance_of_a_plan_is_what_one_counts_by_hand():
    runs = planned([(0, 1, 2), (0, 2, 1), (1, 0, 2)])
    assert imbalance_of(runs, "baseline") == Imbalance(
        position_difference=pytest.approx(4 / 3),  # arm 2 at 2, 1, 2; the baseline at 0, 0, 1
        position_spread=2,  # the baseline twice first and never last
        predecessor_spread=2,  # arm 2 runs after the baseline twice, the baseline never after arm 2
    )


def test_runs_that_do_not_count_leave_an_imbalance_of_what_is_left():
    runs = planned(orders_of(6, 6))
    first = {run.cell.get("k", 0): run.position for run in runs if run.block == 0}
    without_block = imbalance_of([run for run in runs if run.block], "baseline")
    farthest = max(abs(position - first[0]) for position in first.values())
    assert without_block.position_difference == pytest.approx(farthest / 5)
    pair = [run for run in runs if run.cell in ({}, {"k": 3}) and (run.block or not run.cell)]
    assert imbalance_of(pair, "baseline").position_difference == pytest.approx(abs(first[3] - first[0]) / 5)
