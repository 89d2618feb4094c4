"""Runs as rows and cells as means over blocks, on results whose truth is known."""

import csv
import io
import math
import statistics

import msgspec
import pytest
from support.results import builders

from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS
from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.analysis.experiment.summary import RunSummary, summarise_cells
from benchctl.analysis.metrics.table import METRICS
from benchctl.records.directory import arm_label, arm_order
from benchctl.records.loaded import load_results
from benchctl.report.table import csv_bytes


def runs_of(experiment):
    return tuple(RunSummary(run, experiment) for run in experiment.results.runs)


def summarise(path):
    return runs_of(load_experiment(path))


def cells_of(path):
    experiment = load_experiment(path)
    return summarise_cells(runs_of(experiment), experiment)


def test_each_quantity_has_one_column_and_every_metric_is_one():
    assert len(set(SUMMARY_COLUMNS)) == len(SUMMARY_COLUMNS)
    assert set(METRICS) <= set(SUMMARY_COLUMNS)


def test_a_row_holds_what_the_run_is_known_to_have_done(tmp_path):
    builders.write_results(tmp_path, num_requests=4, output_tokens=8, n=2)
    guided = next(run for run in summarise(tmp_path) if run.record.variant == "guided")
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
    assert {column: guided.values[column] for column in expected} == expected


def test_flops_columns_follow_the_published_rule_and_observed_ones_the_step_log(tmp_path):
    builders.write_results(tmp_path, num_requests=4, output_tokens=8, n=2)
    baseline, guided = summarise(tmp_path)[:2]
    linear = 13_050_576_896 * (4 * 20 + 8 * 8) / 1e15  # prompts once for each question, then every output token
    assert guided.number("base_pflops_linear") == pytest.approx(linear)
    assert baseline.number("base_pflops_total") == guided.number("base_pflops_total")
    assert guided.number("theoretical_pflops_total") == pytest.approx(
        guided.number("base_pflops_total") + guided.number("lvm_pflops_total")
    )
    assert guided.number("achieved_tflops_per_s") == pytest.approx(
        1e3 * guided.number("theoretical_pflops_total") / guided.number("wall_s")
    )
    assert baseline.number("lvm_pflops_total") == baseline.number("observed_lvm_pflops") == 0
    assert guided.number("observed_lvm_pflops") > 0
    assert guided.number("observed_pflops_total") == pytest.approx(
        guided.number("observed_base_pflops") + guided.number("observed_lvm_pflops")
    )


def test_a_greedy_run_is_charged_by_the_published_rule_and_by_no_observation(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": 1}])
    greedy = next(run for run in summarise(tmp_path) if run.record.variant == "guided")
    assert greedy.values["n_steps_with_lvm"] == 0
    assert greedy.number("lvm_pflops_total") > 0
    assert greedy.values["observed_lvm_pflops"] == 0


def test_guided_steps_are_unknown_when_the_log_does_not_count_guided_rows(tmp_path):
    results = builders.write_results(tmp_path)
    builders.rewrite_lines(
        results.runs()[1].path / "steps.jsonl", lambda step: {k: v for k, v in step.items() if k != "guided_rows"}
    )
    assert summarise(tmp_path)[1].values["n_steps_with_lvm"] is None


def test_a_run_without_steps_and_answers_has_a_row_of_unknowns(tmp_path):
    results = builders.write_results(tmp_path)
    for name in ("steps.jsonl", "requests.jsonl"):
        (results.runs()[0].path / name).unlink()
    run = summarise(tmp_path)[0]
    known = {column for column, value in run.values.items() if value is not None}
    assert run.values["num_steps"] is None
    assert run.values["theoretical_pflops_total"] is None
    assert "variant" in known
    assert "t_sample_ms_mean" not in known


def test_a_profile_that_cannot_be_read_leaves_flops_unknown_and_says_why(tmp_path):
    builders.write_results(tmp_path)
    (tmp_path / "profile.yaml").write_text("name: [")
    results = load_results(tmp_path)
    experiment = experiment_of(results)
    assert [warning.code for warning in experiment.warnings] == ["profile-unreadable"]
    assert "settings and FLOPs of the runs are unknown" in experiment.warnings[0].message
    run = runs_of(experiment)[1]
    assert run.settings is None
    assert run.values["top_k"] is run.values["theoretical_pflops_total"] is None
    assert run.values["step_ms"] == pytest.approx(15.5)


def test_a_model_of_unknown_shape_leaves_flops_unknown_and_says_why(tmp_path):
    builders.write_results(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text(profile.read_text().replace("model: qwen2.5-7b", "model: nonesuch"))
    run = summarise(tmp_path)[0]
    assert run.flops is not None
    assert run.flops.published is None
    assert [warning.code for warning in run.warnings] == ["model-shape-unknown"]
    assert "no FLOPs: unknown model 'nonesuch'" in run.warnings[0].message


@pytest.mark.parametrize("cell", [{"no_such_factor": 1}, {"top_k": -1}])
def test_settings_are_unknown_for_a_cell_that_the_profile_does_not_allow(tmp_path, cell):
    builders.write_results(tmp_path, cells=[cell])
    assert summarise(tmp_path)[1].settings is None


def test_settings_are_unknown_for_a_variant_that_the_profile_does_not_have(tmp_path):
    builders.write_results(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text(profile.read_text().replace("  guided:\n", "  renamed:\n"))
    assert summarise(tmp_path)[1].settings is None


def test_cells_are_geometric_means_over_blocks_with_sample_deviation(tmp_path):
    factors = ({"baseline": 0.8, "guided": 1.0}, {"baseline": 1.0, "guided": 1.1}, {"baseline": 1.5, "guided": 1.2})
    builders.write_results(tmp_path, block_factors=factors)
    baseline, guided = cells_of(tmp_path)
    walls = [0.08 * factor["baseline"] for factor in factors]
    spread = baseline.spreads["wall_s"]
    assert (baseline.label, guided.label) == ("baseline", "guided top_k=5")
    assert spread.centre == pytest.approx(statistics.geometric_mean(walls))
    assert spread.sd == pytest.approx(statistics.stdev(walls))
    assert spread.scatter_frac == pytest.approx(statistics.stdev(map(math.log, walls)))
    assert spread.n == 3
    assert baseline.centre("wall_s") == spread.centre
    assert baseline.centre("t_lvm_forward_ms_mean") is None
    assert "block" not in baseline.spreads
    assert guided.spreads["num_failed"].scatter_frac is None  # a mean of zero has no relative scatter


def test_one_block_has_a_mean_and_no_scatter(tmp_path):
    builders.write_results(tmp_path, block_factors=({"baseline": 1.0, "guided": 1.0},))
    spread = cells_of(tmp_path)[0].spreads["step_ms"]
    assert (spread.n, spread.sd, spread.scatter_frac) == (1, None, None)


def test_runs_that_failed_or_are_damaged_stay_rows_and_leave_the_means(tmp_path):
    results = builders.write_results(tmp_path)
    failed, damaged = results.runs()[0], results.runs()[2]
    failed.write(msgspec.structs.replace(failed.read(), state="failed"))
    with (damaged.path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 9')
    runs = summarise(tmp_path)
    baseline = cells_of(tmp_path)[0]
    assert len(runs) == 6
    assert [run.is_usable for run in runs] == [False, True, False, True, True, True]
    assert (len(baseline.runs), baseline.num_unusable) == (1, 2)
    assert baseline.spreads["step_ms"].n == 1


def test_cells_come_in_the_order_of_baseline_variant_and_factor_value(tmp_path):
    models = ("b-1000", "b-500", "b-1.5", "a")
    cells = [{"top_k": 10}, {"top_k": 2}, *({"value_model": model} for model in models)]
    builders.write_results(tmp_path, cells=cells)
    labels = [cell.label for cell in cells_of(tmp_path)]
    assert labels == [
        "baseline",
        "guided top_k=2",
        "guided top_k=10",
        "guided value_model=a",
        "guided value_model=b-1.5",
        "guided value_model=b-500",
        "guided value_model=b-1000",
    ]
    names = ["cache-1000", "cache-500", "none"]
    assert sorted(names, key=lambda name: arm_order(name, {}, "none")) == ["none", "cache-500", "cache-1000"]
    assert arm_label("idle", {}) == "idle"


def test_an_unknown_value_is_an_empty_cell_of_the_csv(tmp_path):
    builders.write_results(tmp_path)
    content = csv_bytes(SUMMARY_COLUMNS, [run.values for run in summarise(tmp_path)])
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert len(rows) == 6
    assert list(rows[0]) == list(SUMMARY_COLUMNS)
    assert rows[0]["t_lvm_forward_ms_mean"] == ""
    assert float(rows[1]["t_lvm_forward_ms_mean"]) == pytest.approx(4.0)
    assert rows[0]["num_failed"] == "0"
