"""Laws of the parts of a difference, whatever the numbers are; the part of each factor of a step-time model."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from benchctl.analysis.attribution.estimate import (
    FACTORS,
    MODEL,
    SCATTER,
    ModelledRun,
    PairDesign,
    SourcedModel,
    estimate_levels,
    estimate_terms,
    logarithmic_mean,
    mean_work,
    shapley_s,
    split_by_model,
)
from benchctl.analysis.statistics.estimate import PooledSlope
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import US_PER_S

numbers = st.floats(-1e3, 1e3)
times_s = st.floats(1e-4, 1e3)
runs_of_three = st.tuples(numbers, numbers, numbers)
paired_runs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(st.lists(runs_of_three, min_size=n, max_size=n) for _ in range(2)))
)
unpaired_runs = st.tuples(*(st.lists(runs_of_three, min_size=1, max_size=6) for _ in range(2)))


@given(st.one_of(paired_runs, unpaired_runs), st.lists(st.integers(-3, 3), min_size=9, max_size=9))
def test_parts_that_add_up_in_every_run_add_up_over_the_blocks(sides, places):
    a, b = sides
    is_paired = len(a) == len(b)
    design = PairDesign(is_paired=is_paired, positions=tuple(places[: len(a)]) if is_paired else None)
    rows_a, rows_b = (
        [{"whole": math.fsum(run), **dict(zip("xyz", run, strict=True))} for run in side] for side in (a, b)
    )
    whole, *parts = estimate_levels(rows_a, rows_b, design)
    assert math.fsum(part.added_s for part in parts) == pytest.approx(whole.added_s, abs=1e-9)
    assert math.fsum(part.a_s or 0.0 for part in parts) == pytest.approx(whole.a_s, abs=1e-9)
    assert whole.b_s - whole.a_s == pytest.approx(whole.added_s, abs=1e-9)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_one_side_does_not_have_takes_no_time_there_whatever_the_places_say(is_swapped):
    without, having = [(3.0, 0.0), (3.1, 0.0), (3.3, 0.0)] * 3, [(3.0, 1.0), (3.2, 1.2), (3.1, 1.1)] * 3
    a, b = (having, without) if is_swapped else (without, having)
    positions = (1, -1, 1, 1, -1, -1, 1, -1, 1)
    design = PairDesign(is_paired=True, positions=positions, slope=PooledSlope(0.0, 4.5))
    rows_a, rows_b = ([{"both have": both, "one has": one} for both, one in side] for side in (a, b))
    _, part = estimate_levels(rows_a, rows_b, design)
    assert (part.b_s if is_swapped else part.a_s) == 0
    assert abs(part.added_s) == pytest.approx(1.1, abs=0.05)


@given(unpaired_runs)
def test_all_pairs_give_the_difference_of_the_means(sides):
    a, b = sides
    (found,) = estimate_terms(a, b, lambda x, y: [y[0] - x[0]], PairDesign(is_paired=False))
    means = [math.fsum(run[0] for run in side) / len(side) for side in (a, b)]
    assert found.log_ratio == pytest.approx(means[1] - means[0], abs=1e-9)
    assert (found.log_interval is None) == (min(len(a), len(b)) < 2)


def test_all_pairs_give_the_interval_of_welch():
    a, b = [1.0, 1.2, 0.9, 1.1], [2.0, 2.3, 1.8]
    (found,) = estimate_terms(a, b, lambda x, y: [y - x], PairDesign(is_paired=False))
    welch = ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.log_interval == pytest.approx((welch.low, welch.high))


@given(times_s, times_s)
def test_shares_of_the_logarithm_add_up_to_the_difference(a, b):
    mean = logarithmic_mean(a, b)
    assert mean * (math.log(b) - math.log(a)) == pytest.approx(b - a, abs=1e-9 * (a + b))
    assert min(a, b) * (1 - 1e-9) <= mean <= max(a, b) * (1 + 1e-9)


SMALL = Deployment(shape=shape_for("qwen2.5-0.5b"), hardware=hardware_for("h100-sxm"))
LARGE = replace(SMALL, shape=shape_for("qwen2.5-7b"))
COUNTS = st.integers(min_value=0, max_value=64)


def planted_us(work, deployment):
    """Linear in every count, but for the larger of two terms; more for a larger model."""
    linear = 100 + 7 * work.num_decodes + 0.01 * work.decode_context + 0.5 * work.prefill_tokens
    return (linear + np.maximum(3 * work.candidates, 0.2 * work.tokens)) * deployment.shape.layers / 24


PLANTED = SourcedModel(name="planted", predict_us=planted_us, hardware=SMALL.hardware)


def run_of(rows, context, *, prompts=0, prompt_tokens=64, candidates=0, rest_s=0.0, deployment=SMALL):
    """A run of steps with these rows, each of so many context tokens; the last step carries the prompts."""
    rows = np.array(rows, dtype=float)
    is_last = np.arange(len(rows)) == len(rows) - 1
    new = np.where(is_last, prompts * prompt_tokens, 0.0)
    work = StepWork(
        num_prefills=np.where(is_last, prompts, 0.0),
        prefill_tokens=new,
        prefill_positions=new * prompt_tokens / 2,
        num_decodes=rows,
        decode_tokens=rows,
        decode_context=rows * context,
        decode_positions=rows * (context + 0.5),
        num_sampled=rows + np.where(is_last, prompts, 0.0),
        candidates=rows * candidates,
    )
    predicted_s = float(np.mean(planted_us(work, deployment))) / US_PER_S
    return ModelledRun(
        step_s=predicted_s + rest_s,
        predicted_s=predicted_s,
        work=mean_work(work, len(rows)),
        deployment=deployment,
    )


@st.composite
def runs(draw):
    rows = draw(st.lists(COUNTS, min_size=1, max_size=6))
    prompts = draw(st.integers(0, 3))
    if not any(rows) and not prompts:
        prompts = 1
    return run_of(
        rows,
        draw(st.integers(0, 4000)),
        prompts=prompts,
        candidates=draw(st.integers(0, 8)),
        deployment=draw(st.sampled_from([SMALL, LARGE])),
        rest_s=draw(st.floats(-0.01, 0.01)),
    )


def split(a, b):
    return split_by_model(PLANTED, [a], [b], PairDesign(is_paired=True))


@given(runs(), runs(), st.floats(-0.01, 0.01))
def test_parts_add_up_to_the_difference_and_factors_to_what_the_model_predicts(a, b, added_s):
    parts = split(a, b)
    assert sum(part.added_s for part in parts.parts) == pytest.approx(b.step_s - a.step_s, abs=1e-12)
    assert sum(part.added_s for part in parts.parts[:-1]) == pytest.approx(b.predicted_s - a.predicted_s, abs=1e-12)
    assert parts.whole.b_s == pytest.approx(b.step_s)
    assert parts.rest.b_s == pytest.approx(b.step_s - b.predicted_s, abs=1e-12)
    there, back = shapley_s(planted_us, a, b), shapley_s(planted_us, b, a)
    assert there == pytest.approx([-part for part in back], abs=1e-12)
    *factors, rest = split(a, replace(a, step_s=a.step_s + added_s)).parts
    assert [part.added_s for part in factors] == pytest.approx([0.0] * len(factors), abs=1e-12)
    assert rest.added_s == pytest.approx(added_s, abs=1e-12), "runs of equal work differ in the rest alone"


def added_us(a, b):
    return {part.name: part.added_s * US_PER_S for part in split(a, b).parts[:-1]}


def test_one_factor_that_differs_gets_the_whole_difference():
    base = run_of([8, 8, 8, 8], 1000, prompts=1)
    cases = {
        "batch": run_of([16, 16, 16, 16], 1000, prompts=1),
        "context": run_of([8, 8, 8, 8], 3000, prompts=1),
        "prompts": run_of([8, 8, 8, 8], 1000, prompts=2),
        "candidates": run_of([8, 8, 8, 8], 1000, prompts=1, candidates=5),
        MODEL: run_of([8, 8, 8, 8], 1000, prompts=1, deployment=LARGE),
    }
    for name, other in cases.items():
        parts = added_us(base, other)
        assert parts.pop(name) == pytest.approx((other.predicted_s - base.predicted_s) * US_PER_S), name
        assert all(abs(part) < 1e-6 for part in parts.values()), (name, parts)


def test_a_value_model_that_one_side_has_counts_by_its_candidates():
    guiding = replace(SMALL, value_shape=shape_for("qwen2.5-0.5b").as_value_model())
    parts = added_us(run_of([8, 8], 1000), run_of([8, 8], 1000, candidates=5, deployment=guiding))
    assert parts.pop("candidates") > 0
    assert all(abs(part) < 1e-6 for part in parts.values())


def test_two_factors_that_multiply_share_what_they_add_together():
    parts = added_us(run_of([10], 100), run_of([20], 200))
    alone_batch, alone_context, together = 0.01 * 10 * 100 + 7.2 * 10, 0.01 * 10 * 100, 0.01 * 10 * 100
    assert parts["batch"] == pytest.approx(alone_batch + together / 2)
    assert parts["context"] == pytest.approx(alone_context + together / 2)


def test_a_kind_of_step_that_only_one_run_has_counts_by_its_share():
    parts = added_us(run_of([8, 8, 8, 8], 100), run_of([8, 8, 8, 8], 100, prompts=1, prompt_tokens=400))
    assert parts["prompts"] == pytest.approx((0.5 * 400 + 0.2 * 400) / 4)
    assert parts["batch"] == pytest.approx(0)


def test_steps_that_scatter_about_the_same_mean_differ_by_the_bend_of_the_model():
    def bent_us(work, _):
        return np.maximum(10 * work.num_decodes, 100.0)

    steady, scattered = (
        replace(run_of(rows, 100), predicted_s=float(np.mean(np.maximum(10 * np.array(rows), 100.0))) / US_PER_S)
        for rows in ([10, 10], [5, 15])
    )
    bent = SourcedModel(predict_us=bent_us, name="planted", hardware=SMALL.hardware)
    parts = split_by_model(bent, [steady], [scattered], PairDesign(is_paired=True)).parts[:-1]
    by_name = {part.name: part.added_s * US_PER_S for part in parts}
    assert by_name.pop(SCATTER) == pytest.approx(25)
    assert all(abs(part) < 1e-9 for part in by_name.values())


def test_blocks_that_scatter_give_every_part_an_interval_that_covers_it():
    a = [run_of([8, 8], 1000 + i) for i in range(6)]
    b = [run_of([12, 12], 1000 - i, rest_s=2e-6 * i) for i in range(6)]
    parts = split_by_model(PLANTED, a, b, PairDesign(is_paired=True))
    batch = next(part for part in parts.parts if part.name == "batch")
    assert batch.ci_low_s < batch.added_s < batch.ci_high_s
    assert parts.explained_frac == pytest.approx(parts.predicted.added_s / parts.whole.added_s)
    assert {part.name for part in parts.parts[:-1]} == {*FACTORS, MODEL, SCATTER}
