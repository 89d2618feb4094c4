"""Planted faults of the simulator: pauses at new batch sizes, drift, slow starts, aftermath, launch scatter."""

import math
import statistics

import pytest
from support.servers.simulator import request_of

from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.simulation import simulate

S = 1_000_000_000


def steps_of(loads, **options):
    """All steps of one server life."""
    return simulate(SimConfig(**options), loads).steps


def load_of(outputs, **parts):
    requests = [request_of(f"{parts}-{i}", max_tokens=tokens) for i, tokens in enumerate(outputs)]
    return SimLoad(requests=requests, **parts)


LOADS = [load_of([3, 3], is_warmup=True), load_of([9, 30, 12, 40, 25, 31], max_concurrency=4)]


def test_the_first_step_of_each_batch_size_pauses_once_and_the_warm_up_takes_its_sizes_away():
    without, paused = steps_of(LOADS), steps_of(LOADS, first_use_pause_s=1.0)
    more_ns = [slow.dur_ns - step.dur_ns for slow, step in zip(paused, without, strict=True)]
    sizes, new = set(), []
    for step in without:
        new.append(step.num_seqs not in sizes)
        sizes.add(step.num_seqs)
    assert more_ns == [S * is_new for is_new in new]
    assert all(step.is_warmup for step, is_new in zip(without, new, strict=True) if is_new and step.num_seqs == 2)
    pause = next(step for step, is_new in zip(paused, new, strict=True) if is_new)
    assert pause.sections_ns["model_forward"] > S


def test_steps_drift_with_the_requests_that_have_ended_and_not_in_the_warm_up():
    without, drifting = steps_of(LOADS), steps_of(LOADS, drift=0.3)
    factors = [slow.dur_ns / step.dur_ns for slow, step in zip(drifting, without, strict=True)]
    in_load = [factor for factor, step in zip(factors, without, strict=True) if not step.is_warmup]
    assert factors[: -len(in_load)] == [1.0] * (len(factors) - len(in_load))
    assert in_load[0] == 1.0
    assert in_load == pytest.approx(sorted(in_load), rel=1e-6)
    assert in_load[-1] == pytest.approx(1 + 0.3 * 5 / 6, rel=1e-4)  # one request is left


def test_the_first_steps_of_a_server_are_slow():
    without, slow = steps_of(LOADS), steps_of(LOADS, slow_first_steps=8, slow_first_factor=2.5)
    factors = [late.dur_ns / step.dur_ns for late, step in zip(slow, without, strict=True)]
    assert factors == pytest.approx([2.5] * 8 + [1.0] * (len(factors) - 8), rel=1e-4)


def test_a_load_after_a_larger_one_is_slower_and_neither_warm_up_nor_ramp_makes_one_larger():
    sizes = {"large": 4, "small": 2, "larger": 5}
    loads = [load_of([3] * 6, is_warmup=True), *(load_of([9] * 20, max_concurrency=n) for n in sizes.values())]
    without, slower = steps_of(loads), steps_of(loads, aftermath=0.1)
    factors = [after.dur_ns / step.dur_ns for after, step in zip(slower, without, strict=True)]
    first = next(i for i, step in enumerate(without) if not step.is_warmup)
    ends = [first + max(i for i, step in enumerate(without[first:]) if step.num_seqs == n) for n in sizes.values()]
    large, small, larger = factors[: ends[0]], factors[ends[0] + 9 : ends[1]], factors[ends[1] + 1 :]
    assert large == [1.0] * len(large)
    assert small == pytest.approx([1.1] * len(small), rel=1e-4)
    assert larger == [1.0] * len(larger)


def test_a_server_without_faults_reports_none():
    assert not {
        name for name in SimConfig().server_info() if name.startswith(("drift", "slow", "first_use", "aftermath"))
    }
    assert SimConfig(drift=0.03).server_info().keys() - SimConfig().server_info().keys() == {"drift"}


def test_the_launches_of_a_server_scatter_by_one_factor_of_all_its_steps():
    without, factors = steps_of(LOADS), []
    for seed in range(40):
        scattered = steps_of(LOADS, launch_scatter=0.05, noise_seed=seed)
        of_life = {round(late.dur_ns / step.dur_ns, 4) for late, step in zip(scattered, without, strict=True)}
        assert max(of_life) - min(of_life) < 2e-4
        factors.append(math.log(max(of_life)))
    assert statistics.pstdev(factors) == pytest.approx(0.05, rel=0.25)
