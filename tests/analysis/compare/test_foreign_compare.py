"""``benchctl compare`` over result files of other tools, and one side of each."""

import json
import random
from pathlib import Path

import pytest
from support.results.builders import BASELINE, change_requests, write_results
from typer.testing import CliRunner

from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.foreign import compare_foreign, name_of_side, runs_of_side
from benchctl.cli.app import app
from benchctl.errors import NotComparableError, UsageError
from benchctl.records.record import RequestError

WRITTEN = Path(__file__).parents[2] / "interop" / "foreign"
VLLM = json.loads((WRITTEN / "vllm-0.json").read_text())


def repeats(directory, factor=1.0, count=4, *, seed=1, **changes):
    """Repeats of one load; latencies are ``factor`` times the written ones, give or take a part in a thousand."""
    directory.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    for index in range(count):
        here = factor * (1 + 0.001 * noise.uniform(-1, 1))
        scaled = {key: VLLM[key] * here for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms")}
        rates = {key: VLLM[key] / here for key in ("request_throughput", "output_throughput")}
        document = VLLM | scaled | rates | {"duration": VLLM["duration"] * here} | changes
        (directory / f"run-{changes.get('max_concurrency', 4)}-{index}.json").write_text(json.dumps(document))
    return directory


def call(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def document(*arguments):
    return json.loads(call(*arguments, "--json").stdout)


def codes(comparison):
    return {warning["code"] for warning in comparison["warnings"]}


def test_a_slower_side_is_a_regression_and_the_same_load_twice_equivalent_once_there_are_repeats(tmp_path):
    a, b = repeats(tmp_path / "a", count=6), repeats(tmp_path / "b", 1.1, count=6, seed=2)
    comparison = document(a, b)
    assert (comparison["verdict"], comparison["exit_code"], comparison["pairing"]) == ("regression", 1, "unpaired")
    tpot = next(metric for metric in comparison["metrics"] if metric["name"] == "tpot_ms")
    assert tpot["ci_low"] < 1.1 < tpot["ci_high"]
    assert (tpot["blocks"], tpot["role"], comparison["metrics"][0]["cell"]) == (6, "deciding", "max_concurrency=4")
    assert "foreign-results" in codes(comparison)
    assert document(a, repeats(tmp_path / "c", count=6, seed=2))["verdict"] == "equivalent"


def test_two_files_are_a_screening_and_say_so():
    result = call(WRITTEN / "vllm-0.json", WRITTEN / "vllm-1.json")
    assert result.exit_code == 3
    assert "a screening of 1 block gives no verdict" in result.stdout
    assert "at least 4 on each side are needed" in result.stdout


def test_settings_that_differ_are_refused_unless_declared(tmp_path):
    a, b = repeats(tmp_path / "a"), repeats(tmp_path / "b", num_prompts=13, completed=13, model_id="other")
    with pytest.raises(NotComparableError) as refused:
        compare_foreign(runs_of_side(str(a)), runs_of_side(str(b)), CompareOptions())
    assert refused.value.differences == ("model_id: qwen2.5-0.5b against other", "num_prompts: 12 against 13")
    comparison = document(a, b, "--allow-difference", "model_id", "--allow-difference", "num_prompts")
    assert [difference["key"] for difference in comparison["allowed_differences"]] == ["model_id", "num_prompts"]
    assert not any("must be equal" in reason for reason in comparison["reasons"])


def test_loads_are_compared_each_with_its_own(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for concurrency, factor in ((4, 1.0), (8, 1.3)):
        repeats(a, factor, max_concurrency=concurrency)
        repeats(b, factor, max_concurrency=concurrency, seed=2)
    repeats(b, 2.0, max_concurrency=16)
    comparison = document(a, b, "--threshold", "5%")
    assert [cell["cell"] for cell in comparison["cells"]] == ["max_concurrency=4", "max_concurrency=8"]
    assert next(w["message"] for w in comparison["warnings"] if w["code"] == "load-unmatched").endswith(
        "concurrency=16"
    )
    one, other = repeats(tmp_path / "one", count=6), repeats(tmp_path / "other", 1.5, count=6, max_concurrency=8)
    assert isinstance(call(one, other).exception, NotComparableError)
    assert document(one, other, "--allow-difference", "max_concurrency")["verdict"] == "regression"


def test_failed_requests_and_counts_that_differ_make_it_invalid_unless_they_are_allowed(tmp_path):
    a, b = repeats(tmp_path / "a"), repeats(tmp_path / "b", seed=2, completed=11, failed=1)
    result = call(a, b)
    assert result.exit_code == 4
    assert "INCOMPLETE" in result.stdout
    assert "1 of 12 requests failed" in result.stdout
    assert call(a, b, "--allow-failed").exit_code in {0, 3}
    comparison = document(a, repeats(tmp_path / "c", completed=11, failed=0))
    assert comparison["exit_code"] == 4
    assert "num_completed must be equal and is 12 against 11" in " ".join(comparison["reasons"])


def test_a_tail_of_too_few_requests_is_unknown_whatever_the_tool_says(tmp_path):
    names = {metric["name"] for metric in document(repeats(tmp_path / "a"), repeats(tmp_path / "b"))["metrics"]}
    assert "p50_ttft_ms" in names
    assert "p99_ttft_ms" not in names
    many = {"num_prompts": 400, "completed": 400}
    comparison = document(repeats(tmp_path / "c", **many), repeats(tmp_path / "d", **many))
    assert "p99_ttft_ms" in {metric["name"] for metric in comparison["metrics"]}


def test_two_tools_are_compared_in_what_both_mean_with_a_warning():
    comparison = document(WRITTEN / "vllm-0.json", WRITTEN / "profile_export_aiperf.json")
    assert {"tools-differ", "settings-unknown", "definition"} <= codes(comparison)
    deciding = [metric["name"] for metric in comparison["metrics"] if metric["role"] == "deciding"]
    assert deciding == ["tpot_ms", "ttft_ms", "output_throughput"]


def test_a_result_directory_stands_beside_result_files(tmp_path):
    blocks = tuple({"baseline": 1 + 0.001 * i, "guided": 1 + 0.001 * i} for i in range(6))
    results = write_results(tmp_path / "r", block_factors=blocks, n=1)
    theirs = repeats(tmp_path / "b", count=6, model_id="qwen2.5-7b", num_prompts=4, completed=4)
    comparison = document(f"{results.path}:baseline", theirs, "--metrics", "tpot_ms")
    assert (comparison["a"], comparison["verdict"]) == ("baseline", "improvement")
    tpot = next(metric for metric in comparison["metrics"] if metric["name"] == "tpot_ms")
    assert tpot["a"] == pytest.approx(10, rel=0.01)
    assert "tools-differ" in codes(comparison)


def test_sides_that_share_no_load_or_no_metric_and_arms_without_a_name_are_refused(tmp_path):
    bare, theirs = tmp_path / "a.json", WRITTEN / "vllm-0.json"
    names = ("model_id", "num_prompts", "completed", "request_throughput")
    bare.write_text(json.dumps({name: VLLM[name] for name in names}))
    ours, lone = write_results(tmp_path / "r").path, tmp_path / "lone"
    for concurrency in (32, 64):
        repeats(lone, max_concurrency=concurrency)
    for side, error, words in (
        (lone, NotComparableError, "no load was driven on both sides"),
        (bare, NotComparableError, "Name the deciding metrics with --metrics"),
        (ours, UsageError, "name it as DIR:variant"),
        (f"{ours}:other", UsageError, "has no variant 'other'"),
    ):
        with pytest.raises(error, match=words):
            raise call(side, theirs).exception
    assert call(bare, theirs, "--metrics", "request_throughput").exit_code == 3


def test_what_a_run_of_ours_leaves_unsaid_is_told(tmp_path):
    results = write_results(tmp_path / "r", n=2)
    change_requests(results, BASELINE, 0, error=RequestError(kind="reset", message="x"))
    runs = runs_of_side(f"{results.path}:baseline")
    assert runs[0].failure == "1 of 4 requests failed"
    assert "several choices" in " ".join(runs[0].notes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (str(WRITTEN / "vllm-0.json"), "vllm-0.json"),
        (f"{WRITTEN}/vllm-0.json,{WRITTEN}/vllm-1.json", "vllm-0.json and 1 more"),
        ("results/x:guided", "guided"),
    ],
)
def test_a_side_has_a_short_name(text, name):
    assert name_of_side(text) == name
