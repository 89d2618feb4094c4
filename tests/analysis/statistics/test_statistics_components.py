"""Scatter between and within servers, drift over loads, and the design that costs least."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import t

from benchctl.analysis.statistics.components import (
    Components,
    Costs,
    Evidence,
    cheapest_design,
    design_of,
    loads_for_least_cost,
    variance_components,
)

Servers = dict[tuple[int, str], dict[int, float]]


def made(
    rng: np.random.Generator, between: float, within: float, *, blocks: int = 8, loads: int = 4, drift: float = 0.0
) -> Servers:
    """Two arms, B 5 % slower, in blocks that differ by 10 %."""
    levels = rng.normal(0, 0.1, blocks)
    return {
        (block, arm): {
            number: level + change + server + drift * number + float(rng.normal(0, within))
            for number in range(1, loads + 1)
        }
        for block, level in enumerate(levels)
        for arm, change in (("a", 0.0), ("b", 0.05))
        for server in [float(rng.normal(0, between))]
    }


def components(servers: Servers) -> Components:
    found = variance_components(servers)
    assert found is not None
    return found


@pytest.mark.parametrize(("between", "within"), [(0.03, 0.01), (0.02, 0.06)])
def test_intervals_hold_the_planted_scatter_and_drift_in_95_of_100(between: float, within: float) -> None:
    rng, n = np.random.default_rng(5), 400
    many = [components(made(rng, between, within, drift=0.004)) for _ in range(n)]
    truths = [("between", between), ("within", within), ("drift", 0.004)]
    for name, truth in truths:
        held = sum(getattr(each, name).low <= truth <= getattr(each, name).high for each in many)
        assert 0.92 * n <= held <= 0.98 * n, name
    assert math.sqrt(np.mean([each.within.value**2 for each in many])) == pytest.approx(within, rel=0.05)


def test_what_a_block_shares_and_what_an_arm_changes_is_no_scatter() -> None:
    servers = made(np.random.default_rng(1), 0.02, 0.03)
    moved = {
        (block, arm): {number: value + 3 * block + (arm == "b") for number, value in loads.items()}
        for (block, arm), loads in servers.items()
    }
    before, after = components(servers), components(moved)
    assert after.between.value == pytest.approx(before.between.value)
    assert after.within.value == pytest.approx(before.within.value)
    assert after.drift.value == pytest.approx(before.drift.value)


def test_loads_and_servers_that_are_missing_bias_nothing() -> None:
    rng, many = np.random.default_rng(2), []
    for _ in range(400):
        servers = made(rng, 0.03, 0.06)
        for key in list(servers)[:3]:
            del servers[key][1], servers[key][3]
        del servers[4, "a"]
        many.append(components(servers).evidence)
    between = np.mean([each.of_means - each.of_loads / each.num_loads for each in many])
    assert math.sqrt(between) == pytest.approx(0.03, rel=0.08)
    assert math.sqrt(np.mean([each.of_loads for each in many])) == pytest.approx(0.06, rel=0.04)


def test_means_closer_together_than_their_loads_allow_have_no_scatter_between_servers() -> None:
    servers = {(block, arm): {1: 0.1, 2: -0.2, 3: 0.1} for block in range(4) for arm in "ab"}
    assert components(servers).between.value == 0
    assert components(servers).between.low == 0


def test_one_arm_alone_scatters_from_block_to_block() -> None:
    servers = {(block, "a"): {1: value, 2: value + 0.01} for block, value in enumerate((0.0, 0.1, 0.2, 0.3))}
    assert components(servers).between.value == pytest.approx(float(np.std([0, 0.1, 0.2, 0.3], ddof=1)))
    assert components(servers).drift.value == pytest.approx(0.01)


@pytest.mark.parametrize(
    "servers",
    [
        {},
        {(0, "a"): {1: 0.0}, (0, "b"): {1: 0.1}, (1, "a"): {1: 0.2}, (1, "b"): {1: 0.1}},
        {(0, "a"): {1: 0.0, 2: 0.1, 3: 0.1}},
        {(0, "a"): {1: 0.0, 2: 0.1, 3: 0.2}, (0, "b"): {1: 0.0, 2: 0.1, 3: 0.1}},
    ],
    ids=["nothing", "one load each", "one server", "one block"],
)
def test_components_that_nothing_tells_are_unknown(servers: Servers) -> None:
    assert variance_components(servers) is None


def cost(num_loads: int, between: float, within: float, costs: Costs) -> float:
    return (costs.starts_s + num_loads * costs.load_s) * (between**2 + within**2 / num_loads)


def test_with_equal_scatter_three_loads_cost_three_per_cent_more_than_one() -> None:
    costs = Costs(80, 30)
    assert cost(3, 1, 1, costs) / cost(1, 1, 1, costs) == pytest.approx(1.03, abs=0.001)
    one, three = (design_of(n, 0.001, 0.02, 0.02, costs) for n in (1, 3))
    assert one is None  # over 1000 blocks
    assert three is None
    one, three = (design_of(n, 0.004, 0.02, 0.02, costs) for n in (1, 3))
    assert one is not None
    assert three is not None
    assert three.seconds / one.seconds == pytest.approx(1.03, abs=0.02)


def test_a_design_is_the_fewest_blocks_whose_interval_is_narrow_enough() -> None:
    design = design_of(4, 0.01, 0.01, 0.02, Costs(40, 5))
    assert design is not None
    sd = math.sqrt(2 * (0.01**2 + 0.02**2 / 4))
    for num_blocks, is_enough in ((design.num_blocks, True), (design.num_blocks - 1, False)):
        half = float(t.ppf(0.975, num_blocks - 2)) * sd / math.sqrt(num_blocks)
        assert (half <= math.log(1.01)) is is_enough
    assert design.seconds == design.num_blocks * (40 + 4 * 5)


def test_the_cheapest_design_costs_about_as_little_as_the_formula_says() -> None:
    for between, within, costs in (
        (0.02, 0.06, Costs(80, 30)),
        (0.02, 0.02, Costs(200, 2)),
        (0.05, 0.01, Costs(9, 9)),
    ):
        cheapest = cheapest_design(0.01, between, within, costs)
        assert cheapest is not None
        cheap = min(cost(n, between, within, costs) for n in range(1, 51))
        assert cost(cheapest.num_loads, between, within, costs) <= 1.03 * cheap


def pilot(between: float, within: float, seed: int = 3, change: Callable[[float], float] = lambda x: x) -> Evidence:
    servers = made(np.random.default_rng(seed), between, within, blocks=2, loads=3)
    return components({key: {n: change(x) for n, x in loads.items()} for key, loads in servers.items()}).evidence


def test_the_number_of_loads_follows_scatter_and_cost() -> None:
    steady_servers, steady_loads = pilot(0.001, 0.1), pilot(0.3, 0.001)
    assert loads_for_least_cost([steady_servers], Costs(80, 30), 2, 12) > 2
    assert loads_for_least_cost([steady_servers], Costs(300, 1), 2, 12) > 10
    assert loads_for_least_cost([steady_servers], Costs(1, 300), 2, 12) == 1
    assert loads_for_least_cost([steady_loads], Costs(80, 30), 2, 12) == 1


def test_the_number_of_loads_is_the_same_for_a_change_of_any_sign_and_size() -> None:
    numbers = {
        loads_for_least_cost([pilot(0.02, 0.05, change=change)], Costs(80, 5), 2, 12)
        for change in (lambda x: x, lambda x: -x, lambda x: x + 2)
    }
    assert len(numbers) == 1


def test_without_scatter_between_loads_one_is_enough() -> None:
    assert loads_for_least_cost([Evidence(0.1, 0.0, 1, 8, 3.0)], Costs(80, 1), 2, 12) == 1
    assert loads_for_least_cost([], Costs(80, 1), 2, 12) == 1


def test_two_blocks_choose_nearly_as_well_as_the_truth_would() -> None:
    rng, costs, ratios = np.random.default_rng(8), Costs(80, 30), []
    for between, within in ((0.01, 0.01), (0.03, 0.1), (0.1, 0.03), (0.01, 0.3)):
        best = min(cost(n, between, within, costs) for n in (1, 3, 7))
        for _ in range(50):
            evidence = components(made(rng, between, within, blocks=2, loads=3)).evidence
            ratios.append(cost(loads_for_least_cost([evidence], costs, 2, 24), between, within, costs) / best)
    assert np.mean(ratios) < 1.2
