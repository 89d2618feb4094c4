"""A change of step time divided by a step-time model: laws of the parts, and the part that each factor gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.analysis.attribution.estimate import (
    FACTORS,
    MODEL,
    SCATTER,
    ModelledRun,
    PairDesign,
    SourcedModel,
    mean_work,
    shapley_s,
    split_by_model,
)
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import US_PER_S

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


@given(runs(), runs())
def test_the_parts_add_up_to_the_difference_and_the_factors_to_what_the_model_predicts(a, b):
    parts = split(a, b)
    assert sum(part.added_s for part in parts.parts) == pytest.approx(b.step_s - a.step_s, abs=1e-12)
    assert sum(part.added_s for part in parts.parts[:-1]) == pytest.approx(b.predicted_s - a.predicted_s, abs=1e-12)
    assert parts.whole.b_s == pytest.approx(b.step_s)
    assert parts.rest.b_s == pytest.approx(b.step_s - b.predicted_s, abs=1e-12)


@given(runs(), runs())
def test_exchanged_sides_have_the_negative_parts(a, b):
    there, back = shapley_s(planted_us, a, b), shapley_s(planted_us, b, a)
    assert there == pytest.approx([-part for part in back], abs=1e-12)


@given(runs(), st.floats(-0.01, 0.01))
def test_runs_of_equal_work_differ_in_the_rest_alone(a, added_s):
    parts = split(a, replace(a, step_s=a.step_s + added_s))
    assert [part.added_s for part in parts.parts[:-1]] == pytest.approx([0.0] * len(parts.parts[:-1]), abs=1e-12)
    assert parts.rest.added_s == pytest.approx(added_s, abs=1e-12)


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
        whole = (other.predicted_s - base.predicted_s) * US_PER_S
        assert parts.pop(name) == pytest.approx(whole), name
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
