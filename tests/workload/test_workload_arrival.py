"""Arrival schedules and drawn lengths: their laws."""

import math
import random
import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.profile.arrival import (
    Arrival,
    arrival_offsets_ns,
    constant_offsets_ns,
    gamma_gaps_ns,
    launch_offsets_ns,
    trace_offsets_ns,
)
from benchctl.profile.model import LengthRange
from benchctl.workload.seeded import draw_length, draw_lengths

OPEN_LOOP = [
    Arrival(kind="constant", request_rate=7.0),
    Arrival(kind="poisson", request_rate=7.0),
    Arrival(kind="gamma", request_rate=7.0, burstiness=0.3),
]


def test_bursts_come_at_once_and_constant_arrivals_are_evenly_spaced_and_never_drift():
    for arrival in (Arrival(kind="closed-loop", max_concurrency=4), Arrival(kind="burst")):
        assert arrival_offsets_ns(arrival, 5, random.Random(1)) == (0, 0, 0, 0, 0)
    assert [*islice(constant_offsets_ns(4.0), 3)] == [250_000_000, 500_000_000, 750_000_000]
    assert next(islice(constant_offsets_ns(3.0), 299_999, None)) == 10**14


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_that_are_asked_for(burstiness):
    num = 20_000
    gaps = list(islice(gamma_gaps_ns(20.0, burstiness, random.Random(f"3:{burstiness}")), num))
    cv = 1 / math.sqrt(burstiness)
    assert statistics.fmean(gaps) == pytest.approx(1e9 / 20, rel=4 * cv / math.sqrt(num))
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_is_gamma_with_burstiness_one_and_depends_on_its_seed():
    def offsets(seed, **settings):
        return arrival_offsets_ns(Arrival(request_rate=3.0, **settings), 50, random.Random(seed))

    poisson = offsets(5, kind="poisson", burstiness=9.0)
    assert poisson == offsets(5, kind="gamma", burstiness=1.0)
    assert poisson != offsets(6, kind="poisson", burstiness=9.0)


@pytest.mark.parametrize("arrival", OPEN_LOOP, ids=lambda arrival: arrival.kind)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 60), more=st.integers(0, 60))
def test_more_requests_extend_the_same_schedule_and_time_never_runs_back(arrival, seed, num, more):
    offsets = arrival_offsets_ns(arrival, num + more, random.Random(seed))
    assert offsets[:num] == arrival_offsets_ns(arrival, num, random.Random(seed))
    assert all(earlier <= later for earlier, later in pairwise((0, *offsets)))


@settings(max_examples=60)
@given(gaps_ns=st.lists(st.integers(0, 10**9), min_size=1, max_size=50), limit_per_s=st.floats(0.1, 5000.0))
def test_limited_launches_keep_order_and_distance_and_are_held_back_no_longer_than_that(gaps_ns, limit_per_s):
    planned_ns = [sum(gaps_ns[: i + 1]) for i in range(len(gaps_ns))]
    launches_ns = launch_offsets_ns(planned_ns, limit_per_s)
    assert launches_ns[0] == planned_ns[0]
    for (before, after), planned in zip(pairwise(launches_ns), planned_ns[1:], strict=True):
        assert after - before >= 10**9 / limit_per_s - 1
        assert after == planned or after - before == pytest.approx(10**9 / limit_per_s, abs=1)


def test_a_limited_burst_and_a_trace_in_order_of_time_and_faster_on_demand():
    assert launch_offsets_ns((0, 5, 5), None) == (0, 5, 5)
    assert launch_offsets_ns((0, 0, 0, 0), 40.0) == (0, 25_000_000, 50_000_000, 75_000_000)
    assert launch_offsets_ns(iter((0,) * 300_001), 3.0)[-1] == pytest.approx(10**14, abs=2**10)
    assert trace_offsets_ns([30, 10, 20], 1.0) == (10, 20, 30)
    assert trace_offsets_ns([10, 20, 30], 2.0) == (5, 10, 15)


def test_lengths_have_the_mean_and_variation_that_are_asked_for_within_their_range():
    stream = random.Random("lengths")
    lengths = [draw_length(LengthRange(mean=200.0, cv=0.5), stream) for _ in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.02)
    assert statistics.pstdev(lengths) / statistics.fmean(lengths) == pytest.approx(0.5, rel=0.05)
    bounded = {draw_length(LengthRange(mean=100.0, cv=5.0, min=90, max=130), stream) for _ in range(500)}
    assert (min(bounded), max(bounded)) == (90, 130)
    assert [draw_length(LengthRange(mean=99.6), stream), draw_length(17, stream)] == [100, 17]


def test_lengths_of_a_list_come_in_turn_and_draw_nothing():
    stream = random.Random(0)
    assert [*islice(draw_lengths((5, 7, 9), stream), 5)] == [5, 7, 9, 5, 7]
    assert stream.random() == random.Random(0).random()
