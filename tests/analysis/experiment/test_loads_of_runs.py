"""A run whose server got several loads, as it is read: the value of each metric, checks, exports, comparisons."""

import csv
import json
import math
import shutil
from dataclasses import replace
from statistics import fmean

import msgspec
import pytest
from support.cli import document, printed, refusal
from support.results.builders import edit_run
from support.results.comparing import assert_exact, compare
from support.results.planted import right, write_answers, wrong
from support.results.several import simulated

from benchctl.analysis.compare.accuracy import compare_divergence
from benchctl.analysis.compare.judge import grade, judge_named
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.metrics.loads import mean_metrics, mean_of_loads
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results


@pytest.fixture(name="experiment", scope="module")
def _experiment(tmp_path_factory):
    return simulated(tmp_path_factory.mktemp("simulated"))


def test_the_value_of_a_run_is_the_mean_of_the_logarithms_of_its_loads(experiment):
    for run in experiment.results.runs:
        loads, whole = experiment.load_metrics(run), experiment.metrics(run)
        assert len(loads) == 3
        for name in ("step_ms", "ttft_ms", "p50_ttft_ms", "wall_s", "output_throughput"):
            values = [load[name] for load in loads]
            assert len(set(values)) == 3, "noise goes on over the loads"
            assert math.log(whole[name]) == pytest.approx(sum(map(math.log, values)) / 3)
        assert whole["output_tokens"] == loads[0]["output_tokens"] == 12 * 16, "what is equal is not rounded"
        assert experiment.counted(run, "step_ms") == experiment.row(run)["step_ms"] == whole["step_ms"]


def test_percentiles_are_those_of_single_loads_and_never_of_pooled_requests(experiment):
    run = experiment.results.runs[0]
    assert experiment.metrics(run)["p99_ttft_ms"] is None, "36 requests are those of three loads of 12"
    assert len([each for each in run.requests if not each.is_warmup]) == 36


def test_checks_hold_load_by_load_and_name_the_load_that_fails(experiment):
    run = experiment.results.runs[0]
    assert {check.name: check.ok for check in experiment.checks(run)}["requests"] is True
    assert {check.name: check.ok for check in experiment.checks(run)}["step-tokens"] is True
    first, second, third = run.several
    broken = replace(run, several=(first, replace(second, requests=second.requests[1:]), third))
    fresh = replace(experiment, results=replace(experiment.results, runs=(broken,)), _derived={})
    fresh = type(experiment)(results=fresh.results, profile_or_none=experiment.profile_or_none)
    (check,) = (check for check in fresh.checks(broken) if check.name == "requests")
    assert (check.ok, check.detail.partition(":")[0]) == (False, "load 2")
    (contradiction,) = fresh.contradictions(broken)[:1]
    assert contradiction.message.startswith("load 2: check requests failed: ")


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
    """Six blocks, which are enough for a verdict."""
    return simulated(tmp_path_factory.mktemp("whole"), blocks=6)


def test_the_mean_over_loads_is_of_logarithms_of_counts_arithmetic_and_of_equal_values_themselves():
    assert mean_of_loads([2.0, 8.0]) == pytest.approx(4.0)
    assert mean_of_loads([2, 8], is_exact=True) == 5.0
    assert mean_of_loads([0.0, 3.0]) == 1.5
    assert (mean_of_loads([7, 7]), type(mean_of_loads([7, 7]))) == (7, int)
    assert (mean_of_loads([None, 3.0]), mean_of_loads([None]), mean_of_loads([])) == (3.0, None, None)


def test_a_run_has_metrics_of_steady_windows_where_each_of_its_loads_has_one():
    with_window, without = {"steady_step_ms": 10.0, "step_ms": 10.0}, {"steady_step_ms": None, "step_ms": 12.1}
    assert mean_metrics([with_window, with_window]) == with_window
    assert mean_metrics([with_window, without]) == {"steady_step_ms": None, "step_ms": pytest.approx(11.0)}


def test_show_compare_the_tables_and_the_json_have_one_number(whole):
    printed("report", whole.path)
    shown, compared = (
        document("show", whole.path),
        document("compare", f"{whole.path}:baseline", f"{whole.path}:narrow", code=1),
    )
    rows = {row["run_id"]: row for row in csv.DictReader((whole.path / "summary.csv").read_text().splitlines())}
    for name in ("step_ms", "wall_s", "ttft_ms"):
        logs = {"baseline": [], "narrow": []}
        for run in shown["runs"]:
            of_loads = [load[name] for load in run["loads"]]
            assert len(of_loads) == 3
            assert math.log(run[name]) == pytest.approx(fmean(map(math.log, of_loads)))
            assert float(rows[run["run_id"]][name]) == pytest.approx(run[name])
            logs[run["variant"]].append(run[name])
        (metric,) = (metric for metric in compared["metrics"] if metric["name"] == name)
        spread = {cell["variant"]: cell["columns"][name]["centre"] for cell in shown["cells"]}
        assert metric["ratio"] == pytest.approx(spread["narrow"] / spread["baseline"])
        assert metric["blocks"] == 6, "the block stays the unit"
        assert min(logs["baseline"]) <= spread["baseline"] <= max(logs["baseline"])
    assert "12 requests 3 times of synthetic" in printed("show", whole.path)
    assert "12 3 times of synthetic" in (whole.path / "report.html").read_text()


def test_the_parts_of_a_comparison_add_up_with_several_loads(whole):
    for cell in compare_arms_of(whole).cells:
        assert_exact(cell.decomposition)


def compare_arms_of(experiment, **options):
    return compare(f"{experiment.path}:baseline", f"{experiment.path}:narrow", **options)


def test_each_load_has_a_result_file_and_an_export_of_its_own(experiment, tmp_path):
    printed("report", experiment.path)
    printed("export", experiment.path, "--format", "vllm", "--output", tmp_path / "out")
    for run in experiment.results.runs:
        run_id, folder = run.record.run_id, experiment.path / "runs" / run.record.run_id
        for load, suffix in zip(run.loads, ("", "-2", "-3"), strict=True):
            own = experiment.metrics(load)
            for path in (
                folder / f"result{suffix}.json",
                tmp_path / "out" / run.record.variant / f"{run_id}{suffix}.json",
            ):
                result = json.loads(path.read_text())
                assert (result["num_prompts"], len(result["ttfts"]), result["completed"]) == (12, 12, 12)
                assert result["mean_ttft_ms"] == pytest.approx(own["ttft_ms"])
                assert result["duration"] == pytest.approx(own["wall_s"])
    printed("verify", experiment.path)


def test_answers_of_several_loads_are_all_graded_and_compared(tmp_path):
    def answers(variant, block, i, sample):
        return right(i) if block == 0 or i % 2 else wrong(i)

    results = load_results(write_answers(tmp_path / "r", answers, blocks=2).path)
    first, second = (run for run in results.runs if run.record.variant == "baseline")
    several = replace(first, several=(replace(first, load=1), replace(second, load=2)))
    grades = grade(results.requests, [several], judge_named("numeric"))
    assert grades.num_answers == 80
    assert {float(grades.share(question)) for question in grades.correct} == {1.0, 0.5}
    divergence = compare_divergence([several], [replace(first, several=several.several[::-1])])
    assert (divergence.b_against_a.num_pairs, divergence.b_against_a.num_identical) == (80, 40)


@pytest.mark.parametrize("gates", [[], ["failed-requests"]])
def test_failed_requests_of_a_load_that_is_left_out_make_a_comparison_incomplete_unless_a_gate_leaves_them_out(
    whole, tmp_path, gates
):
    path = tmp_path / "copy"
    shutil.copytree(whole.path, path)
    profile = (path / "profile.yaml").read_text()
    (path / "profile.yaml").write_text(profile.replace("gates: []", f"gates: {gates}"))
    experiment = load_experiment(path)
    assert list(experiment.profile.gates) == gates
    run = next(run for run in experiment.results.runs if run.record.variant == "narrow")
    loads = list(run.record.loads)
    loads[1] = msgspec.structs.replace(loads[1], state="suspect", num_completed=10, num_failed=2)
    edit_run(ResultDirectory(experiment.path), run.record.run_id, loads=tuple(loads))
    (cell,) = compare_arms_of(experiment, allow_altered=True).cells
    message = f"2 of 12 requests failed in load 2 of {run.record.run_id}, which is left out"
    assert (message in cell.failures) is (not gates)
    assert [load.load for load in load_experiment(experiment.path).results.runs[run.record.index].loads] == [1, 3]


def test_experiments_with_other_numbers_of_loads_are_compared_only_where_that_is_allowed(experiment, tmp_path):
    other = simulated(tmp_path, loads_per_server=2)
    words = ("compare", f"{experiment.path}:baseline", f"{other.path}:baseline")
    assert "loads_per_server" in refusal(*words, code=4)
    printed(*words, "--allow-difference", "loads_per_server", code=3)
