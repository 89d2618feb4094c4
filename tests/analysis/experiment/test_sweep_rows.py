"""Cells against the baseline of their own block: ratios, intervals, and the share that FLOPs do not explain."""

import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.summary import LENVM_SWEEP_COLUMNS, SWEEP_COLUMNS, RunSummary, unexplained_frac
from benchctl.analysis.statistics.estimate import estimate_paired

NOISY = ({"baseline": 0.8, "guided": 1.0}, {"baseline": 1.0, "guided": 1.1}, {"baseline": 1.5, "guided": 1.2})
PUBLISHED = [
    "k",
    "results_dir",
    "base_wall_s",
    "lvm_wall_s",
    "wall_ratio",
    "base_tok_per_s",
    "lvm_tok_per_s",
    "tok_per_s_ratio",
    "base_pflops",
    "lvm_pflops",
    "flops_ratio",
    "base_achieved_tflops_per_s",
    "lvm_achieved_tflops_per_s",
    "achieved_tflops_ratio",
    "lvm_apply_ms_mean",
    "lvm_forward_ms_mean",
    "lvm_build_pending_ms_mean",
    "lvm_apply_guidance_ms_mean",
    "utilization_gap",
]


def sweep(path):
    return analyze_directory(path).sweep


def test_the_published_columns_come_first():
    assert list(LENVM_SWEEP_COLUMNS) == PUBLISHED
    assert SWEEP_COLUMNS[: len(PUBLISHED)] == LENVM_SWEEP_COLUMNS


def test_ratios_are_geometric_means_of_the_ratios_within_blocks(tmp_path):
    builders.write_results(tmp_path, block_factors=NOISY)
    (row,) = sweep(tmp_path)
    ratios = [1.55 * block["guided"] / block["baseline"] for block in NOISY]
    expected = estimate_paired([math.log(ratio) for ratio in ratios])
    assert row.number("wall_ratio") == pytest.approx(statistics.geometric_mean(ratios))
    assert row.number("wall_ratio_ci_low") == pytest.approx(expected.ci_low)
    assert row.number("wall_ratio_ci_high") == pytest.approx(expected.ci_high)
    assert row.number("step_ms_ratio") == pytest.approx(row.number("wall_ratio"))
    assert row.number("num_steps_ratio") == 1.0
    assert row.values["n_blocks"] == 3
    assert row.values["k"] == 5
    assert row.values["results_dir"] == str(tmp_path)
    assert row.label == "guided top_k=5"


def test_each_ratio_is_the_quotient_of_its_two_columns(tmp_path):
    builders.write_results(tmp_path, block_factors=NOISY)
    (row,) = sweep(tmp_path)
    for ratio, base, other in (
        ("wall_ratio", "base_wall_s", "lvm_wall_s"),
        ("tok_per_s_ratio", "base_tok_per_s", "lvm_tok_per_s"),
        ("flops_ratio", "base_pflops", "lvm_pflops"),
        ("achieved_tflops_ratio", "base_achieved_tflops_per_s", "lvm_achieved_tflops_per_s"),
        ("utilization_gap", "flops_ratio", "wall_ratio"),
    ):
        assert row.number(ratio) == pytest.approx(row.number(other) / row.number(base))
    assert row.number("wall_ratio") * row.number("achieved_tflops_ratio") == pytest.approx(
        row.number("flops_ratio")
    )


def test_flops_that_are_equal_in_all_blocks_stay_exact(tmp_path):
    builders.write_results(tmp_path, block_factors=NOISY)
    experiment = load_experiment(tmp_path)
    first = RunSummary(experiment.results.runs[0], experiment)
    assert sweep(tmp_path)[0].values["base_pflops"] == first.values["theoretical_pflops_total"]


def test_a_block_without_a_usable_baseline_takes_no_part(tmp_path):
    results = builders.write_results(tmp_path, block_factors=NOISY)
    first = results.runs()[0]
    first.write(msgspec.structs.replace(first.read(), state="failed"))
    (row,) = sweep(tmp_path)
    assert row.pair.blocks == (1, 2)
    assert row.number("wall_ratio") == pytest.approx(1.55 * math.sqrt(1.1 * 1.2 / 1.5))


def test_without_any_usable_baseline_there_is_no_row(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs()[::2]:
        run.write(msgspec.structs.replace(run.read(), state="failed"))
    assert sweep(tmp_path) == ()


def test_one_block_has_a_ratio_and_no_interval(tmp_path):
    builders.write_results(tmp_path, block_factors=({"baseline": 1.0, "guided": 1.0},))
    (row,) = sweep(tmp_path)
    assert row.number("wall_ratio") == pytest.approx(1.55)
    assert row.values["wall_ratio_ci_low"] is row.values["wall_ratio_ci_high"] is None
    assert row.number("unexplained_frac") is not None


def test_what_a_run_does_not_record_stays_unknown(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs():
        (run.path / "requests.jsonl").unlink()
        run.write(
            msgspec.structs.replace(run.read(), times=msgspec.structs.replace(run.read().times, last_token_ns=None))
        )
    (row,) = sweep(tmp_path)
    for column in ("wall_ratio", "base_wall_s", "flops_ratio", "utilization_gap", "unexplained_frac"):
        assert row.values[column] is None
    assert row.number("step_ms_ratio") == pytest.approx(1.55)
    assert row.number("lvm_forward_ms_mean") == pytest.approx(4.0)


def test_rows_are_ordered_by_factor_and_hold_the_sections_where_they_run(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": 5}, {"top_k": 1}, {"top_k": 3}])
    rows = sweep(tmp_path)
    assert [row.values["k"] for row in rows] == [1, 3, 5]
    assert [row.number("lvm_apply_ms_mean") for row in rows] == [None, pytest.approx(5.5), pytest.approx(5.5)]
    assert rows[0].number("flops_ratio") > 1.0
    assert rows[0].number("flops_ratio_observed") == 1.0
    assert rows[0].values["unexplained_frac"] is None  # greedy steps take the baseline's time: no slowdown


def test_a_slowdown_whose_interval_reaches_one_is_not_divided():
    wide = estimate_paired([math.log(0.5), math.log(3.0)])
    assert wide.ratio > 1.2
    assert unexplained_frac(wide, 1.1) is None
    assert unexplained_frac(None, 1.1) is None
    assert unexplained_frac(estimate_paired([math.log(1.01)] * 3), 1.0) is None


@given(st.floats(1.05, 100), st.floats(0.5, 100))
def test_explained_and_unexplained_logarithms_add_up_to_the_slowdown(wall_ratio, flops_ratio):
    share = unexplained_frac(estimate_paired([math.log(wall_ratio)]), flops_ratio)
    assert share is not None
    assert math.log(flops_ratio) + share * math.log(wall_ratio) == pytest.approx(math.log(wall_ratio), abs=1e-9)


def test_the_published_experiment_leaves_half_of_its_slowdown_unexplained():
    share = unexplained_frac(estimate_paired([math.log(87.44 / 19.22)]), 2.1043)
    assert share == pytest.approx(0.509, abs=0.001)
