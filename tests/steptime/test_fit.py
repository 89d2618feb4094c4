"""Fits to planted and simulated steps: exact without noise, honest about what the data cannot tell."""

from dataclasses import replace

import numpy as np
import pytest
from support.step_time import MODELS, decoding, names_of, planted_run, planted_runs

from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.steptime.diagnose import RunToAdd
from benchctl.steptime.fit import FitOptions, anchor_of, fit_model
from benchmarks.steptime.active_learning import PLANTED, Engine, active, learn, on_deployments


def planted_for(structure):
    """Coefficients unlike the typical ones."""
    anchors = {name: anchor_of(name, structure) for name in names_of(structure)}
    return {name: each.value + (-1) ** i * 0.4 * each.spread for i, (name, each) in enumerate(anchors.items())}


@pytest.mark.parametrize("structure", ["overlap", "original"])
def test_planted_coefficients_and_steps_return_exactly_without_noise(structure):
    planted = planted_for(structure)
    runs = planted_runs(planted, structure=structure)
    model = fit_model(runs, FitOptions(structure=structure, num_draws=20))
    identified = {each.name: each.value for each in model.coefficients if each.is_identified}
    assert identified == pytest.approx({name: planted[name] for name in identified}, rel=1e-4)
    assert len(identified) >= len(planted) - 2
    for run in runs:
        np.testing.assert_allclose(model.predict_us(run.work, run.deployment), run.duration_us, rtol=1e-5)


def test_with_noise_the_intervals_cover_nine_steps_in_ten_and_the_coefficients():
    planted = planted_for("overlap")
    model = fit_model(planted_runs(planted, noise=0.05, num_steps=600))
    unseen = planted_run(*MODELS[1], planted, seed=99, noise=0.05, num_steps=2000)
    low, high = model.interval_us(unseen.work, unseen.deployment)
    assert 0.87 <= np.mean((low <= unseen.duration_us) & (unseen.duration_us <= high)) <= 0.94
    bounded = [each for each in model.coefficients if each.is_identified and each.low is not None]
    inside = [each.low <= planted[each.name] <= each.high for each in bounded]
    assert sum(inside) >= len(inside) - 2


def test_the_same_data_give_the_same_model_and_another_seed_other_draws():
    runs = planted_runs(planted_for("overlap"), noise=0.03)
    model, other = fit_model(runs), fit_model(runs, FitOptions(seed=1))
    assert model == fit_model(runs)
    assert other.values == model.values
    assert other.draws != model.draws


def test_one_model_cannot_tell_its_weights_from_its_layers_and_is_predicted_all_the_same():
    run = planted_run("qwen2.5-7b", 1, planted_for("original"), structure="original")
    model = fit_model([run], FitOptions(structure="original"))
    unidentified = {c.name for c in model.coefficients if not c.is_identified}
    assert unidentified == {"static_weights", "expert_weights", "all_reduce", "steps"}
    np.testing.assert_allclose(model.predict_us(run.work, run.deployment), run.duration_us, rtol=0.02)


def test_a_model_of_other_hardware_or_another_tensor_parallel_size_is_refused_with_the_remedy():
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"))
    model = fit_model([run])
    elsewhere = planted_run("qwen2.5-7b", 1, planted_for("overlap"), hardware="a100-sxm")
    with pytest.raises(UsageError, match="of h100-sxm and the deployment of a100-sxm; 'benchctl steptime cali"):
        model.predict_us(elsewhere.work, elsewhere.deployment)
    with pytest.raises(UsageError, match="tensor-parallel sizes 1 and the deployment has 2; add a run"):
        model.interval_us(run.work, replace(run.deployment, tensor_parallel=2))
    with pytest.raises(UsageError, match="a model is fitted to one kind of device"):
        fit_model([run, elsewhere])


def test_steps_that_do_not_vary_are_refused_with_the_run_to_add():
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"), num_steps=50)
    with pytest.raises(UsageError, match=r"every step does the same work.*add a run"):
        fit_model([replace(run, work=decoding(np.full(50, 8.0), 512))])
    batch = np.linspace(1.0, 64.0, 50)
    collinear = replace(run, work=decoding(batch, 512), duration_us=8000.0 + 40.0 * batch)
    with pytest.raises(UsageError, match=r"always move together in these steps.*add a run.*--ridge"):
        fit_model([collinear])
    assert fit_model([collinear], FitOptions(ridge=1e-4)).values


def test_steps_that_are_left_out_do_not_count_and_none_at_all_are_refused():
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


def test_free_fits_may_be_negative_bounded_ones_are_not_and_the_roofline_is_not_fitted():
    runs = planted_runs(planted_for("overlap") | {"requests": -8.0}, noise=0.01)
    assert fit_model(runs, FitOptions(constraint="none")).values["requests"] < 0
    assert fit_model(runs).values["requests"] == 0
    roofline = fit_model(runs, FitOptions(structure="roofline"))
    assert (set(roofline.values.values()), roofline.draws) == ({1.0}, ())


def test_guided_steps_need_a_coefficient_that_unguided_ones_cannot_give():
    run = planted_run("qwen2.5-7b", 1, planted_for("overlap"))
    model = fit_model([run], FitOptions(num_draws=5))
    guided = replace(run.deployment, value_shape=shape_for("qwen2.5-1.5b"))
    rows = replace(run.work, guided_rows=np.full(300, 4.0), candidates=np.full(300, 12.0))
    with pytest.raises(UsageError, match=r"no coefficient of .*add a run that has it, and fit again"):
        model.predict_us(rows, guided)
    np.testing.assert_allclose(model.extrapolate_us(rows, guided), model.predict_us(run.work, run.deployment))
    np.testing.assert_allclose(model.predict_us(run.work, guided), model.predict_us(run.work, run.deployment))


EXACT = FitOptions(ridge=1e-10, num_draws=5)


def test_a_fit_to_the_simulators_steps_returns_every_planted_coefficient(tmp_path):
    engine = Engine(tmp_path, 0.0)
    # No prompt is divided over steps: a log does not say which of several prompts a part belongs to.
    sizes = [(8192, 1, 1), (512, 64, 1), (128, 64, 32), (1024, 64, 4), (128, 1, 32)]
    names = ("prompt_tokens", "output_tokens", "concurrency")
    runs = [RunToAdd(**dict(zip(names, size, strict=True)), reason="a test") for size in sizes]
    observed = [engine.measure(each, seed=0)[0] for run in runs for each in on_deployments(run)]
    assert fit_model(observed, EXACT).values == pytest.approx(PLANTED, rel=1e-4)


def test_the_loop_of_diagnosis_and_runs_comes_nearer_to_the_planted_coefficients(tmp_path):
    rounds = learn(Engine(tmp_path, 0.01), 4, active(EXACT), 3, EXACT)
    assert rounds[-1].worst < 0.1
    assert rounds[-1].worst < 0.3 * rounds[0].worst
    assert rounds[-1].mape < 0.005
    assert [state.num_runs for state in rounds] == sorted({state.num_runs for state in rounds})
