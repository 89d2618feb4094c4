"""Balanced orders: what any number of arms and blocks keeps, and the figures that say how balanced one is."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.profile.planning import Imbalance, balanced_numbers, balanced_orders, cycle_length, imbalance_of
from benchctl.records.record import PlannedRun

EVERY_DESIGN = [(arms, blocks) for arms in range(2, 13) for blocks in range(1, 25)]


def orders_of(num_arms: int, num_blocks: int, seed: int = 0) -> list[tuple[int, ...]]:
    return balanced_orders(num_arms, num_blocks, random.Random(f"{seed}:plan"))


def planned(orders: list[tuple[int, ...]]) -> list[PlannedRun]:
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


def least_difference(num_arms: int, num_blocks: int) -> int:
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


@pytest.mark.parametrize(("num_arms", "num_blocks"), EVERY_DESIGN)
def test_every_design_is_complete_and_nearly_as_balanced_in_positions_as_can_be(num_arms, num_blocks):
    for seed in (0, 1):
        orders = orders_of(num_arms, num_blocks, seed)
        assert [sorted(order) for order in orders] == [list(range(num_arms))] * num_blocks
        imbalance = imbalance_of(planned(orders), "baseline")
        assert imbalance.position_spread == (1 if num_blocks % num_arms else 0)
        least = least_difference(num_arms, num_blocks) / num_blocks
        assert imbalance.position_difference >= least - 1e-9
        assert imbalance.position_difference * num_blocks <= least_difference(num_arms, num_blocks) + 3
        assert imbalance.predecessor_spread <= 3


@pytest.mark.parametrize("num_arms", range(2, 13))
def test_whole_cycles_are_balanced_in_what_follows_what_as_well(num_arms):
    length = cycle_length(num_arms)
    for times in (1, 2):
        imbalance = imbalance_of(planned(orders_of(num_arms, times * length)), "baseline")
        assert imbalance.is_balanced
    followers = Counter(pair for order in orders_of(num_arms, length) for pair in pairwise(order))
    assert set(followers.values()) == {length // num_arms}
    assert len(followers) == num_arms * (num_arms - 1)


@given(num_arms=st.sampled_from([2, 4, 6, 8]), num_blocks=st.integers(1, 12), seed=st.integers(0, 1000))
def test_an_experiment_that_ends_after_any_even_number_of_blocks_has_equal_mean_positions(
    num_arms, num_blocks, seed
):
    begun = orders_of(num_arms, 24, seed)[: 2 * num_blocks]
    assert imbalance_of(planned(begun), "baseline").position_difference == 0


@given(num_arms=st.integers(2, 12), num_blocks=st.integers(1, 24), seed=st.integers(0, 1000))
def test_the_same_stream_gives_the_same_orders_and_more_cycles_only_extend_them(num_arms, num_blocks, seed):
    orders = orders_of(num_arms, num_blocks, seed)
    assert orders == orders_of(num_arms, num_blocks, seed)
    whole = num_blocks // cycle_length(num_arms) * cycle_length(num_arms)
    assert orders_of(num_arms, whole + 30, seed)[:whole] == orders[:whole]


def test_many_arms_are_planned_as_well():
    imbalance = imbalance_of(planned(orders_of(31, 8)), "baseline")
    assert imbalance.position_spread == 1
    assert imbalance.position_difference <= 2


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
    assert imbalance_of(runs, "baseline").is_balanced
    without_block = [run for run in runs if run.block != 0]
    (lost,) = [run for run in runs if run.block == 0 and run.cell == {"k": 3}]
    (beside,) = [run for run in runs if run.block == 0 and run.variant == "baseline"]
    assert imbalance_of(without_block, "baseline").position_difference == pytest.approx(
        max(abs(run.position - beside.position) for run in runs if run.block == 0) / 5
    )
    pair = [run for run in runs if run is not lost and run.cell in ({}, {"k": 3})]
    assert imbalance_of(pair, "baseline").position_difference == pytest.approx(
        abs(lost.position - beside.position) / 5
    )


def test_nothing_and_a_lone_baseline_are_balanced():
    assert imbalance_of([], "baseline").is_balanced
    assert imbalance_of(planned([(0,), (0,)]), "baseline").is_balanced
