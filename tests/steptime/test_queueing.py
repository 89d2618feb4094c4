"""Load before a measurement: laws of the fixed point, and the simulator as the truth."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import request_of, sequences_of

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import forward_bytes, forward_flops
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import SamplingParams
from benchctl.steptime.queueing import (
    RequestSize,
    ServerLimits,
    kv_capacity_tokens,
    load_at_concurrency,
    load_at_rate,
)
from benchctl.steptime.work import Deployment, StepWork

SHAPE = shape_for("qwen2.5-7b")
H100 = hardware_for("h100-sxm")
NS = 1e9

sizes = st.builds(RequestSize, prompt_tokens=st.integers(1, 20_000), output_tokens=st.integers(1, 2_000))


def roofline_s(work: StepWork) -> float:
    flops = forward_flops(
        SHAPE,
        work.tokens,
        work.prefill_positions,
        float(work.num_sampled),
        decode_positions=float(work.decode_positions),
    )
    num_bytes = forward_bytes(SHAPE, float(work.context + work.tokens), float(work.tokens))
    return float(max(flops / H100.peak_flops_per_s, num_bytes / H100.bandwidth_bytes_per_s))


def simulated(prompt: int, output: int, num: int, *, rate: float = 0, concurrency: int | None = None) -> Simulation:
    requests = tuple(
        request_of(f"r{i}", prompt_tokens=prompt, max_tokens=output, sampling=SamplingParams(temperature=0))
        for i in range(num)
    )
    stream, now_s, offsets = random.Random(1), 0.0, []
    for _ in requests if rate else ():
        now_s += stream.expovariate(rate)
        offsets.append(round(now_s * NS))
    load = SimLoad(requests=requests, arrival_ns=tuple(offsets) or None, max_concurrency=concurrency)
    return simulate(SimConfig(cost_model="roofline", max_num_seqs=256), [load])


def steady(simulation: Simulation) -> tuple[float, float, float]:
    """Completed requests per second, requests in the server and time per output token, of the middle half."""
    sequences = sorted(sequences_of(simulation), key=lambda sequence: sequence.arrival_ns)
    quarter = len(sequences) // 4
    middle = sequences[quarter : 3 * quarter]
    e2el_s = sum(s.last_token_ns - s.arrival_ns for s in middle) / len(middle) / NS  # type: ignore[operator]
    ends_ns = sorted(s.last_token_ns for s in sequences)[quarter : 3 * quarter]  # type: ignore[type-var]
    rate = (len(ends_ns) - 1) / (ends_ns[-1] - ends_ns[0]) * NS  # type: ignore[operator]
    tokens_s = sum(s.last_token_ns - s.first_token_ns for s in middle) / NS  # type: ignore[operator]
    return rate, rate * e2el_s, tokens_s / sum(max(1, s.num_output - 1) for s in middle)


@pytest.mark.parametrize(("prompt", "output", "num"), [(128, 1, 30), (8192, 1, 8), (1024, 256, 8), (20_000, 16, 8)])
def test_one_request_at_a_time_takes_the_predicted_time(prompt: int, output: int, num: int) -> None:
    load = load_at_concurrency(1, RequestSize(prompt_tokens=prompt, output_tokens=output), roofline_s)
    rate, concurrency, tpot_s = steady(simulated(prompt, output, num, concurrency=1))
    assert load.requests_per_s == pytest.approx(rate, rel=0.003)
    assert load.concurrency == pytest.approx(concurrency, rel=0.003)
    assert load.tpot_s == pytest.approx(tpot_s, rel=0.003)


@pytest.mark.parametrize(("prompt", "output", "concurrency", "num"), [(16, 256, 40, 320), (1024, 4, 32, 640)])
def test_closed_loop_completes_the_predicted_rate(prompt: int, output: int, concurrency: int, num: int) -> None:
    load = load_at_concurrency(concurrency, RequestSize(prompt_tokens=prompt, output_tokens=output), roofline_s)
    makespan_s = simulated(prompt, output, num, concurrency=concurrency).makespan_ns() / NS
    assert load.requests_per_s == pytest.approx(num / makespan_s, rel=0.03)
    assert load.concurrency == pytest.approx(concurrency)
    assert not load.is_saturated


@pytest.mark.parametrize(("prompt", "output", "rate", "num"), [(256, 64, 30, 1200), (2048, 16, 10, 800)])
def test_open_load_has_the_predicted_concurrency(prompt: int, output: int, rate: float, num: int) -> None:
    load = load_at_rate(rate, RequestSize(prompt_tokens=prompt, output_tokens=output), roofline_s)
    _, concurrency, tpot_s = steady(simulated(prompt, output, num, rate=rate))
    assert load.concurrency == pytest.approx(concurrency, rel=0.12)
    assert load.tpot_s == pytest.approx(tpot_s, rel=0.06)


def test_a_rate_above_the_predicted_capacity_builds_a_queue_and_one_below_does_not() -> None:
    size = RequestSize(prompt_tokens=1024, output_tokens=32)
    most = load_at_rate(1, size, roofline_s).max_requests_per_s
    waits_s = []
    for share in (0.8, 1.25):
        sequences = sequences_of(simulated(1024, 32, 1000, rate=share * most))
        waits_s.append((sequences[-1].first_token_ns - sequences[-1].arrival_ns) / NS)  # type: ignore[operator]
        assert load_at_rate(share * most, size, roofline_s).is_saturated == (share > 1)
    assert waits_s[1] > 10 * waits_s[0]


def test_half_a_request_per_second_is_not_a_batch_of_one() -> None:
    """512 tokens at 7 ms each keep a request for 3.6 s: 1.8 of them are there at the same time."""
    size = RequestSize(prompt_tokens=1024, output_tokens=512)
    assert load_at_rate(0.5, size, lambda work: 0.007 if work.num_decodes else 0.02).concurrency == pytest.approx(
        0.5 * 512 * 0.007, rel=0.03
    )


@given(size=sizes, share=st.floats(0.01, 0.95), rows=st.integers(1, 512))
@settings(max_examples=60)
def test_littles_law_holds_for_the_load_itself(size: RequestSize, share: float, rows: int) -> None:
    limits = ServerLimits(max_num_seqs=rows)
    most = load_at_rate(1, size, roofline_s, limits).max_requests_per_s
    load = load_at_rate(share * most, size, roofline_s, limits)
    assert load.utilisation == pytest.approx(share)
    assert load.concurrency == pytest.approx(load.requests_per_s * load.e2el_s)
    assert load.e2el_s == pytest.approx(load.ttft_s + (size.output_tokens - 1) * load.tpot_s)
    assert load.batch <= rows


@given(size=sizes, rates=st.lists(st.floats(0.001, 50), min_size=2, max_size=2, unique=True))
@settings(max_examples=60)
def test_more_requests_per_second_never_lower_the_batch(size: RequestSize, rates: list[float]) -> None:
    low, high = (load_at_rate(rate, size, roofline_s) for rate in sorted(rates))
    if not high.is_saturated:
        assert low.batch <= high.batch * (1 + 1e-6) + 1e-6
        assert low.tpot_s <= high.tpot_s * (1 + 1e-6)


@given(size=sizes, concurrency=st.integers(1, 256))
@settings(max_examples=60)
def test_a_closed_loop_holds_as_many_requests_as_it_keeps_open(size: RequestSize, concurrency: int) -> None:
    load = load_at_concurrency(concurrency, size, roofline_s)
    assert load.concurrency == pytest.approx(concurrency)
    assert 0 <= load.batch <= concurrency


def test_cache_that_is_too_small_limits_the_batch() -> None:
    size = RequestSize(prompt_tokens=1000, output_tokens=200)
    limits = ServerLimits(max_num_seqs=256, kv_tokens=11_000)
    assert limits.rows(size) == pytest.approx(10)
    crowded = load_at_concurrency(40, size, roofline_s, limits)
    assert crowded.utilisation == pytest.approx(4)
    assert crowded.is_saturated
    assert crowded.concurrency == pytest.approx(10)


def test_cached_prompt_tokens_cost_nothing() -> None:
    size = RequestSize(prompt_tokens=4096, output_tokens=1)
    warm = load_at_concurrency(1, replace(size, cached_tokens=4080), roofline_s)
    assert warm.ttft_s < 0.1 * load_at_concurrency(1, size, roofline_s).ttft_s


def test_key_value_capacity_is_the_memory_beside_the_weights() -> None:
    tokens = kv_capacity_tokens(Deployment(shape=SHAPE, hardware=H100))
    assert tokens == pytest.approx((0.9 * 80e9 - 2 * 7.616e9) / (2 * 28 * 4 * 128 * 2), rel=1e-3)
    too_large = Deployment(shape=shape_for("qwen2.5-72b"), hardware=H100)
    assert kv_capacity_tokens(too_large) == 0
    assert kv_capacity_tokens(replace(too_large, tensor_parallel=4)) > 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_loads_that_do_not_exist_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="rate of"):
        load_at_rate(value, RequestSize(prompt_tokens=10, output_tokens=10), roofline_s)
