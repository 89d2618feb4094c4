"""Result files of other load generators, as those tools wrote them about the simulator."""

import itertools
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_readers import is_foreign, read_foreign
from benchctl.interop.foreign_values import detailed_latencies

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


AIPERF = "profile_export_aiperf.json"


def document_of(name):
    return json.loads((WRITTEN / name).read_text())


@pytest.fixture
def aiperf(tmp_path):
    """A written file with other values at its top level; None removes a key."""

    def write(**changes):
        document = document_of(AIPERF) | changes
        path = tmp_path / AIPERF
        path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
        return path

    return write


def one(path):
    (run,) = read_foreign(str(path))
    return run


@pytest.mark.parametrize("name", ["vllm-0.json", AIPERF, "guidellm.json"])
def test_what_is_read_has_our_names_and_obeys_our_definitions(name):
    """All requests have 16 tokens, so that the means must add up: e2el = ttft + 15 tpot."""
    run = one(WRITTEN / name)
    metrics = run.metrics
    assert set(metrics) <= set(METRICS)
    assert dict(run.load_point) == {"request_rate": "inf", "max_concurrency": 4}
    assert (run.settings["model_id"], run.failure) == ("qwen2.5-0.5b", None)
    assert (metrics["num_requests"], metrics["num_failed"], metrics["output_tokens"]) == (12, 0, 192)
    assert metrics["e2el_ms"] == pytest.approx(metrics["ttft_ms"] + 15 * metrics["tpot_ms"], rel=0.01)
    assert metrics["output_throughput"] == pytest.approx(metrics["output_tokens"] / metrics["wall_s"])
    assert metrics["request_throughput"] == pytest.approx(metrics["num_completed"] / metrics["wall_s"])
    assert 5.7 < metrics["tpot_ms"] < 6.1


def test_vllm_names_and_units_are_ours_and_zeros_of_what_was_not_answered_are_no_latencies():
    written, metrics = document_of("vllm-0.json"), one(WRITTEN / "vllm-0.json").metrics
    names = {
        "ttft_ms": "mean_ttft_ms",
        "p50_itl_ms": "median_itl_ms",
        "p99_e2el_ms": "p99_e2el_ms",
        "wall_s": "duration",
    }
    assert {ours: metrics[ours] for ours in names} == {ours: written[theirs] for ours, theirs in names.items()}
    run = one(WRITTEN / "vllm-all-failed.json")
    assert run.failure == "12 of 12 requests failed"
    assert not any(name.endswith("_ms") for name in run.metrics)


def test_aiperf_s_inter_token_latency_is_tpot_its_pooled_gaps_are_itl_and_throughput_follows_from_its_counts(
    aiperf,
):
    written, metrics = document_of(AIPERF), one(WRITTEN / AIPERF).metrics
    assert metrics["tpot_ms"] == written["inter_token_latency"]["avg"]
    assert metrics["itl_ms"] == written["inter_chunk_latency"]["avg"]
    per_request = written["inter_chunk_latency"] | {"count": 12}
    assert "itl_ms" not in one(aiperf(inter_chunk_latency=per_request)).metrics
    assert metrics["output_throughput"] == pytest.approx(192 / written["benchmark_duration"]["avg"])
    # Its own divides by another time.
    assert written["output_token_throughput"]["avg"] < 0.98 * metrics["output_throughput"]


def test_aiperf_s_unit_is_binding(aiperf):
    assert one(aiperf(request_latency={"unit": "sec", "avg": 0.1})).metrics["e2el_ms"] == pytest.approx(100)
    with pytest.raises(RecordError, match=r"request_latency has the unit 'fortnights'; known are ms"):
        one(aiperf(request_latency={"unit": "fortnights", "avg": 1}))


def test_aiperf_s_older_configuration_is_read_and_a_cancelled_run_is_told(aiperf):
    older = {"loadgen": {"concurrency": 5, "request_rate": 2.5}, "endpoint": {"model_names": ["m"]}}
    run = one(aiperf(input_config=older, was_cancelled=True))
    assert dict(run.load_point) == {"request_rate": 2.5, "max_concurrency": 5}
    assert (run.settings["model_id"], run.failure) == ("m", "the run was cancelled")
    assert one(aiperf(input_config=None)).settings.get("model_id") is None


@pytest.fixture
def guidellm(tmp_path):
    """What is read of a report that was changed."""

    def read(change):
        document = document_of("guidellm.json")
        change(document["benchmarks"][0])
        (tmp_path / "guidellm.json").write_text(json.dumps(document))
        return one(tmp_path / "guidellm.json")

    return read


def test_guidellm_s_tpot_is_left_out_and_made_from_its_requests(guidellm):
    benchmark = document_of("guidellm.json")["benchmarks"][0]
    theirs = benchmark["metrics"]["time_per_output_token_ms"]["successful"]["mean"]
    run = one(WRITTEN / "guidellm.json")
    gaps = [request["inter_token_latency_ms"] for request in benchmark["requests"]["successful"]]
    assert run.metrics["tpot_ms"] == pytest.approx(sum(gaps) / 12)
    assert run.metrics["tpot_ms"] < 0.95 * theirs
    assert "includes the first token" in " ".join(run.notes)
    stream_ms = 1e3 * benchmark["metrics"]["request_latency"]["successful"]["mean"]
    assert 0.98 * stream_ms < run.metrics["e2el_ms"] < stream_ms
    dropped = guidellm(lambda b: b["requests"].update(successful=b["requests"]["successful"][:3]))
    assert not {"tpot_ms", "e2el_ms"} & set(dropped.metrics)
    assert "keeps only some of the requests" in " ".join(dropped.notes)


def test_guidellm_s_trimmed_benchmark_has_no_wall_time_and_requests_that_were_cut_off_are_failures(guidellm):
    trimmed = guidellm(lambda b: b.update(warmup_duration=1.5))
    assert ("wall_s" in trimmed.metrics, "cut off" in " ".join(trimmed.notes)) == (False, True)
    totals = {"successful": 12, "incomplete": 2, "errored": 1, "total": 15}
    run = guidellm(lambda b: b["metrics"].update(request_totals=totals))
    assert run.failure == "3 of 15 requests failed (2 of them cut off when the benchmark ended)"
    assert run.metrics["num_failed"] == 3


def test_guidellm_s_report_of_several_loads_is_several_runs(tmp_path):
    document = document_of("guidellm.json")
    other = document_of("guidellm.json")["benchmarks"][0]
    other["config"]["strategy"] = {"type_": "poisson", "rate": 2.5, "max_concurrency": None}
    document["benchmarks"].append(other)
    (tmp_path / "both.json").write_text(json.dumps(document))
    runs = read_foreign(str(tmp_path / "both.json"))
    assert [run.where.rpartition("#")[2] for run in runs] == ["0", "1"]
    assert dict(runs[1].load_point) == {"request_rate": 2.5, "max_concurrency": None}


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


def test_a_directory_holds_repeats_a_comma_lists_files_and_a_file_may_hold_several_results(tmp_path):
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
    (tmp_path / "appended.json").write_text("\n".join(json.dumps(document_of(f"vllm-{i}.json")) for i in (0, 1)))
    assert [run.source for run in read_foreign(str(tmp_path / "appended.json"))] == ["vllm", "vllm"]


def test_the_artifacts_of_aiperf_s_repeats_are_found_below_a_directory(tmp_path):
    for name in ("run_0001", "run_0002"):
        (tmp_path / "profile_runs" / name).mkdir(parents=True)
        shutil.copy(WRITTEN / AIPERF, tmp_path / "profile_runs" / name)
        (tmp_path / "profile_runs" / name / "inputs.json").write_text("{}")
    (tmp_path / "profile_export_aiperf_aggregate.json").write_text("{}")
    assert [run.source for run in read_foreign(str(tmp_path))] == ["aiperf", "aiperf"]


def test_a_result_directory_an_empty_one_or_a_path_that_is_not_there_is_not_foreign(tmp_path):
    assert not is_foreign(str(tmp_path))
    with pytest.raises(UsageError, match="no result file found"):
        read_foreign(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing", f"{tmp_path}/missing.json,{tmp_path}/manifest.json"):
        assert not is_foreign(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2}', r"Looked for: vllm bench serve \(model_id, .*Found keys: a, b"),
        ("[1]", "holds list, not an object"),
        ("hello", "cannot be read as JSON"),
        ('{"a": 1}\n{"a": ', r"file.json:2: cannot be read as JSON"),
        ('{"benchmarks": [{"metrics": {}}]}', "request_totals is missing"),
        (json.dumps(document_of("guidellm.json") | {"benchmarks": []}), "has no benchmark"),
        *(
            (json.dumps(document_of("vllm-0.json") | changes), message)
            for changes, message in (
                ({"num_prompts": "12"}, "num_prompts is '12'"),
                ({"completed": -3}, "completed is -3, which is impossible"),
                ({"mean_ttft_ms": 1e300}, r"mean_ttft_ms is 1e\+300, which is impossible"),
                ({"duration": "2"}, "duration is '2', not a number"),
            )
        ),
    ],
    ids=itertools.count(),
)
def test_a_file_that_is_no_result_is_refused_with_what_was_looked_for_or_is_impossible(tmp_path, text, message):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        read_foreign(str(tmp_path))


def test_the_latencies_of_a_guidellm_report_have_the_means_of_its_metrics_and_other_files_have_none():
    (run,) = read_foreign(str(WRITTEN / "guidellm.json"))
    assert {name: len(values) for name, values in run.latencies_ms.items()} == {"ttft": 12, "tpot": 12, "e2el": 12}
    for latency, values in run.latencies_ms.items():
        assert fmean(values) == pytest.approx(run.metrics[f"{latency}_ms"])
    for name in ("vllm-0.json", "profile_export_aiperf.json"):
        assert read_foreign(str(WRITTEN / name))[0].latencies_ms == {}


def test_a_request_that_failed_or_has_no_number_of_tokens_is_left_out_where_it_must_be():
    document = {
        "ttfts": [0.01, 0.0, 0.02, 0.03],
        "itls": [[0.005, 0.007], [], [0.004, 0.004], [0.001]],
        "output_lens": [3, 0, None, 2],
        "errors": ["", "", "", "timed out"],
    }
    read = detailed_latencies(document, has_itl=True)
    expected = {"ttft": (10, 20), "tpot": (6,), "e2el": (22, 28), "itl": (5, 7, 4, 4)}
    assert read == {name: pytest.approx(values) for name, values in expected.items()}
    assert "itl" not in detailed_latencies(document, has_itl=False)


@pytest.mark.parametrize(
    "document", [{}, {"ttfts": [0.1], "itls": []}, {"ttfts": "0.1", "itls": [[]]}, {"ttfts": [-1.0], "itls": [[]]}]
)
def test_lists_that_do_not_fit_together_are_no_latencies(document):
    assert detailed_latencies(document, has_itl=True) == {}


def test_lines_of_requests_beside_an_aiperf_export_that_are_cut_short_do_not_count(tmp_path):
    (tmp_path / "profile_export_aiperf.json").write_text((WRITTEN / "profile_export_aiperf.json").read_text())
    line = json.dumps({"metrics": {"time_to_first_token": {"value": 12_000, "unit": "us"}}})
    failed = json.dumps({"metrics": {"time_to_first_token": {"value": 1, "unit": "s"}}, "error": {"code": 500}})
    (tmp_path / "profile_export.jsonl").write_text(f"{line}\n{failed}\n{line[:20]}\n")
    (run,) = read_foreign(str(tmp_path))
    assert run.latencies_ms == {"ttft": (12.0,)}
