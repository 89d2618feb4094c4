"""Load before a measurement: laws of the fixed point, and the simulator as the truth."""

import random
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import pytest
from hypothesis import given, settings, strategies as st
from support.servers.simulator import request_of, sequences_of

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import forward_bytes, forward_flops
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import SamplingParams
from benchctl.sim.simulation import simulate
from benchctl.steptime.queueing import (
    RequestSize,
    ServerLimits,
    kv_capacity_tokens,
    load_at_concurrency,
    load_at_rate,
)
from benchctl.steptime.work import Deployment

SHAPE = shape_for("qwen2.5-7b")
H100 = hardware_for("h100-sxm")
NS = 1e9

sizes = st.builds(RequestSize, prompt_tokens=st.integers(1, 20_000), output_tokens=st.integers(1, 2_000))


def roofline_s(work):
    positions = {"decode_positions": float(work.decode_positions)}
    flops = forward_flops(SHAPE, work.tokens, work.prefill_positions, float(work.num_sampled), **positions)
    num_bytes = forward_bytes(SHAPE, float(work.context + work.tokens), float(work.tokens))
    return float(max(flops / H100.peak_flops_per_s, num_bytes / H100.bandwidth_bytes_per_s))


def simulated(size, num, *, rate=0, concurrency=None):
    limits = {"max_tokens": size.output_tokens, "sampling": SamplingParams(temperature=0)}
    requests = tuple(request_of(f"r{i}", prompt_tokens=size.prompt_tokens, **limits) for i in range(num))
    stream = random.Random(1)
    gaps_s = accumulate(stream.expovariate(rate) for _ in requests) if rate else ()
    offsets = tuple(round(at_s * NS) for at_s in gaps_s) or None
    load = SimLoad(requests=requests, arrival_ns=offsets, max_concurrency=concurrency)
    return simulate(SimConfig(cost_model="roofline", max_num_seqs=256), [load])


def steady(simulation):
    """Completed requests per second, requests in the server and time per output token, of the middle half."""
    sequences = sorted(sequences_of(simulation), key=lambda sequence: sequence.arrival_ns)
    middle = slice(len(sequences) // 4, 3 * (len(sequences) // 4))
    ends_ns = sorted(s.last_token_ns for s in sequences)[middle]
    rate = (len(ends_ns) - 1) / (ends_ns[-1] - ends_ns[0]) * NS
    e2el_s = fmean(s.last_token_ns - s.arrival_ns for s in sequences[middle]) / NS
    tokens_s = sum(s.last_token_ns - s.first_token_ns for s in sequences[middle]) / NS
    return rate, rate * e2el_s, tokens_s / sum(max(1, s.num_output - 1) for s in sequences[middle])


@pytest.mark.parametrize(("prompt", "output", "num"), [(128, 1, 30), (8192, 1, 8), (1024, 256, 8), (20_000, 16, 8)])
def test_one_request_at_a_time_takes_the_predicted_time(prompt, output, num):
    size = RequestSize(prompt_tokens=prompt, output_tokens=output)
    load = load_at_concurrency(1, size, roofline_s)
    predicted = (load.requests_per_s, load.concurrency, load.tpot_s)
    assert predicted == pytest.approx(steady(simulated(size, num, concurrency=1)), rel=0.003)


@pytest.mark.parametrize(("prompt", "output", "concurrency", "num"), [(16, 256, 40, 160), (1024, 4, 32, 320)])
def test_closed_loop_completes_the_predicted_rate(prompt, output, concurrency, num):
    size = RequestSize(prompt_tokens=prompt, output_tokens=output)
    load = load_at_concurrency(concurrency, size, roofline_s)
    makespan_s = simulated(size, num, concurrency=concurrency).makespan_ns() / NS
    assert load.requests_per_s == pytest.approx(num / makespan_s, rel=0.03)
    assert load.concurrency == pytest.approx(concurrency)
    assert not load.is_saturated


@pytest.mark.parametrize(("prompt", "output", "rate", "num"), [(256, 64, 30, 1200), (2048, 16, 10, 800)])
def test_open_load_has_the_predicted_concurrency(prompt, output, rate, num):
    size = RequestSize(prompt_tokens=prompt, output_tokens=output)
    load = load_at_rate(rate, size, roofline_s)
    _, concurrency, tpot_s = steady(simulated(size, num, rate=rate))
    assert load.concurrency == pytest.approx(concurrency, rel=0.12)
    assert load.tpot_s == pytest.approx(tpot_s, rel=0.06)


def test_a_rate_above_the_predicted_capacity_builds_a_queue_and_one_below_does_not():
    size = RequestSize(prompt_tokens=1024, output_tokens=32)
    most = load_at_rate(1, size, roofline_s).max_requests_per_s
    waits_ns = []
    for share in (0.8, 1.25):
        last = sequences_of(simulated(size, 1000, rate=share * most))[-1]
        waits_ns.append(last.first_token_ns - last.arrival_ns)
        assert load_at_rate(share * most, size, roofline_s).is_saturated == (share > 1)
    assert waits_ns[1] > 10 * waits_ns[0]


@settings(max_examples=40)
@given(size=sizes, share=st.floats(0.01, 0.95), rows=st.integers(1, 512))
def test_littles_law_holds_for_the_load_itself(size, share, rows):
    limits = ServerLimits(max_num_seqs=rows)
    most = load_at_rate(1, size, roofline_s, limits).max_requests_per_s
    load = load_at_rate(share * most, size, roofline_s, limits)
    assert load.utilisation == pytest.approx(share)
    assert load.concurrency == pytest.approx(load.requests_per_s * load.e2el_s)
    assert load.e2el_s == pytest.approx(load.ttft_s + (size.output_tokens - 1) * load.tpot_s)
    assert load.batch <= rows


@settings(max_examples=40)
@given(size=sizes, rates=st.lists(st.floats(0.001, 50), min_size=2, max_size=2, unique=True))
def test_more_requests_per_second_never_lower_the_batch(size, rates):
    low, high = (load_at_rate(rate, size, roofline_s) for rate in sorted(rates))
    assert high.is_saturated or low.batch <= high.batch * (1 + 1e-6) + 1e-6
    assert high.is_saturated or low.tpot_s <= high.tpot_s * (1 + 1e-6)


def test_cache_that_is_too_small_limits_the_batch_and_cached_prompt_tokens_cost_nothing():
    limits = ServerLimits(max_num_seqs=256, kv_tokens=11_000)
    crowded = load_at_concurrency(40, RequestSize(prompt_tokens=1000, output_tokens=200), roofline_s, limits)
    assert (crowded.utilisation, crowded.concurrency) == (pytest.approx(4), pytest.approx(10))
    assert crowded.is_saturated
    cold = RequestSize(prompt_tokens=4096, output_tokens=1)
    ttfts = [load_at_concurrency(1, size, roofline_s).ttft_s for size in (cold, replace(cold, cached_tokens=4080))]
    assert ttfts[1] < 0.1 * ttfts[0]


def test_key_value_capacity_is_the_memory_beside_the_weights():
    tokens = kv_capacity_tokens(Deployment(shape=SHAPE, hardware=H100))
    assert tokens == pytest.approx((0.9 * 80e9 - 2 * 7.616e9) / (2 * 28 * 4 * 128 * 2), rel=1e-3)
    too_large = Deployment(shape=shape_for("qwen2.5-72b"), hardware=H100)
    assert kv_capacity_tokens(too_large) == 0
    assert kv_capacity_tokens(replace(too_large, tensor_parallel=4)) > 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_loads_that_do_not_exist_are_refused(value):
    with pytest.raises(UsageError, match="rate of"):
        load_at_rate(value, RequestSize(prompt_tokens=10, output_tokens=10), roofline_s)
