"""Result files of other load generators, as those tools wrote them about the simulator, and hostile ones."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
from support import layer_tables
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile
from support.results import lenvm_results

from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_readers import is_foreign, read_foreign
from benchctl.interop.foreign_values import aiperf_latencies, detailed_latencies
from benchctl.interop.inference_perf import read_config
from benchctl.interop.layer_profile import ATTENTION, CONFIG, DENSE, PER_SEQUENCE, read_layer_tables
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.sim.requests import static_prefixes
from benchctl.workload.lint import lint_config

WRITTEN = Path(__file__).parent / "foreign"


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
    for ours, theirs in (("ttft_ms", "mean_ttft_ms"), ("p50_itl_ms", "median_itl_ms"), ("wall_s", "duration")):
        assert metrics[ours] == written[theirs]
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
    run = one(aiperf(request_latency={"unit": "sec", "avg": 0.1}, was_cancelled=True))
    assert (run.metrics["e2el_ms"], run.failure) == (pytest.approx(100), "the run was cancelled")
    with pytest.raises(RecordError, match=r"request_latency has the unit 'fortnights'; known are ms"):
        one(aiperf(request_latency={"unit": "fortnights", "avg": 1}))


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


def test_every_line_of_sglang_s_file_is_a_run(tmp_path):
    written = {
        "backend": "sglang", "dataset_name": "random", "request_rate": float("inf"), "max_concurrency": 8,
        "duration": 2.0, "completed": 10, "total_input_tokens": 200, "total_output_tokens": 160,
        "request_throughput": 5.0, "output_throughput": 80.0, "mean_e2e_latency_ms": 200.0, "mean_ttft_ms": 20.0,
        "mean_tpot_ms": 12.0, "mean_itl_ms": 11.0,
    }  # fmt: skip
    path = tmp_path / "sglang.jsonl"
    path.write_text(f"{json.dumps(written)}\n{json.dumps(written | {'errors': ['', 'refused']})}\n")
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
    for listed in ([0, 1], [0] * 200):  # the second is longer than any path
        paths = [f"{tmp_path}/vllm-{index}.json" for index in listed]
        assert is_foreign(",".join(paths))
        assert [run.where for run in read_foreign(",".join(paths))] == paths
    (tmp_path / "appended.json").write_text("\n".join(json.dumps(document_of(f"vllm-{i}.json")) for i in (0, 1)))
    assert [run.source for run in read_foreign(str(tmp_path / "appended.json"))] == ["vllm", "vllm"]
    artifacts = tmp_path / "above" / "profile_runs" / "run_0001"
    artifacts.mkdir(parents=True)
    shutil.copy(WRITTEN / AIPERF, artifacts)
    (artifacts / "inputs.json").write_text("{}")
    assert [run.source for run in read_foreign(str(tmp_path / "above"))] == ["aiperf"]


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


STEPS = "model,hardware,dur_ns,num_prefill_tokens,num_decode_tokens,num_decodes,context_tokens\n"
READERS = {
    "result.json": lambda path: read_foreign(str(path)),
    "result.jsonl": lambda path: read_foreign(str(path)),
    "steps.csv": lambda path: read_step_table(path, TableDefaults()),
    "steps.jsonl": lambda path: read_step_table(path, TableDefaults()),
    "config.yaml": read_config,
    "prompts.jsonl": lambda path: static_prefixes(str(path), 100),
}
MAPPINGS = ("NaN under a key", "beyond a double", "half a pair of surrogates")
EXPECTED = {("prompts.jsonl", "empty"), *(("config.yaml", name) for name in MAPPINGS)}
"""Contents that are what the reader reads: no prompts, and a mapping with an unknown key, which is an entry."""


DEEP_YAML = {"nested lists that end", "nested below a key"}
"""Refused where their lists become too deep, which takes a second or two, as "nested lists" are."""


@pytest.mark.parametrize("file", READERS)
def test_a_hostile_file_is_named(tmp_path, file):
    for name in HOSTILE.keys() - (DEEP_YAML if file == "config.yaml" else set()):
        path = write_hostile(tmp_path / name / file, name)
        refusal = refusal_of(partial(READERS[file], path))
        assert str(path) in refusal or (file, name) in EXPECTED, name
        assert len(refusal) < 1500, name


@pytest.mark.parametrize("table", [DENSE, PER_SEQUENCE, ATTENTION, CONFIG])
def test_a_hostile_table_of_layers_is_named(tmp_path, table):
    layer_tables.write_tables(tmp_path)
    for name in HOSTILE:
        path = write_hostile(next(tmp_path.rglob(table), tmp_path / table), name)
        assert str(path) in refusal_of(lambda: read_layer_tables(tmp_path)), name


@pytest.mark.parametrize("end", [".meta.json", ".timing.jsonl", ".gpu_samples.csv", ".responses.jsonl"])
def test_a_hostile_file_of_a_lenvm_directory_is_named_or_left_out(tmp_path, end):
    source = tmp_path / "source"
    lenvm_results.write_directory(source, num_questions=2, num_samples=2)
    path = next(path for path in sorted(source.iterdir()) if path.name.endswith(end))
    for number, name in enumerate(HOSTILE):
        write_hostile(path, name)
        out = tmp_path / f"out{number}"
        refusal = refusal_of(partial(import_lenvm, source, out, model=None, value_model=None, argv=()))
        assert not refusal or str(source) in refusal or path.name in refusal, (name, refusal)


def test_a_link_in_a_lenvm_directory_is_refused(tmp_path):
    source = tmp_path / "source"
    lenvm_results.write_directory(source, num_questions=2, num_samples=2)
    (tmp_path / "secret").write_text("secret")
    (source / "server.other.log").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match=r"server\.other\.log is a link"):
        import_lenvm(source, tmp_path / "out", model=None, value_model=None, argv=())


@pytest.mark.parametrize("file", ["vllm-0.json", "profile_export_aiperf.json", "guidellm.json"])
def test_no_value_in_the_place_of_another_ends_in_a_traceback(tmp_path, file):
    path = tmp_path / file
    for changed in _replaced(json.loads((WRITTEN / file).read_text())):
        path.write_text(json.dumps(changed))
        refusal = refusal_of(lambda: read_foreign(str(path)))
        assert not refusal or str(path) in refusal


def _replaced(document, depth=4):
    """The document with each value down to some depth replaced in turn; of a list the first alone."""
    is_list = isinstance(document, list)
    for key in [0] if is_list and document else document if isinstance(document, dict) else ():
        inner = _replaced(document[key], depth - 1) if depth else ()
        for value in (*WRONG_VALUES, *inner):
            yield [value, *document[1:]] if is_list else document | {key: value}


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "1e300", "text"])
def test_a_table_with_an_impossible_number_names_its_row(tmp_path, value):
    path = tmp_path / "steps.csv"
    path.write_text(STEPS + "qwen2.5-7b,h200,30000000,0,8,8,800\n" + f"qwen2.5-7b,h200,30000000,0,8,8,{value}\n")
    with pytest.raises(UsageError, match=rf"steps\.csv: context_tokens is '{value}' in row 2"):
        read_step_table(path, TableDefaults())


def test_damaged_lines_of_latencies_are_left_out(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    good = json.dumps({"metrics": {"time_to_first_token": {"value": 5, "unit": "ms"}}}).encode()
    wrong = [b'{"metadata": []}', b'{"metrics": 5}', good.replace(b'"ms"', b"[]")]
    hostile = [content.replace(b"\n", b" ") for content in HOSTILE.values()]
    path.write_bytes(b"\n".join([good, *hostile, *wrong, good]))
    assert aiperf_latencies(path) == {"ttft": (5.0, 5.0)}


def test_rows_without_a_common_cell_make_no_grid(tmp_path):
    layer_tables.write_tables(tmp_path)
    path = next(tmp_path.rglob(ATTENTION))
    header = path.read_text().splitlines()[0]
    rows = [",".join([str(number)] * len(header.split(","))) for number in range(1, 2001)]
    path.write_text("\n".join([header, *rows, ""]))
    with pytest.raises(UsageError, match="cells of a grid"):
        read_layer_tables(tmp_path)


@pytest.mark.parametrize("value", ["1e999", ".inf", ".nan", "-5", "[[]]", "null", "'7'", f"{'9' * 250}"])
def test_lint_survives_every_number(tmp_path, value):
    distribution = f"{{min: {value}, max: {value}, mean: {value}, std_dev: {value}}}"
    load = f"load: {{stages: [{{rate: {value}, duration: {value}}}]}}"
    (tmp_path / "config.yaml").write_text(f"{load}\ndata: {{type: random, input_distribution: {distribution}}}\n")
    assert lint_config(tmp_path / "config.yaml")
