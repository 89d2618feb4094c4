"""Hold-outs by run and model, the buckets of errors, diagnosis, and the published steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.datasets import DATA, needs_data
from support.step_time import MODELS, planted_run, planted_runs

from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.steptime.design import select_steps
from benchctl.steptime.diagnose import diagnose
from benchctl.steptime.evaluate import bin_labels, buckets, compare_structures, hold_out, judge
from benchctl.steptime.features import features
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.work import ObservedSteps, StepWork

PLANTED = {"compute": 1.6, "memory": 1.2, "all_reduce": 1.2, "layers": 50.0, "requests": 12.0, "steps": 120.0}
QUICK = FitOptions(num_draws=30)


def test_each_run_is_predicted_by_a_fit_that_did_not_see_it() -> None:
    runs = planted_runs(PLANTED, noise=0.02)
    poisoned = planted_run(
        "qwen2.5-7b", 1, {name: 3 * value for name, value in PLANTED.items()}, seed=50, run="slow"
    )
    evaluation = hold_out([*runs, poisoned], QUICK)
    slow = next(group for group in evaluation.groups if group.label == "slow")
    assert slow.bias_frac < -0.4
    assert len(evaluation.groups) == 6
    assert evaluation.whole.num_steps == sum(group.num_steps for group in evaluation.groups)


def test_held_out_errors_and_coverage_are_those_of_the_noise() -> None:
    runs = [planted_run("qwen2.5-14b", 2, PLANTED, noise=0.03, seed=i) for i in range(5)]
    evaluation = hold_out(runs, QUICK)
    assert evaluation.whole.mape_frac == pytest.approx(0.03 * np.sqrt(2 / np.pi), rel=0.3)
    assert abs(evaluation.whole.bias_frac) < 0.01
    assert 0.85 <= evaluation.whole.coverage_frac <= 0.95


def test_one_group_leaves_nothing_to_fit_to() -> None:
    runs = [planted_run("qwen2.5-7b", 1, PLANTED, seed=i) for i in range(2)]
    assert len(hold_out(runs, QUICK, "run").groups) == 2
    with pytest.raises(UsageError, match=r"only one model \(qwen2.5-7b\).*add steps of another model"):
        hold_out(runs, QUICK, "model")


def test_other_structures_are_judged_on_the_same_groups() -> None:
    evaluations = compare_structures(planted_runs(PLANTED, noise=0.02), QUICK)
    assert [evaluation.structure for evaluation in evaluations] == ["overlap", "original", "roofline"]
    assert evaluations[0].whole.mape_frac < evaluations[1].whole.mape_frac < evaluations[2].whole.mape_frac


def test_a_model_is_judged_on_its_own_kind_of_device_only() -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED)
    model = fit_model([run], QUICK)
    assert judge(model, [run]).whole.mape_frac < 1e-3
    with pytest.raises(UsageError, match="of h100-sxm and the deployment of a100-sxm"):
        judge(model, [planted_run("qwen2.5-7b", 1, PLANTED, hardware="a100-sxm")])


def test_buckets_divide_all_steps_and_find_the_bad_part() -> None:
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


def test_bins_are_named_by_their_edges() -> None:
    assert bin_labels(np.array([0.0, 1.0, 3.0, 4.0, 9.0]), (1, 4, 8)).tolist() == [
        "< 1",
        "1 to 3",
        "1 to 3",
        "4 to 7",
        ">= 8",
    ]


def test_a_diagnosis_names_what_is_wrong_and_a_run_that_helps() -> None:
    observed = [planted_run("qwen2.5-7b", 1, PLANTED, noise=0.02)]
    diagnosis = diagnose(fit_model(observed, QUICK), observed, QUICK)
    assert {check.where for check in diagnosis.checks if check.code == "not-identified"} >= {"layers", "steps"}
    wrong = planted_run("qwen2.5-7b", 1, PLANTED | {"memory": 9.0}, noise=0.02)
    far = diagnose(fit_model([wrong], QUICK), [wrong], QUICK)
    assert any(check.code == "far-above-peak" and check.where == "memory" for check in far.checks)
    assert not far.is_finished


def test_the_runs_to_add_have_what_the_measured_steps_lack() -> None:
    """Decoding at one context leaves arithmetic and contexts open."""
    batch = np.repeat(np.array([1.0, 8.0, 32.0, 64.0]), 25)
    work = StepWork(
        num_decodes=batch,
        decode_tokens=batch,
        decode_context=batch * 512 + np.tile(np.arange(25.0), 4),
        decode_positions=batch * 512.5,
        num_sampled=batch,
    )
    template = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=100)
    columns = features(work, template.deployment, "overlap")
    decode = replace(template, work=work, duration_us=sum(PLANTED[name] * columns[name] for name in PLANTED))
    suggestions = diagnose(fit_model([decode], QUICK), [decode], QUICK, max_runs=3).runs_to_add
    assert suggestions
    assert any("compute" in suggestion.coefficients for suggestion in suggestions)
    assert all(suggestion.model == "qwen2.5-7b" and suggestion.reason for suggestion in suggestions)
    assert len({(s.prompt_tokens, s.output_tokens, s.concurrency) for s in suggestions}) == len(suggestions)


@needs_data
def test_the_published_runs_predict_each_other_within_the_errors_that_the_manual_states() -> None:
    runs = read_step_table(Path(DATA / "steps/vllm-h100-steps.csv"), TableDefaults(hardware="h100-sxm"))
    overlap, original, roofline = compare_structures(runs, FitOptions())
    assert overlap.whole.mape_frac < 0.05
    assert abs(overlap.whole.bias_frac) < 0.03
    assert 0.85 <= overlap.whole.coverage_frac <= 0.95
    assert overlap.whole.mape_frac < 0.3 * original.whole.mape_frac
    assert original.whole.mape_frac < roofline.whole.mape_frac
    fitted = judge(fit_model(runs), runs).whole
    assert fitted.mape_frac < 0.025


@needs_data
@pytest.mark.parametrize("most", [48, 64, 96])
def test_intervals_hold_nearly_nine_of_ten_published_steps_of_batches_above_those_of_the_fit(most: int) -> None:
    runs = read_step_table(Path(DATA / "steps/vllm-h100-steps.csv"), TableDefaults(hardware="h100-sxm"))
    below, above = (
        [select_steps(run, np.flatnonzero((run.work.num_seqs < most) == is_below)) for run in runs]
        for is_below in (True, False)
    )
    whole = judge(fit_model(below), [run for run in above if len(run.duration_us)]).whole
    assert whole.num_steps > 40
    assert whole.coverage_frac >= 0.87


def scattered(seed: int) -> ObservedSteps:
    """A run whose times scatter by 1 %, and by 8 % above 80 sequences."""
    quiet, noisy = (
        planted_run(*MODELS[0], PLANTED, seed=seed, noise=noise, num_steps=900) for noise in (0.01, 0.08)
    )
    is_large = np.asarray(quiet.work.num_seqs) > 80
    return replace(quiet, duration_us=np.where(is_large, noisy.duration_us, quiet.duration_us))


def test_intervals_are_as_wide_as_steps_of_such_a_batch_scatter() -> None:
    unseen = scattered(7)
    predictions = judge(fit_model([scattered(0)], QUICK), [unseen]).predictions
    is_large = np.asarray(unseen.work.num_seqs) > 80
    assert predictions.is_covered[is_large].mean() >= 0.84
    assert predictions.is_covered[~is_large].mean() >= 0.9
    widths = predictions.high_us / predictions.low_us - 1
    assert widths[~is_large].mean() < widths[is_large].mean() / 3


def test_intervals_grow_with_the_distance_from_the_steps_of_the_fit() -> None:
    run = planted_run(*MODELS[0], PLANTED, noise=0.01, num_steps=900)
    bent = replace(run, duration_us=run.duration_us * np.asarray(run.work.num_seqs) ** 0.1)
    is_small = np.asarray(run.work.num_seqs) <= 60
    model = fit_model([select_steps(bent, np.flatnonzero(is_small))], QUICK)
    predictions = judge(model, [select_steps(bent, np.flatnonzero(~is_small))]).predictions
    assert predictions.is_covered.mean() >= 0.85
    widths = predictions.high_us / predictions.predicted_us
    order = np.argsort(np.asarray(predictions.runs[0].work.num_seqs))
    assert widths[order[-20:]].mean() > widths[order[:20]].mean() + 0.02


def test_many_runs_are_left_out_a_twentieth_at_a_time_and_all_are_judged() -> None:
    runs = [planted_run("qwen2.5-7b", 1, PLANTED, noise=0.02, seed=i, num_steps=40) for i in range(45)]
    evaluation = hold_out(runs, FitOptions(num_draws=5))
    assert len(evaluation.groups) == 45
    assert evaluation.whole.num_steps == 45 * 40
    assert evaluation.whole.mape_frac < 0.03
