"""Fits to planted steps: exact without noise, honest about what the data cannot tell."""

from dataclasses import replace

import numpy as np
import pytest
from support.step_time import MODELS, names_of, planted_run, planted_runs

from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.steptime.fit import FitOptions, anchor_of, fit_model
from benchctl.steptime.work import StepWork

STRUCTURES = ("overlap", "original")


def planted_for(structure: str) -> dict[str, float]:
    """Coefficients unlike the typical ones."""
    return {
        name: anchor_of(name, structure).value + (-1) ** i * 0.4 * anchor_of(name, structure).spread
        for i, name in enumerate(names_of(structure))
    }


@pytest.mark.parametrize("structure", STRUCTURES)
def test_planted_coefficients_return_exactly_without_noise(structure: str) -> None:
    planted = planted_for(structure)
    model = fit_model(planted_runs(planted, structure=structure), FitOptions(structure=structure, num_draws=20))
    for coefficient in model.coefficients:
        if coefficient.is_identified:
            assert coefficient.value == pytest.approx(planted[coefficient.name], rel=1e-4), coefficient.name
    assert sum(coefficient.is_identified for coefficient in model.coefficients) >= len(planted) - 2


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_are_exact_on_the_steps_of_the_fit(structure: str) -> None:
    runs = planted_runs(planted_for(structure), structure=structure)
    model = fit_model(runs, FitOptions(structure=structure, num_draws=20))
    for run in runs:
        np.testing.assert_allclose(model.predict_us(run.work, run.deployment), run.duration_us, rtol=1e-5)


def test_with_noise_the_intervals_cover_nine_steps_in_ten_and_the_coefficients() -> None:
    planted = planted_for("overlap")
    model = fit_model(planted_runs(planted, noise=0.05, num_steps=600))
    unseen = planted_run(*MODELS[1], planted, seed=99, noise=0.05, num_steps=2000)
    low, high = model.interval_us(unseen.work, unseen.deployment)
    covered = np.mean((low <= unseen.duration_us) & (unseen.duration_us <= high))
    assert 0.87 <= covered <= 0.94
    inside = [
        c.low <= planted[c.name] <= c.high
        for c in model.coefficients
        if c.is_identified and c.low is not None and c.high is not None
    ]
    assert sum(inside) >= len(inside) - 2


def test_the_same_data_give_the_same_model_and_another_seed_other_draws() -> None:
    runs = planted_runs(planted_for("overlap"), noise=0.03)
    assert fit_model(runs) == fit_model(runs)
    other = fit_model(runs, FitOptions(seed=1))
    assert other.values == fit_model(runs).values
    assert other.draws != fit_model(runs).draws


def test_one_model_cannot_tell_its_weights_from_its_layers_and_is_predicted_all_the_same() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("original"), structure="original")
    model = fit_model([run], FitOptions(structure="original"))
    unidentified = {c.name for c in model.coefficients if not c.is_identified}
    assert unidentified == {"static_weights", "expert_weights", "all_reduce", "steps"}
    np.testing.assert_allclose(model.predict_us(run.work, run.deployment), run.duration_us, rtol=0.02)


def test_a_model_of_other_hardware_or_another_tensor_parallel_size_is_refused_with_the_remedy() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"))
    model = fit_model([run])
    elsewhere = planted_run("qwen2.5-7b", 1, planted_for("overlap"), hardware="a100-sxm")
    with pytest.raises(
        UsageError, match="of h100-sxm and the deployment of a100-sxm; 'benchctl steptime calibrate'"
    ):
        model.predict_us(elsewhere.work, elsewhere.deployment)
    with pytest.raises(UsageError, match="tensor-parallel sizes 1 and the deployment has 2; add a run"):
        model.interval_us(run.work, replace(run.deployment, tensor_parallel=2))
    with pytest.raises(UsageError, match="a model is fitted to one kind of device"):
        fit_model([run, elsewhere])


def test_batches_that_never_change_are_refused_with_the_run_to_add() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"), num_steps=50)
    constant = StepWork(
        num_decodes=np.full(50, 8.0),
        decode_tokens=np.full(50, 8.0),
        decode_context=np.full(50, 4096.0),
        decode_positions=np.full(50, 4100.0),
        num_sampled=np.full(50, 8.0),
    )
    with pytest.raises(UsageError, match=r"every step does the same work.*add a run"):
        fit_model([replace(run, work=constant)])


def test_contexts_that_follow_the_batch_are_refused_with_the_run_to_add() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"), num_steps=50)
    batch = np.linspace(1.0, 64.0, 50)
    together = StepWork(
        num_decodes=batch,
        decode_tokens=batch,
        decode_context=batch * 512,
        decode_positions=batch * 512.5,
        num_sampled=batch,
    )
    collinear = replace(run, work=together, duration_us=8000.0 + 40.0 * batch)
    with pytest.raises(UsageError, match=r"always move together in these steps.*add a run.*--ridge"):
        fit_model([collinear])
    assert fit_model([collinear], FitOptions(ridge=1e-4)).values


def test_steps_that_are_left_out_do_not_count_and_none_at_all_are_refused() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"))
    wrong = run.duration_us.copy()
    wrong[:100] *= 7
    saturated = replace(run, duration_us=wrong, is_saturated=np.arange(300) < 100, left_out={"preemption": 100})
    model = fit_model([saturated])
    assert model.provenance.num_steps == 200
    assert model.provenance.steps_left_out == (("preemption", 100),)
    np.testing.assert_allclose(model.predict_us(run.work, run.deployment)[100:], run.duration_us[100:], rtol=0.02)
    with pytest.raises(UsageError, match=r"all 300 are left out \(preemption\); add a run below saturation"):
        fit_model([replace(saturated, is_saturated=np.ones(300, dtype=bool))])


def test_the_roofline_is_not_fitted() -> None:
    model = fit_model(planted_runs(planted_for("overlap")), FitOptions(structure="roofline"))
    assert set(model.values.values()) == {1.0}
    assert not model.draws


def test_free_fits_may_be_negative_and_bounded_ones_are_not() -> None:
    planted = planted_for("overlap")
    name = next(name for name in planted if "request" in name)
    runs = planted_runs(planted | {name: -8.0}, noise=0.01)
    free = fit_model(runs, FitOptions(constraint="none")).values[name]
    assert free < 0
    assert fit_model(runs).values[name] == 0


def test_guided_steps_need_a_coefficient_that_unguided_ones_cannot_give() -> None:
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"))
    model = fit_model([run], FitOptions(num_draws=5))
    guided = replace(run.deployment, value_shape=shape_for("qwen2.5-1.5b"))
    rows = replace(run.work, guided_rows=np.full(300, 4.0), candidates=np.full(300, 12.0))
    with pytest.raises(UsageError, match=r"no coefficient of .*add a run that has it, and fit again"):
        model.predict_us(rows, guided)
    np.testing.assert_allclose(model.extrapolate_us(rows, guided), model.predict_us(run.work, run.deployment))
    np.testing.assert_allclose(model.predict_us(run.work, guided), model.predict_us(run.work, run.deployment))
