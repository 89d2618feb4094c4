"""Designs replayed on the recorded loads of one experiment."""

import math
from itertools import cycle

import numpy as np
import pytest

from benchmarks.verdict.replay import (
    Design,
    Question,
    Server,
    auto_loads,
    divided_levels,
    drawn,
    judged,
    least_fixed,
    recentred,
    replay,
    seconds_of,
)

METRICS = ("step_ms",)


def blocks_of(stream, *, between=0.0, within=0.0, count=12, loads=5, start_s=20.0):
    """Blocks with so much scatter between servers and between loads; a load takes two seconds."""

    def server(position):
        log = stream.normal(0, between)
        values = [{"step_ms": 5 * math.exp(log + stream.normal(0, within))} for _ in range(loads)]
        return Server(position, start_s, (2.0,) * loads, tuple(values))

    orders = cycle([(0, 1), (1, 0)])
    return [(server(a), server(b)) for a, b in (next(orders) for _ in range(count))]


def question(blocks, right="regression", margin=0.01, truth=0.0):
    return Question(blocks, METRICS, "robust", margin, truth, right)


def test_a_design_is_charged_the_starts_and_its_own_loads():
    blocks = blocks_of(np.random.default_rng(0), count=3)
    assert seconds_of(blocks, [1, 1, 5]) == 3 * 2 * 20.0 + 2 * 2.0 * (1 + 1 + 5)


def test_a_clear_change_ends_at_the_first_look_and_a_fixed_design_measures_on():
    asked = question(blocks_of(np.random.default_rng(1), within=0.002), truth=math.log1p(0.05))
    ends = {}
    for until in ("verdict", "end"):
        design = Design(until, 2, until, divided_levels)
        ends[until] = replay(asked, design, 20, np.random.default_rng(2))
    assert {each.verdict for each in ends.values()} == {"regression"}
    assert ends["verdict"].num_blocks == 6
    assert ends["end"].num_blocks == 20


def test_every_two_drawn_blocks_begin_with_each_arm_once():
    chosen = drawn(question(blocks_of(np.random.default_rng(3))), 20, np.random.default_rng(4))
    firsts = [block[0].position for block in chosen]
    assert all(sum(firsts[i : i + 2]) == 1 for i in range(0, 20, 2))


def test_the_ratio_of_a_recording_is_removed_and_the_true_one_is_that_of_any_number_of_loads():
    """Seven blocks that scatter unevenly: their own ratio, and the skew of chance, leave no trace."""
    asked = question(blocks_of(np.random.default_rng(5), between=0.05, within=0.1, count=7), truth=math.log1p(0.05))
    centred = recentred(asked)
    (compared,) = judged(centred.blocks, [5] * 7, METRICS, centred.rules(0.95), "robust")
    assert compared.estimate.ratio == pytest.approx(1)
    for num_loads in (1, 5):
        chosen = drawn(centred, 2000, np.random.default_rng(6))
        (compared,) = judged(chosen, [num_loads] * 2000, METRICS, centred.rules(0.95), "mean")
        error = compared.estimate.log_ratio - math.log1p(0.05)
        assert abs(error) < 2 * compared.estimate.half_width


@pytest.mark.parametrize(("between", "within", "expected"), [(0.05, 0.0005, range(1, 2)), (0.0, 0.2, range(4, 9))])
def test_auto_takes_one_load_where_servers_scatter_and_many_where_loads_do(between, within, expected):
    pilot = blocks_of(np.random.default_rng(6), between=between, within=within, count=2, loads=8, start_s=5.0)
    assert auto_loads(pilot, METRICS, 20, 8) in expected


def test_several_loads_need_less_time_where_loads_scatter_most():
    asked = recentred(question(blocks_of(np.random.default_rng(7), within=0.08), "equivalent", 0.05))
    one, five = (least_fixed(asked, n, 20, np.random.default_rng(8)) for n in (1, 5))
    assert five["minutes, mean"] < 0.6 * one["minutes, mean"]
