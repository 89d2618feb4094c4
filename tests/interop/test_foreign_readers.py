"""Result files of other load generators, as those tools wrote them about the simulator."""

import json
import shutil
from pathlib import Path

import pytest

from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_readers import is_foreign, read_foreign

WRITTEN = Path(__file__).parent / "foreign"
SGLANG = {
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": 8,
    "random_input_len": 20,
    "duration": 2.0,
    "completed": 10,
    "total_input_tokens": 200,
    "total_output_tokens": 160,
    "total_output_tokens_retokenized": 158,
    "request_throughput": 5.0,
    "output_throughput": 80.0,
    "mean_e2e_latency_ms": 200.0,
    "median_e2e_latency_ms": 190.0,
    "p99_e2e_latency_ms": 300.0,
    "mean_ttft_ms": 20.0,
    "median_ttft_ms": 19.0,
    "mean_tpot_ms": 12.0,
    "mean_itl_ms": 11.0,
}


def changed(name, directory, **changes):
    """A copy of a written file with other values at its top level; None removes a key."""
    document = json.loads((WRITTEN / name).read_text()) | changes
    path = directory / name
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return path


def one(path):
    (run,) = read_foreign(str(path))
    return run


@pytest.mark.parametrize("name", ["vllm-0.json", "profile_export_aiperf.json", "guidellm.json"])
def test_every_number_has_a_name_of_ours_and_the_load_is_known(name):
    run = one(WRITTEN / name)
    assert set(run.metrics) <= set(METRICS)
    assert dict(run.load_point) == {"request_rate": "inf", "max_concurrency": 4}
    assert run.settings["model_id"] == "qwen2.5-0.5b"
    assert (run.metrics["num_requests"], run.metrics["num_failed"], run.failure) == (12, 0, None)
    assert run.metrics["output_tokens"] == 192


@pytest.mark.parametrize("name", ["vllm-0.json", "profile_export_aiperf.json", "guidellm.json"])
def test_what_is_read_obeys_our_definitions(name):
    """All requests have 16 tokens, so that the means must add up: e2el = ttft + 15 tpot."""
    metrics = one(WRITTEN / name).metrics
    assert metrics["e2el_ms"] == pytest.approx(metrics["ttft_ms"] + 15 * metrics["tpot_ms"], rel=0.01)
    assert metrics["output_throughput"] == pytest.approx(metrics["output_tokens"] / metrics["wall_s"])
    assert metrics["request_throughput"] == pytest.approx(metrics["num_completed"] / metrics["wall_s"])
    assert 5.7 < metrics["tpot_ms"] < 6.1


def test_vllm_names_and_units_are_ours():
    written, metrics = json.loads((WRITTEN / "vllm-0.json").read_text()), one(WRITTEN / "vllm-0.json").metrics
    assert metrics["ttft_ms"] == written["mean_ttft_ms"]
    assert metrics["p50_itl_ms"] == written["median_itl_ms"]
    assert metrics["p99_e2el_ms"] == written["p99_e2el_ms"]
    assert metrics["wall_s"] == written["duration"]


def test_where_nothing_was_answered_the_zeros_are_no_latencies():
    run = one(WRITTEN / "vllm-all-failed.json")
    assert run.failure == "12 of 12 requests failed"
    assert not any(name.endswith("_ms") for name in run.metrics)


def test_aiperf_s_inter_token_latency_is_tpot_and_its_pooled_gaps_are_itl(tmp_path):
    written = json.loads((WRITTEN / "profile_export_aiperf.json").read_text())
    metrics = one(WRITTEN / "profile_export_aiperf.json").metrics
    assert metrics["tpot_ms"] == written["inter_token_latency"]["avg"]
    assert metrics["itl_ms"] == written["inter_chunk_latency"]["avg"]
    per_request = written["inter_chunk_latency"] | {"count": 12}
    assert (
        "itl_ms"
        not in one(changed("profile_export_aiperf.json", tmp_path, inter_chunk_latency=per_request)).metrics
    )


def test_aiperf_s_throughput_is_made_from_its_counts_because_its_own_divides_by_another_time():
    written = json.loads((WRITTEN / "profile_export_aiperf.json").read_text())
    throughput = one(WRITTEN / "profile_export_aiperf.json").metrics["output_throughput"]
    assert throughput == pytest.approx(192 / written["benchmark_duration"]["avg"])
    assert written["output_token_throughput"]["avg"] < 0.98 * throughput


def test_aiperf_s_unit_is_binding(tmp_path):
    seconds = {"unit": "sec", "avg": 0.1}
    run = one(changed("profile_export_aiperf.json", tmp_path, request_latency=seconds))
    assert run.metrics["e2el_ms"] == pytest.approx(100)
    odd = changed("profile_export_aiperf.json", tmp_path, request_latency={"unit": "fortnights", "avg": 1})
    with pytest.raises(RecordError, match=r"request_latency has the unit 'fortnights'; known are ms"):
        read_foreign(str(odd))


def test_aiperf_s_older_configuration_is_read_and_a_cancelled_run_is_told(tmp_path):
    older = {"loadgen": {"concurrency": 5, "request_rate": 2.5}, "endpoint": {"model_names": ["m"]}}
    run = one(changed("profile_export_aiperf.json", tmp_path, input_config=older, was_cancelled=True))
    assert dict(run.load_point) == {"request_rate": 2.5, "max_concurrency": 5}
    assert (run.settings["model_id"], run.failure) == ("m", "the run was cancelled")
    assert one(changed("profile_export_aiperf.json", tmp_path, input_config=None)).settings.get("model_id") is None


def guidellm(directory, change):
    document = json.loads((WRITTEN / "guidellm.json").read_text())
    change(document["benchmarks"][0])
    path = directory / "guidellm.json"
    path.write_text(json.dumps(document))
    return path


def test_guidellm_s_tpot_is_left_out_and_made_from_its_requests():
    benchmark = json.loads((WRITTEN / "guidellm.json").read_text())["benchmarks"][0]
    theirs = benchmark["metrics"]["time_per_output_token_ms"]["successful"]["mean"]
    run = one(WRITTEN / "guidellm.json")
    assert run.metrics["tpot_ms"] < 0.95 * theirs
    gaps = [request["inter_token_latency_ms"] for request in benchmark["requests"]["successful"]]
    assert run.metrics["tpot_ms"] == pytest.approx(sum(gaps) / 12)
    assert "includes the first token" in " ".join(run.notes)
    stream_ms = 1e3 * benchmark["metrics"]["request_latency"]["successful"]["mean"]
    assert 0.98 * stream_ms < run.metrics["e2el_ms"] < stream_ms


def test_guidellm_s_tpot_is_unknown_where_requests_were_dropped_from_the_report(tmp_path):
    run = one(guidellm(tmp_path, lambda b: b["requests"].update(successful=b["requests"]["successful"][:3])))
    assert not {"tpot_ms", "e2el_ms"} & set(run.metrics)
    assert "keeps only some of the requests" in " ".join(run.notes)


def test_guidellm_s_trimmed_benchmark_has_no_wall_time(tmp_path):
    run = one(guidellm(tmp_path, lambda b: b.update(warmup_duration=1.5)))
    assert "wall_s" not in run.metrics
    assert "cut off" in " ".join(run.notes)


def test_guidellm_s_requests_that_were_cut_off_are_failures(tmp_path):
    totals = {"successful": 12, "incomplete": 2, "errored": 1, "total": 15}
    run = one(guidellm(tmp_path, lambda b: b["metrics"].update(request_totals=totals)))
    assert run.failure == "3 of 15 requests failed (2 of them cut off when the benchmark ended)"
    assert run.metrics["num_failed"] == 3


def test_guidellm_s_report_of_several_loads_is_several_runs(tmp_path):
    document = json.loads((WRITTEN / "guidellm.json").read_text())
    other = json.loads(json.dumps(document["benchmarks"][0]))
    other["config"]["strategy"] = {"type_": "poisson", "rate": 2.5, "max_concurrency": None}
    document["benchmarks"].append(other)
    (tmp_path / "both.json").write_text(json.dumps(document))
    runs = read_foreign(str(tmp_path / "both.json"))
    assert [run.where.rpartition("#")[2] for run in runs] == ["0", "1"]
    assert dict(runs[1].load_point) == {"request_rate": 2.5, "max_concurrency": None}
    document["benchmarks"] = []
    (tmp_path / "none.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match="has no benchmark"):
        read_foreign(str(tmp_path / "none.json"))


def test_every_line_of_sglang_s_file_is_a_run(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(f"{json.dumps(SGLANG)}\n{json.dumps(SGLANG | {'errors': ['', 'refused']})}\n")
    first, second = read_foreign(str(path))
    assert (first.source, first.where, second.where) == ("sglang", f"{path}:1", f"{path}:2")
    assert dict(first.load_point) == {"request_rate": "inf", "max_concurrency": 8}
    assert (first.metrics["tpot_ms"], first.metrics["e2el_ms"]) == (12, 200)
    assert "itl_ms" not in first.metrics
    assert (first.failure, "num_failed" in first.metrics) == (None, False)
    assert "whether all were answered is not known" in " ".join(first.notes)
    assert second.failure == "1 of 11 requests failed"


def test_results_that_vllm_appended_to_one_file_are_several_runs(tmp_path):
    path = tmp_path / "appended.json"
    texts = [json.dumps(json.loads((WRITTEN / f"vllm-{i}.json").read_text())) for i in (0, 1)]
    path.write_text("\n".join(texts))
    assert [run.source for run in read_foreign(str(path))] == ["vllm", "vllm"]


def test_a_directory_holds_repeats_and_a_comma_lists_files(tmp_path):
    for index in (0, 1):
        shutil.copy(WRITTEN / f"vllm-{index}.json", tmp_path)
        (tmp_path / f"vllm-{index}.pytorch.json").write_text("[]")
    assert len(read_foreign(str(tmp_path))) == 2
    listed = f"{tmp_path}/vllm-0.json,{tmp_path}/vllm-1.json"
    assert is_foreign(listed)
    assert [run.where for run in read_foreign(listed)] == listed.split(",")
    many = ",".join([f"{tmp_path}/vllm-0.json"] * 200)  # longer than any path
    assert is_foreign(many)
    assert len(read_foreign(many)) == 200


def test_the_artifacts_of_aiperf_s_repeats_are_found_below_a_directory(tmp_path):
    for name in ("run_0001", "run_0002"):
        (tmp_path / "profile_runs" / name).mkdir(parents=True)
        shutil.copy(WRITTEN / "profile_export_aiperf.json", tmp_path / "profile_runs" / name)
        (tmp_path / "profile_runs" / name / "inputs.json").write_text("{}")
    (tmp_path / "profile_export_aiperf_aggregate.json").write_text("{}")
    assert [run.source for run in read_foreign(str(tmp_path))] == ["aiperf", "aiperf"]


def test_a_result_directory_or_a_path_that_is_not_there_is_not_foreign(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_foreign(str(tmp_path))
    assert not is_foreign(str(tmp_path / "missing"))
    assert not is_foreign(f"{tmp_path}/missing.json,{tmp_path}/manifest.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2}', r"Looked for: vllm bench serve \(model_id, .*Found keys: a, b"),
        ("[1]", "holds list, not an object"),
        ("hello", "cannot be read as JSON"),
        ('{"a": 1}\n{"a": ', r"file.json:2: cannot be read as JSON"),
        ('{"benchmarks": [{"metrics": {}}]}', "request_totals is missing"),
        ('{"model_id": "m", "num_prompts": "12", "completed": 1, "request_throughput": 1}', "num_prompts is '12'"),
    ],
)
def test_a_file_that_is_no_result_is_refused_with_its_place_and_what_was_looked_for(tmp_path, text, message):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        read_foreign(str(tmp_path))


def test_a_directory_without_results_is_a_usage_error(tmp_path):
    assert not is_foreign(str(tmp_path))
    with pytest.raises(UsageError, match="no result file found"):
        read_foreign(str(tmp_path))
