"""Fits to planted and simulated steps: exact without noise, honest about what is open, judged by runs held out."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.datasets import DATA, needs_data
from support.step_time import MODELS, decoding, names_of, planted_run, planted_runs

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.steptime.design import Pull, open_directions, relative_rows, select_steps, solve
from benchctl.steptime.diagnose import RunToAdd, diagnose
from benchctl.steptime.evaluate import buckets, compare_structures, hold_out, judge
from benchctl.steptime.features import features
from benchctl.steptime.fit import FitOptions, anchor_of, calibrate, fit_model, parts_of, solve_scales
from benchmarks.steptime.active_learning import PLANTED, Engine, on_deployments

COEFFICIENTS = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}


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


def test_a_fit_to_the_simulators_steps_returns_every_planted_coefficient(tmp_path):
    engine = Engine(tmp_path, 0.0)
    # No prompt is divided over steps: a log does not say which of several prompts a part belongs to.
    sizes = [(8192, 1, 1), (512, 64, 1), (128, 64, 32), (1024, 64, 4), (128, 1, 32)]
    names = ("prompt_tokens", "output_tokens", "concurrency")
    runs = [RunToAdd(**dict(zip(names, size, strict=True)), reason="a test") for size in sizes]
    observed = [engine.measure(each, seed=0)[0] for run in runs for each in on_deployments(run)]
    assert fit_model(observed, FitOptions(ridge=1e-10, num_draws=5)).values == pytest.approx(PLANTED, rel=1e-4)


SEEDS = st.integers(0, 10_000)
BLOCKS = np.array_split(np.arange(80), 8)


def design(seed, num_columns=5):
    """Columns that matter alike, from one stream, and times that scatter around their sum."""
    stream = np.random.default_rng(seed)
    matrix = stream.gamma(2.0, 1.0, (80, num_columns))
    return matrix, stream, matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, 80))


def solved(matrix, measured, constraint="non-negative", **more):
    return solve(relative_rows(matrix, measured, BLOCKS), pull(matrix.shape[1]), constraint=constraint, **more)


def pull(num_columns, strength=0.0):
    return Pull(values=np.ones(num_columns), spreads=np.full(num_columns, 0.5), strength=strength)


@settings(max_examples=30)
@given(SEEDS)
def test_planted_coefficients_return_exactly_without_noise(seed):
    matrix, stream, _ = design(seed)
    planted = stream.uniform(0.2, 4.0, matrix.shape[1]) / matrix.mean(axis=0)
    for constraint in ("non-negative", "none"):
        np.testing.assert_allclose(solved(matrix, matrix @ planted, constraint), planted, rtol=1e-7)


@settings(max_examples=30)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_the_unit_of_time_scales_every_coefficient_and_that_of_a_column_its_own(seed, factor):
    matrix, _, measured = design(seed)
    one, other = solved(matrix, measured), solved(matrix, measured * factor)
    np.testing.assert_allclose(other, one * factor, rtol=1e-6, atol=1e-9 * np.abs(one * factor).max())
    scales = np.array([factor, 1.0, 1.0, 1.0, 1.0])
    scaled = solved(matrix * scales, measured, "none") * scales
    np.testing.assert_allclose(scaled, solved(matrix, measured, "none"), rtol=1e-5, atol=1e-8)


def test_the_cut_into_blocks_changes_nothing_and_weights_repeat_them():
    matrix, _, measured = design(3)
    whole = solve(relative_rows(matrix, measured, [np.arange(80)]), pull(5), constraint="non-negative")
    np.testing.assert_allclose(solved(matrix, measured), whole, rtol=1e-8)
    twice = relative_rows(matrix, measured, [*BLOCKS[1:], BLOCKS[2]])
    repeated = solved(matrix, measured, "none", weights=np.array([0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(solve(twice, pull(5), constraint="none"), repeated, rtol=1e-6)


def test_a_direction_that_the_data_leave_open_is_decided_by_the_typical_values():
    matrix, _, _ = design(5, num_columns=3)
    matrix[:, 2] = matrix[:, 1]
    rows = relative_rows(matrix, matrix @ np.array([1.0, 1.4, 0.0]), BLOCKS)
    (direction,) = open_directions(rows)
    np.testing.assert_allclose(np.abs(direction), [0.0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-9)
    typical = Pull(values=np.array([1.0, 1.0, 0.2]), spreads=np.full(3, 0.5))
    np.testing.assert_allclose(solve(rows, typical, constraint="non-negative"), [1.0, 1.1, 0.3], rtol=1e-5)


ORACLE = DATA.parent / "oracles/steptime.json"


@pytest.mark.skipif(not ORACLE.is_file(), reason=f"the oracle is not at {ORACLE}")
def test_the_published_few_shot_points_return_their_scalars():
    few_shot = json.loads(ORACLE.read_text(encoding="utf-8"))["few_shot"]
    compute, memory, overhead, measured = np.array(few_shot["rows(P_c,P_m,overhead,y)_us"]).T
    scales = solve_scales(compute, memory, overhead, measured)
    assert scales.compute == pytest.approx(few_shot["s_c"], rel=1e-6)
    assert scales.memory == pytest.approx(few_shot["s_m"], rel=1e-6)


def test_steps_that_do_not_determine_both_scales_are_refused_with_the_remedy():
    memory = np.array([9000.0, 9100.0, 9200.0])
    with pytest.raises(UsageError, match=r"do not determine how arithmetic scales .*add prompts of 512 tokens"):
        solve_scales(np.array([0.0, 0.0, 0.0]), memory, np.zeros(3), memory)
    with pytest.raises(UsageError, match="add decode steps of small batches"):
        solve_scales(memory, memory * 1e-4, np.zeros(3), memory)


def test_the_parts_of_a_price_add_up_and_answer_to_the_peaks():
    run = planted_run("qwen2.5-7b", 1, COEFFICIENTS)
    model = fit_model([run], FitOptions(num_draws=5))
    compute, memory, rest = parts_of(model, run)
    np.testing.assert_allclose(compute + memory + rest, model.predict_us(run.work, run.deployment), rtol=1e-9)
    assert (compute[np.asarray(run.work.prefill_tokens) > 2000] > 0).all()
    assert (memory[np.asarray(run.work.tokens) < 20] > 0).all()


@pytest.fixture(scope="module")
def source():
    return fit_model(
        [planted_run("qwen2.5-7b", 1, COEFFICIENTS, seed=i) for i in range(3)], FitOptions(num_draws=5)
    )


def twenty_steps(run):
    return select_steps(run, np.arange(0, 300, 15))


def test_a_model_that_was_carried_over_predicts_the_other_device(source):
    scaled = COEFFICIENTS | {"compute": 1.25 * COEFFICIENTS["compute"], "memory": 0.9 * COEFFICIENTS["memory"]}
    target = planted_run("qwen2.5-7b", 1, scaled, seed=7, hardware="a100-sxm")
    carried, scales = calibrate(source, [twenty_steps(target)], fitted_on="2026-11-22")
    assert (scales.compute, scales.memory) == (pytest.approx(1.25, rel=0.02), pytest.approx(0.9, rel=0.02))
    errors = np.asarray(carried.predict_us(target.work, target.deployment)) / target.duration_us - 1.0
    assert np.abs(errors).mean() < 0.02
    assert (carried.hardware, carried.provenance.calibrated_from) == ("a100-sxm", "h100-sxm")
    assert carried.provenance.most_query_tokens == source.provenance.most_query_tokens == 1
    with pytest.raises(UsageError, match="of a100-sxm and the deployment of h100-sxm"):
        carried.predict_us(target.work, replace(target.deployment, hardware=hardware_for("h100-sxm")))


def test_steps_with_drafts_teach_no_verification_and_times_below_the_overhead_are_refused(source):
    target = twenty_steps(planted_run("qwen2.5-7b", 1, COEFFICIENTS, hardware="a100-sxm", row_tokens=5))
    assert calibrate(source, [target])[0].provenance.most_query_tokens == 1
    with pytest.raises(UsageError, match=r"a time cannot shrink below 0.*fit a model of its own"):
        calibrate(source, [replace(target, duration_us=np.full(20, 500.0))])


QUICK = FitOptions(num_draws=30)


def test_each_run_is_predicted_by_a_fit_that_did_not_see_it():
    tripled = {name: 3 * value for name, value in COEFFICIENTS.items()}
    poisoned = planted_run("qwen2.5-7b", 1, tripled, seed=50, run="slow")
    evaluation = hold_out([*planted_runs(COEFFICIENTS, noise=0.02), poisoned], QUICK)
    biases = {group.label: group.bias_frac for group in evaluation.groups}
    assert len(biases) == 6
    assert biases["slow"] < -0.4
    assert evaluation.whole.num_steps == sum(group.num_steps for group in evaluation.groups)


def test_held_out_errors_and_coverage_are_those_of_the_noise():
    runs = [planted_run("qwen2.5-14b", 2, COEFFICIENTS, noise=0.03, seed=i) for i in range(5)]
    evaluation = hold_out(runs, QUICK, "run")
    assert len(evaluation.groups) == 5
    assert evaluation.whole.mape_frac == pytest.approx(0.03 * np.sqrt(2 / np.pi), rel=0.3)
    assert abs(evaluation.whole.bias_frac) < 0.01
    assert 0.85 <= evaluation.whole.coverage_frac <= 0.95
    with pytest.raises(UsageError, match=r"only one model \(qwen2.5-14b\).*add steps of another model"):
        hold_out(runs, QUICK, "model")


def test_buckets_divide_all_steps_and_find_the_bad_part():
    run = planted_run(*MODELS[0], COEFFICIENTS, noise=0.01)
    is_large = np.asarray(run.work.num_seqs) >= 128
    bent = planted_run(*MODELS[0], COEFFICIENTS, noise=0.01)
    bent.duration_us[is_large] *= 1.5
    by_bucket = buckets(judge(fit_model([run], QUICK), [bent]).predictions)
    for group in by_bucket.values():
        assert sum(accuracy.num_steps for accuracy in group) == 300
    worst = max(by_bucket["batch"], key=lambda accuracy: accuracy.mape_frac)
    assert worst.label == "128 to 255"
    assert worst.mape_frac == pytest.approx(1 / 3, rel=0.05)


def test_a_diagnosis_names_what_is_wrong_and_a_run_that_helps():
    observed = [planted_run("qwen2.5-7b", 1, COEFFICIENTS, noise=0.02)]
    diagnosis = diagnose(fit_model(observed, QUICK), observed, QUICK)
    assert {check.where for check in diagnosis.checks if check.code == "not-identified"} >= {"layers", "steps"}
    wrong = planted_run("qwen2.5-7b", 1, COEFFICIENTS | {"memory": 9.0}, noise=0.02)
    far = diagnose(fit_model([wrong], QUICK), [wrong], QUICK)
    assert any(check.code == "far-above-peak" and check.where == "memory" for check in far.checks)
    assert not far.is_finished


def test_the_runs_to_add_have_what_the_measured_steps_lack():
    """Decoding at one context leaves arithmetic and contexts open."""
    work = decoding(np.repeat([1.0, 8.0, 32.0, 64.0], 25), 512 + np.tile(np.arange(25.0) / 64, 4))
    template = planted_run("qwen2.5-7b", 1, COEFFICIENTS, num_steps=100)
    columns = features(work, template.deployment, "overlap")
    decode = replace(
        template, work=work, duration_us=sum(COEFFICIENTS[name] * columns[name] for name in COEFFICIENTS)
    )
    suggestions = diagnose(fit_model([decode], QUICK), [decode], QUICK, max_runs=3).runs_to_add
    assert any("compute" in suggestion.coefficients for suggestion in suggestions)
    assert all(suggestion.model == "qwen2.5-7b" and suggestion.reason for suggestion in suggestions)
    assert len({(s.prompt_tokens, s.output_tokens, s.concurrency) for s in suggestions}) == len(suggestions)


@needs_data
def test_the_published_runs_predict_each_other_within_the_errors_that_the_manual_states():
    runs = read_step_table(DATA / "steps/vllm-h100-steps.csv", TableDefaults(hardware="h100-sxm"))
    overlap, original, roofline = (evaluation.whole for evaluation in compare_structures(runs, FitOptions()))
    assert overlap.mape_frac < 0.05
    assert abs(overlap.bias_frac) < 0.03
    assert 0.85 <= overlap.coverage_frac <= 0.95
    assert overlap.mape_frac < 0.3 * original.mape_frac
    assert original.mape_frac < roofline.mape_frac
    assert judge(fit_model(runs), runs).whole.mape_frac < 0.025


def test_intervals_are_as_wide_as_steps_of_such_a_batch_scatter():
    """Times scatter by 1 %, and by 8 % above 80 sequences."""
    runs = []
    for seed in (0, 7):
        quiet = planted_run(*MODELS[0], COEFFICIENTS, seed=seed, noise=0.01, num_steps=900)
        noisy = planted_run(*MODELS[0], COEFFICIENTS, seed=seed, noise=0.08, num_steps=900)
        is_large = np.asarray(quiet.work.num_seqs) > 80
        runs.append(replace(quiet, duration_us=np.where(is_large, noisy.duration_us, quiet.duration_us)))
    predictions = judge(fit_model(runs[:1], QUICK), runs[1:]).predictions
    assert predictions.is_covered[is_large].mean() >= 0.84
    assert predictions.is_covered[~is_large].mean() >= 0.9
    widths = predictions.high_us / predictions.low_us - 1
    assert widths[~is_large].mean() < widths[is_large].mean() / 3


def test_intervals_grow_with_the_distance_from_the_steps_of_the_fit():
    run = planted_run(*MODELS[0], COEFFICIENTS, noise=0.01, num_steps=900)
    bent = replace(run, duration_us=run.duration_us * np.asarray(run.work.num_seqs) ** 0.1)
    is_small = np.asarray(run.work.num_seqs) <= 60
    model = fit_model([select_steps(bent, np.flatnonzero(is_small))], QUICK)
    predictions = judge(model, [select_steps(bent, np.flatnonzero(~is_small))]).predictions
    assert predictions.is_covered.mean() >= 0.85
    widths = predictions.high_us / predictions.predicted_us
    order = np.argsort(np.asarray(predictions.runs[0].work.num_seqs))
    assert widths[order[-20:]].mean() > widths[order[:20]].mean() + 0.02
