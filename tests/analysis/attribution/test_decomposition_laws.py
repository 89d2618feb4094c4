"""Laws of the parts of a difference, and of the model of a step's work, whatever the numbers are."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, measured_steps, request_of, run

from benchctl.analysis.attribution.estimate import PairDesign, estimate_levels, estimate_terms, logarithmic_mean
from benchctl.analysis.attribution.work import OF_BASE, OF_VALUE, floor_of
from benchctl.analysis.statistics.estimate import PooledSlope
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.records.columns import columns_from
from benchctl.steptime.work import Deployment

WORK = Deployment(
    shape=shape_for("qwen2.5-7b"),
    value_shape=shape_for(VALUE_MODEL).as_value_model(),
    hardware=hardware_for("h100-sxm"),
)
numbers = st.floats(-1e3, 1e3)
times_s = st.floats(1e-4, 1e3)
runs_of_three = st.tuples(numbers, numbers, numbers)
paired_runs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(st.lists(runs_of_three, min_size=n, max_size=n) for _ in range(2)))
)
unpaired_runs = st.tuples(*(st.lists(runs_of_three, min_size=1, max_size=6) for _ in range(2)))


@settings(deadline=None)
@given(st.one_of(paired_runs, unpaired_runs), st.lists(st.integers(-3, 3), min_size=9, max_size=9))
def test_parts_that_add_up_in_every_run_add_up_over_the_blocks(sides: Any, places: list[int]) -> None:
    a, b = sides
    is_paired = len(a) == len(b)
    design = PairDesign(is_paired=is_paired, positions=tuple(places[: len(a)]) if is_paired else None)
    rows_a, rows_b = (
        [{"whole": math.fsum(run), **dict(zip("xyz", run, strict=True))} for run in side] for side in (a, b)
    )
    whole, *parts = estimate_levels(rows_a, rows_b, design)
    assert whole.a_s is not None
    assert whole.b_s is not None
    assert math.fsum(part.added_s for part in parts) == pytest.approx(whole.added_s, abs=1e-9)
    assert math.fsum(part.a_s or 0.0 for part in parts) == pytest.approx(whole.a_s, abs=1e-9)
    assert whole.b_s - whole.a_s == pytest.approx(whole.added_s, abs=1e-9)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_one_side_does_not_have_takes_no_time_there_whatever_the_places_say(is_swapped: bool) -> None:
    without, having = [(3.0, 0.0), (3.1, 0.0), (3.3, 0.0)] * 3, [(3.0, 1.0), (3.2, 1.2), (3.1, 1.1)] * 3
    a, b = (having, without) if is_swapped else (without, having)
    positions = (1, -1, 1, 1, -1, -1, 1, -1, 1)
    design = PairDesign(is_paired=True, positions=positions, slope=PooledSlope(0.0, 4.5))
    rows_a, rows_b = ([{"both have": both, "one has": one} for both, one in side] for side in (a, b))
    _, part = estimate_levels(rows_a, rows_b, design)
    assert (part.b_s if is_swapped else part.a_s) == 0
    assert abs(part.added_s) == pytest.approx(1.1, abs=0.05)


@settings(deadline=None)
@given(unpaired_runs)
def test_all_pairs_give_the_difference_of_the_means(sides: Any) -> None:
    a, b = sides
    (found,) = estimate_terms(a, b, lambda x, y: [y[0] - x[0]], PairDesign(is_paired=False))
    means = [math.fsum(run[0] for run in side) / len(side) for side in (a, b)]
    assert found.log_ratio == pytest.approx(means[1] - means[0], abs=1e-9)
    assert (found.log_interval is None) == (min(len(a), len(b)) < 2)


def test_all_pairs_give_the_interval_of_welch() -> None:
    a, b = [1.0, 1.2, 0.9, 1.1], [2.0, 2.3, 1.8]
    (found,) = estimate_terms(a, b, lambda x, y: [y - x], PairDesign(is_paired=False))
    welch = ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.log_interval == pytest.approx((welch.low, welch.high))


@settings(deadline=None)
@given(times_s, times_s)
def test_shares_of_the_logarithm_add_up_to_the_difference(a: float, b: float) -> None:
    mean = logarithmic_mean(a, b)
    assert mean * (math.log(b) - math.log(a)) == pytest.approx(b - a, abs=1e-9 * (a + b))
    assert min(a, b) * (1 - 1e-9) <= mean <= max(a, b) * (1 + 1e-9)


@pytest.mark.parametrize("num_requests", [1, 8, 48])
def test_the_floor_of_a_step_is_the_time_of_an_engine_that_is_nothing_but_a_roofline(num_requests: int) -> None:
    """The simulator's ideal engine knows every sequence, the floor only what a step log counts."""
    simulation = run(
        [
            request_of(f"r{i}", prompt_tokens=100 + 20 * i, max_tokens=30, sampling=FILTERED, guidance=NEUTRAL)
            for i in range(num_requests)
        ],
        model="qwen2.5-7b",
        value_model=VALUE_MODEL,
        hardware="h100-sxm",
        cost_model="roofline",
        noise="none",
    )
    steps = measured_steps(simulation)
    floor = floor_of(columns_from(steps), WORK)
    for name, ours_s in (("model_forward", floor.parts[OF_BASE]), ("lvm_forward", floor.parts[OF_VALUE])):
        simulated_s = sum(step.sections_ns.get(name, 0) for step in steps) / len(steps) / 1e9
        assert ours_s == pytest.approx(simulated_s, rel=0.01)
        assert ours_s > 0


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_the_floor_of_drafts_is_the_time_of_an_ideal_engine_that_speculates(
    num_requests: int, acceptance: float
) -> None:
    simulation = run(
        [request_of(f"r{i}", prompt_tokens=100 + 20 * i, max_tokens=30) for i in range(num_requests)],
        model="qwen2.5-7b",
        draft_model="qwen2.5-0.5b",
        num_speculative_tokens=3,
        acceptance=(acceptance,),
        hardware="h100-sxm",
        cost_model="roofline",
        noise="none",
    )
    steps = measured_steps(simulation)
    drafting = replace(WORK, value_shape=None)
    floor = floor_of(columns_from(steps), drafting, draft=shape_for("qwen2.5-0.5b"))
    verify_s, draft_s = (
        sum(step.sections_ns.get(name, 0) for step in steps) / len(steps) / 1e9
        for name in ("model_forward", "draft")
    )
    base_s, drafts_s = floor.parts[OF_BASE], floor.parts["draft model's"]
    assert base_s == pytest.approx(verify_s, rel=0.01)
    assert 0.98 * draft_s < drafts_s <= draft_s  # a simulated pass also samples
    assert floor.total_s == base_s + drafts_s
    assert floor_of(columns_from(steps), drafting).parts[OF_BASE] == base_s


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ("context_tokens", "the step log does not count context_tokens in every step"),
        ("candidates", "the step log does not count candidates in every step"),
        ("output_tokens", None),
    ],
)
def test_what_the_step_log_does_not_count_has_no_floor(left_out: str, reason: str | None) -> None:
    simulation = run([request_of("r0", sampling=FILTERED, guidance=NEUTRAL)], value_model=VALUE_MODEL, noise="none")
    steps = [msgspec.structs.replace(step, **{left_out: None}) for step in simulation.steps]
    with pytest.raises(UsageError, match=reason) if reason else nullcontext():
        floor_of(columns_from(steps), WORK)
