"""Carry-over over the loads of one server: planted terms are told, and nothing is told where there is nothing."""

import random

import numpy as np
import pytest

from benchctl.analysis.statistics.carry_over import CarryOver, Load, LoadKey, carry_over
from benchctl.profile.planning import balanced_orders
from benchctl.steptime.speculation_law import Estimate

Orders = dict[int, list[Load]]
Tables = dict[str, dict[LoadKey, float]]


def made(
    seed: int,
    num_loads: int,
    *,
    blocks: int = 8,
    first: float = 0.0,
    after_larger: float = 0.0,
    per_load: float = 0.0,
    noise: float = 0.01,
) -> tuple[Tables, Orders]:
    """Two metrics of two arms, on servers that scatter by 14 %, where the smallest load scatters thrice as much."""
    rng, sizes = np.random.default_rng(seed), [(4.0**i,) for i in range(num_loads)]
    rows = balanced_orders(num_loads, blocks, random.Random(f"{seed}:ladder:0"))
    orders = {block: [sizes[i] for i in row] for block, row in enumerate(rows)}
    tables: Tables = {"wall": {}, "step": {}}
    for block, order in orders.items():
        for server in "ab":
            level = float(rng.normal(0, 0.14))
            for position, load in enumerate(order):
                is_after_larger = position > 0 and order[position - 1] > load
                effect = first * (position == 0) + after_larger * is_after_larger + per_load * position
                shared = rng.normal(0, noise)
                for table in tables.values():
                    scatter = noise * (3 if load == sizes[0] else 1)
                    table[block, server, load] = level + load[0] + effect + shared + rng.normal(0, scatter)
    return tables, orders


def least_p(effects: dict[str, CarryOver]) -> float:
    return min(each.p_value for each in effects.values())


def holds(effect: Estimate, value: float) -> bool:
    assert effect.low is not None
    assert effect.high is not None
    return effect.low <= value <= effect.high


@pytest.mark.parametrize(
    ("planted", "name"),
    [({"first": 0.03}, "first"), ({"after_larger": -0.03}, "after_larger"), ({"per_load": 0.01}, "per_load")],
)
def test_a_planted_term_is_named_and_its_size_is_in_the_interval(planted: dict[str, float], name: str) -> None:
    held = 0
    for seed in range(12):
        effects = carry_over(*made(seed, 5, noise=0.004, **planted))
        assert least_p(effects) < 0.01
        assert effects["wall"].clearest == name
        held += holds(effects["wall"].effects[name], *planted.values())
    assert held >= 10


def test_without_carry_over_one_experiment_in_a_hundred_raises_an_alarm() -> None:
    alarms = sum(least_p(carry_over(*made(seed, 3))) < 0.01 for seed in range(60))
    assert alarms <= 2  # 3 or more have a chance of 2 %, and with one alarm in ten fewer have one of 5 %


def test_two_loads_tell_the_first_from_the_second_and_nothing_else() -> None:
    # whether a load came after a larger one is then the load itself
    effect = carry_over(*made(1, 2, blocks=12, per_load=0.1))["step"]
    assert list(effect.effects) == ["per_load"]
    assert effect.effects["per_load"].value == pytest.approx(0.1, abs=0.03)
    assert effect.p_value < 0.01


def test_few_exchanges_of_orders_leave_no_small_p_value() -> None:
    effect = carry_over(*made(2, 2, blocks=8, per_load=0.1))["wall"]
    assert effect.p_value == pytest.approx(2 / 70, abs=0.015)  # of 70 exchanges, it and the one that swaps all
    assert effect.effects["per_load"].value == pytest.approx(0.1, abs=0.03)


def test_loads_that_are_missing_are_left_out_and_still_come_before_others() -> None:
    tables, orders = made(3, 4, after_larger=0.05, noise=0.004)
    for block in (1, 4, 6):
        for table in tables.values():
            del table[block, "a", orders[block][1]]
    effect = carry_over(tables, orders)["wall"]
    assert effect.effects["after_larger"].value == pytest.approx(0.05, abs=0.01)
    assert effect.p_value < 0.01


def test_servers_of_one_order_and_no_servers_tell_nothing() -> None:
    tables, orders = made(4, 3)
    assert carry_over(tables, dict.fromkeys(orders, orders[0])) == {}
    assert carry_over({"wall": {}}, {}) == {}
    assert carry_over({}, {}) == {}


def test_values_that_differ_by_rounding_alone_raise_no_alarm() -> None:
    tables, orders = made(5, 3, noise=0.0)
    assert least_p(carry_over(tables, orders)) == 1.0


def test_the_same_numbers_give_the_same_test() -> None:
    assert carry_over(*made(6, 3)) == carry_over(*made(6, 3))
