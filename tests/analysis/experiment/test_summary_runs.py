"""Runs as rows, cells as means over blocks, and cells against the baseline of their own block, of known truth."""

import csv
import io
import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import builders
from support.results.builders import GUIDED, ONE_BLOCK, edit_run, run_ids

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS
from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.analysis.experiment.summary import (
    LENVM_SWEEP_COLUMNS,
    SWEEP_COLUMNS,
    RunSummary,
    summarise_cells,
    unexplained_frac,
)
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.records.directory import arm_label, arm_order
from benchctl.records.loaded import load_results
from benchctl.report.table import csv_bytes


def runs_of(experiment):
    return tuple(RunSummary(run, experiment) for run in experiment.results.runs)


def summarise(results):
    return runs_of(load_experiment(results.path))


def cells_of(results):
    experiment = load_experiment(results.path)
    return summarise_cells(runs_of(experiment), experiment)


@pytest.fixture(name="results")
def _results(tmp_path):
    return builders.write_results(tmp_path)


def test_a_row_holds_what_the_run_is_known_to_have_done(results):
    assert len(set(SUMMARY_COLUMNS)) == len(SUMMARY_COLUMNS)
    assert set(METRICS) <= set(SUMMARY_COLUMNS)
    rows = summarise(results)
    expected = {
        "variant": "guided",
        "cell": "top_k=5",
        "wall_s": pytest.approx(8 * 15.5e-3),
        "output_throughput": pytest.approx(64 / (8 * 15.5e-3)),
        "output_tokens": 64,
        "prompt_tokens": 80,
        "num_requests": 4,
        "num_steps": 8,
        "n_steps_with_lvm": 8,
        "mean_batch_size": 8.0,
        "batch_size_p50": 8.0,
        "batch_size_p95": None,
        "e2el_ms": pytest.approx(8 * 15.5),
        "output_tokens_mean": 16.0,
        "t_lvm_forward_ms_mean": pytest.approx(4.0),
        "t_lvm_forward_ms_sum": pytest.approx(32.0),
        "t_lvm_forward_ms_count": 8,
        "t_pre_lvm_ms_mean": None,
        "top_k": 5,
        "value_scale": 0.0,
        "block": 0,
        "state": "done",
        "clock": "host",
        "ready_s": 1.0,
        "client_wall_s": pytest.approx(8 * 15.5e-3),
        "step_ms": pytest.approx(15.5),
        "tokens_per_step": 1.0,
    }
    assert {column: rows[1].values[column] for column in expected} == expected
    table = list(csv.DictReader(io.StringIO(csv_bytes(SUMMARY_COLUMNS, [run.values for run in rows]).decode())))
    assert len(table) == 6
    assert list(table[0]) == list(SUMMARY_COLUMNS)
    assert (table[0]["t_lvm_forward_ms_mean"], table[0]["num_failed"]) == ("", "0")
    assert float(table[1]["t_lvm_forward_ms_mean"]) == pytest.approx(4.0)


def test_flops_columns_follow_the_published_rule_and_observed_ones_the_step_log(results, tmp_path):
    baseline, guided = summarise(results)[:2]
    linear = 13_050_576_896 * (4 * 20 + 8 * 8) / 1e15  # prompts once for each question, then every output token
    assert guided.number("base_pflops_linear") == pytest.approx(linear)
    assert baseline.number("base_pflops_total") == guided.number("base_pflops_total")
    whole = guided.number("theoretical_pflops_total")
    assert whole == pytest.approx(guided.number("base_pflops_total") + guided.number("lvm_pflops_total"))
    assert guided.number("achieved_tflops_per_s") == pytest.approx(1e3 * whole / guided.number("wall_s"))
    assert baseline.number("lvm_pflops_total") == baseline.number("observed_lvm_pflops") == 0
    assert guided.number("observed_lvm_pflops") > 0
    parts = [guided.number(name) for name in ("observed_base_pflops", "observed_lvm_pflops")]
    assert guided.number("observed_pflops_total") == pytest.approx(sum(parts))
    greedy = summarise(builders.write_results(tmp_path / "greedy", cells=[{"top_k": 1}]))[1]
    assert greedy.number("lvm_pflops_total") > 0
    assert (greedy.values["n_steps_with_lvm"], greedy.values["observed_lvm_pflops"]) == (0, 0)


def test_what_a_log_does_not_hold_is_unknown(results):
    log = results.run(GUIDED).step_log
    builders.rewrite_lines(log, lambda step: {k: v for k, v in step.items() if k != "guided_rows"})
    assert summarise(results)[1].values["n_steps_with_lvm"] is None
    for name in ("steps.jsonl", "requests.jsonl"):
        (results.runs()[0].path / name).unlink()
    values = summarise(results)[0].values
    assert values["variant"] == "baseline"
    assert [values[name] for name in ("num_steps", "theoretical_pflops_total", "t_sample_ms_mean")] == [None] * 3


def test_a_profile_that_cannot_be_read_leaves_flops_unknown_and_says_why(results):
    results.write_profile("name: [")
    experiment = experiment_of(load_results(results.path))
    (warning,) = experiment.warnings
    assert warning.code == "profile-unreadable"
    assert "settings and FLOPs of the runs are unknown" in warning.message
    run = runs_of(experiment)[1]
    assert (run.settings, run.values["top_k"], run.values["theoretical_pflops_total"]) == (None, None, None)
    assert run.values["step_ms"] == pytest.approx(15.5)


def test_what_a_profile_does_not_know_or_allow_has_no_flops_and_no_settings(results, tmp_path):
    profile = results.profile_yaml()
    results.write_profile(profile.replace("model: qwen2.5-7b", "model: nonesuch"))
    run = summarise(results)[0]
    assert run.flops.published is None
    assert [warning.code for warning in run.warnings] == ["model-shape-unknown"]
    assert "no FLOPs: unknown model 'nonesuch'" in run.warnings[0].message
    results.write_profile(profile.replace("  guided:\n", "  renamed:\n"))
    assert summarise(results)[1].settings is None
    for factor, value in (("no_such_factor", 1), ("top_k", -1)):
        assert summarise(builders.write_results(tmp_path / factor, cells=[{factor: value}]))[1].settings is None


NOISY = ({"baseline": 0.8, "guided": 1.0}, {"baseline": 1.0, "guided": 1.1}, {"baseline": 1.5, "guided": 1.2})


def test_cells_are_geometric_means_over_blocks_with_sample_deviation(tmp_path):
    baseline, guided = cells_of(builders.write_results(tmp_path / "r", block_factors=NOISY))
    walls = [0.08 * factor["baseline"] for factor in NOISY]
    spread = baseline.spreads["wall_s"]
    assert (baseline.label, guided.label) == ("baseline", "guided top_k=5")
    assert spread.centre == baseline.centre("wall_s") == pytest.approx(statistics.geometric_mean(walls))
    assert spread.sd == pytest.approx(statistics.stdev(walls))
    assert spread.scatter_frac == pytest.approx(statistics.stdev(map(math.log, walls)))
    assert spread.n == 3
    assert baseline.centre("t_lvm_forward_ms_mean") is None
    assert "block" not in baseline.spreads
    assert guided.spreads["num_failed"].scatter_frac is None  # a mean of zero has no relative scatter
    one = cells_of(builders.write_results(tmp_path / "one", block_factors=ONE_BLOCK))[0].spreads["step_ms"]
    assert (one.n, one.sd, one.scatter_frac) == (1, None, None)


def test_runs_that_failed_or_are_damaged_stay_rows_and_leave_the_means(results):
    failed, damaged = run_ids(results, "baseline")[:2]
    edit_run(results, failed, state="failed")
    with results.run(damaged).step_log.open("ab") as file:
        file.write(b'{"step": 9')
    assert [run.is_usable for run in summarise(results)] == [False, True, False, True, True, True]
    baseline = cells_of(results)[0]
    assert (len(baseline.runs), baseline.num_unusable, baseline.spreads["step_ms"].n) == (1, 2, 1)


def test_cells_come_in_the_order_of_baseline_variant_and_factor_value(tmp_path):
    models = ("b-1000", "b-500", "b-1.5", "a")
    cells = [{"top_k": 10}, {"top_k": 2}, *({"value_model": model} for model in models)]
    labels = [cell.label for cell in cells_of(builders.write_results(tmp_path, cells=cells))]
    values = (
        "top_k=2",
        "top_k=10",
        "value_model=a",
        "value_model=b-1.5",
        "value_model=b-500",
        "value_model=b-1000",
    )
    assert labels == ["baseline", *(f"guided {value}" for value in values)]
    names = ["cache-1000", "cache-500", "none"]
    assert sorted(names, key=lambda name: arm_order(name, {}, "none")) == ["none", "cache-500", "cache-1000"]
    assert arm_label("idle", {}) == "idle"


PUBLISHED = (
    "k", "results_dir", "base_wall_s", "lvm_wall_s", "wall_ratio", "base_tok_per_s", "lvm_tok_per_s",
    "tok_per_s_ratio", "base_pflops", "lvm_pflops", "flops_ratio", "base_achieved_tflops_per_s",
    "lvm_achieved_tflops_per_s", "achieved_tflops_ratio", "lvm_apply_ms_mean", "lvm_forward_ms_mean",
    "lvm_build_pending_ms_mean", "lvm_apply_guidance_ms_mean", "utilization_gap",
)  # fmt: skip


def sweep(results):
    return analyze_directory(results.path).sweep


def test_ratios_are_geometric_means_of_the_ratios_within_blocks_and_quotients_of_their_columns(tmp_path):
    assert tuple(LENVM_SWEEP_COLUMNS) == tuple(SWEEP_COLUMNS[: len(PUBLISHED)]) == PUBLISHED
    results = builders.write_results(tmp_path, block_factors=NOISY)
    (row,) = sweep(results)
    ratios = [1.55 * block["guided"] / block["baseline"] for block in NOISY]
    expected = estimate_paired([math.log(ratio) for ratio in ratios])
    wall = row.number("wall_ratio")
    assert wall == pytest.approx(statistics.geometric_mean(ratios))
    assert row.number("wall_ratio_ci_low") == pytest.approx(expected.ci_low)
    assert row.number("wall_ratio_ci_high") == pytest.approx(expected.ci_high)
    assert (row.number("step_ms_ratio"), row.number("num_steps_ratio")) == (pytest.approx(wall), 1.0)
    assert (row.values["n_blocks"], row.values["k"], row.label) == (3, 5, "guided top_k=5")
    assert row.values["results_dir"] == str(tmp_path)
    for ratio, base, other in (
        ("wall_ratio", "base_wall_s", "lvm_wall_s"),
        ("tok_per_s_ratio", "base_tok_per_s", "lvm_tok_per_s"),
        ("flops_ratio", "base_pflops", "lvm_pflops"),
        ("achieved_tflops_ratio", "base_achieved_tflops_per_s", "lvm_achieved_tflops_per_s"),
        ("utilization_gap", "flops_ratio", "wall_ratio"),
    ):
        assert row.number(ratio) == pytest.approx(row.number(other) / row.number(base))
    assert wall * row.number("achieved_tflops_ratio") == pytest.approx(row.number("flops_ratio"))
    assert row.values["base_pflops"] == summarise(results)[0].values["theoretical_pflops_total"], (
        "equal ones are exact"
    )


def test_a_block_without_a_usable_baseline_takes_no_part(tmp_path):
    results = builders.write_results(tmp_path, block_factors=NOISY)
    first, *others = run_ids(results, "baseline")
    edit_run(results, first, state="failed")
    (row,) = sweep(results)
    assert row.pair.blocks == (1, 2)
    assert row.number("wall_ratio") == pytest.approx(1.55 * math.sqrt(1.1 * 1.2 / 1.5))
    edit_run(results, others[0], state="failed")
    (row,) = sweep(results)
    assert row.number("wall_ratio") == pytest.approx(1.55 * 1.2 / 1.5)
    assert row.values["wall_ratio_ci_low"] is row.values["wall_ratio_ci_high"] is None
    edit_run(results, others[1], state="failed")
    assert sweep(results) == ()


def test_what_a_run_does_not_record_stays_unknown(results):
    for run in results.runs():
        (run.path / "requests.jsonl").unlink()
        edit_run(results, run.path.name, times=msgspec.structs.replace(run.read().times, last_token_ns=None))
    (row,) = sweep(results)
    unknown = ("wall_ratio", "base_wall_s", "flops_ratio", "utilization_gap", "unexplained_frac")
    assert [row.values[column] for column in unknown] == [None] * 5
    assert row.number("step_ms_ratio") == pytest.approx(1.55)
    assert row.number("lvm_forward_ms_mean") == pytest.approx(4.0)


def test_rows_are_ordered_by_factor_and_hold_the_sections_where_they_run(tmp_path):
    rows = sweep(builders.write_results(tmp_path, cells=[{"top_k": 5}, {"top_k": 1}, {"top_k": 3}]))
    assert [row.values["k"] for row in rows] == [1, 3, 5]
    assert [row.number("lvm_apply_ms_mean") for row in rows] == [None, pytest.approx(5.5), pytest.approx(5.5)]
    assert rows[0].number("flops_ratio") > 1.0
    assert rows[0].number("flops_ratio_observed") == 1.0
    assert rows[0].values["unexplained_frac"] is None  # greedy steps take the baseline's time: no slowdown
    assert rows[1].number("unexplained_frac") is not None


@given(st.floats(1.05, 100), st.floats(0.5, 100))
def test_explained_and_unexplained_logarithms_add_up_to_the_slowdown(wall_ratio, flops_ratio):
    share = unexplained_frac(estimate_paired([math.log(wall_ratio)]), flops_ratio)
    assert math.log(flops_ratio) + share * math.log(wall_ratio) == pytest.approx(math.log(wall_ratio), abs=1e-9)


def test_the_published_experiment_leaves_half_of_its_slowdown_unexplained_and_scatter_is_not_divided():
    share = unexplained_frac(estimate_paired([math.log(87.44 / 19.22)]), 2.1043)
    assert share == pytest.approx(0.509, abs=0.001)
    wide = estimate_paired([math.log(0.5), math.log(3.0)])
    assert wide.ratio > 1.2
    assert unexplained_frac(wide, 1.1) is unexplained_frac(None, 1.1) is None
    assert unexplained_frac(estimate_paired([math.log(1.01)] * 3), 1.0) is None
