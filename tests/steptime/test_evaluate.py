"""Hold-outs by run and model, the buckets of errors, diagnosis, and the published steps."""

from dataclasses import replace

import numpy as np
import pytest
from support.datasets import DATA, needs_data
from support.step_time import MODELS, decoding, planted_run, planted_runs

from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.steptime.design import select_steps
from benchctl.steptime.diagnose import diagnose
from benchctl.steptime.evaluate import buckets, compare_structures, hold_out, judge
from benchctl.steptime.features import features
from benchctl.steptime.fit import FitOptions, fit_model

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}
QUICK = FitOptions(num_draws=30)
PUBLISHED = DATA / "steps/vllm-h100-steps.csv"


def test_each_run_is_predicted_by_a_fit_that_did_not_see_it():
    tripled = {name: 3 * value for name, value in PLANTED.items()}
    poisoned = planted_run("qwen2.5-7b", 1, tripled, seed=50, run="slow")
    evaluation = hold_out([*planted_runs(PLANTED, noise=0.02), poisoned], QUICK)
    biases = {group.label: group.bias_frac for group in evaluation.groups}
    assert len(biases) == 6
    assert biases["slow"] < -0.4
    assert evaluation.whole.num_steps == sum(group.num_steps for group in evaluation.groups)


def test_held_out_errors_and_coverage_are_those_of_the_noise():
    runs = [planted_run("qwen2.5-14b", 2, PLANTED, noise=0.03, seed=i) for i in range(5)]
    evaluation = hold_out(runs, QUICK, "run")
    assert len(evaluation.groups) == 5
    assert evaluation.whole.mape_frac == pytest.approx(0.03 * np.sqrt(2 / np.pi), rel=0.3)
    assert abs(evaluation.whole.bias_frac) < 0.01
    assert 0.85 <= evaluation.whole.coverage_frac <= 0.95
    with pytest.raises(UsageError, match=r"only one model \(qwen2.5-14b\).*add steps of another model"):
        hold_out(runs, QUICK, "model")


def test_buckets_divide_all_steps_and_find_the_bad_part():
    run = planted_run(*MODELS[0], PLANTED, noise=0.01)
    is_large = np.asarray(run.work.num_seqs) >= 128
    bent = planted_run(*MODELS[0], PLANTED, noise=0.01)
    bent.duration_us[is_large] *= 1.5
    by_bucket = buckets(judge(fit_model([run], QUICK), [bent]).predictions)
    for group in by_bucket.values():
        assert sum(accuracy.num_steps for accuracy in group) == 300
    worst = max(by_bucket["batch"], key=lambda accuracy: accuracy.mape_frac)
    assert worst.label == "128 to 255"
    assert worst.mape_frac == pytest.approx(1 / 3, rel=0.05)


def test_a_diagnosis_names_what_is_wrong_and_a_run_that_helps():
    observed = [planted_run("qwen2.5-7b", 1, PLANTED, noise=0.02)]
    diagnosis = diagnose(fit_model(observed, QUICK), observed, QUICK)
    assert {check.where for check in diagnosis.checks if check.code == "not-identified"} >= {"layers", "steps"}
    wrong = planted_run("qwen2.5-7b", 1, PLANTED | {"memory": 9.0}, noise=0.02)
    far = diagnose(fit_model([wrong], QUICK), [wrong], QUICK)
    assert any(check.code == "far-above-peak" and check.where == "memory" for check in far.checks)
    assert not far.is_finished


def test_the_runs_to_add_have_what_the_measured_steps_lack():
    """Decoding at one context leaves arithmetic and contexts open."""
    work = decoding(np.repeat([1.0, 8.0, 32.0, 64.0], 25), 512 + np.tile(np.arange(25.0) / 64, 4))
    template = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=100)
    columns = features(work, template.deployment, "overlap")
    decode = replace(template, work=work, duration_us=sum(PLANTED[name] * columns[name] for name in PLANTED))
    suggestions = diagnose(fit_model([decode], QUICK), [decode], QUICK, max_runs=3).runs_to_add
    assert any("compute" in suggestion.coefficients for suggestion in suggestions)
    assert all(suggestion.model == "qwen2.5-7b" and suggestion.reason for suggestion in suggestions)
    assert len({(s.prompt_tokens, s.output_tokens, s.concurrency) for s in suggestions}) == len(suggestions)


@needs_data
def test_the_published_runs_predict_each_other_within_the_errors_that_the_manual_states():
    runs = read_step_table(PUBLISHED, TableDefaults(hardware="h100-sxm"))
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
        quiet = planted_run(*MODELS[0], PLANTED, seed=seed, noise=0.01, num_steps=900)
        noisy = planted_run(*MODELS[0], PLANTED, seed=seed, noise=0.08, num_steps=900)
        is_large = np.asarray(quiet.work.num_seqs) > 80
        runs.append(replace(quiet, duration_us=np.where(is_large, noisy.duration_us, quiet.duration_us)))
    predictions = judge(fit_model(runs[:1], QUICK), runs[1:]).predictions
    assert predictions.is_covered[is_large].mean() >= 0.84
    assert predictions.is_covered[~is_large].mean() >= 0.9
    widths = predictions.high_us / predictions.low_us - 1
    assert widths[~is_large].mean() < widths[is_large].mean() / 3


def test_intervals_grow_with_the_distance_from_the_steps_of_the_fit():
    run = planted_run(*MODELS[0], PLANTED, noise=0.01, num_steps=900)
    bent = replace(run, duration_us=run.duration_us * np.asarray(run.work.num_seqs) ** 0.1)
    is_small = np.asarray(run.work.num_seqs) <= 60
    model = fit_model([select_steps(bent, np.flatnonzero(is_small))], QUICK)
    predictions = judge(model, [select_steps(bent, np.flatnonzero(~is_small))]).predictions
    assert predictions.is_covered.mean() >= 0.85
    widths = predictions.high_us / predictions.predicted_us
    order = np.argsort(np.asarray(predictions.runs[0].work.num_seqs))
    assert widths[order[-20:]].mean() > widths[order[:20]].mean() + 0.02
