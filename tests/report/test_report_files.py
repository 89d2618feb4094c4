"""Exports and pictures: what a report writes, under which names, and what it leaves out with a reason."""

import csv
import json

import msgspec
import pytest
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.errors import SchemaVersionError, UsageError
from benchctl.records.record import RequestError
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.steps import stacked_bars
from benchctl.report.export import write_report

PNG = b"\x89PNG\r\n\x1a\n"


def png_size(content):
    assert content.startswith(PNG)
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def names(files):
    return [path.name for path in files.written if path.name != "result.json"]


def test_a_report_writes_tables_documents_run_results_and_every_picture(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": k} for k in (1, 2, 5)])
    files = write_report(tmp_path)
    assert names(files) == [
        "summary.csv",
        "sweep_summary.csv",
        "summary.json",
        "sweep_summary.json",
        "report.html",
        "topk_sweep.png",
        "per_step_breakdown.png",
        "step_time_over_time.png",
        "flops_breakdown.png",
    ]
    assert files.skipped == files.damage == ()
    assert all(path.is_file() for path in files.written)
    for path in files.written:
        if path.suffix == ".png":
            width, height = png_size(path.read_bytes())
            assert width >= 1000
            assert height >= 250
    assert sum(path.name == "result.json" for path in files.written) == 12
    assert not list(tmp_path.rglob("*.partial"))


def test_writing_again_gives_the_same_bytes(tmp_path):
    builders.write_results(tmp_path)
    first = {path: path.read_bytes() for path in write_report(tmp_path).written}
    assert {path: path.read_bytes() for path in write_report(tmp_path).written} == first


def test_the_exported_tables_agree_with_the_reading(tmp_path):
    builders.write_results(tmp_path)
    write_report(tmp_path)
    analysis = analyze_directory(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["runs"] == json.loads(msgspec.json.encode([dict(run.values) for run in analysis.runs]))
    assert summary["cells"][1]["columns"]["step_ms"]["centre"] == pytest.approx(15.5)
    assert summary["definitions"]["step_ms"] == "Σ step time / num_steps [ms]"
    assert [finding["code"] for finding in summary["findings"]] == [finding.code for finding in analysis.findings]
    sweep = json.loads((tmp_path / "sweep_summary.json").read_bytes())
    assert sweep["rows"][0]["factors"] == {"top_k": 5}
    assert sweep["rows"][0]["blocks"][2]["wall"] == pytest.approx(1.55)
    assert sweep["rows"][0]["estimates"]["wall"]["confidence"] == 0.95
    with (tmp_path / "sweep_summary.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["wall_ratio"]) == pytest.approx(1.55)
    assert row["cell"] == "top_k=5"


def test_run_results_use_the_names_and_units_of_vllm(tmp_path):
    results = builders.write_results(tmp_path, num_requests=2, output_tokens=4, n=1)
    write_report(tmp_path)
    result = json.loads((results.runs()[0].path / "result.json").read_bytes())
    expected = {
        "date": "2026-01-01T00:00:00Z",
        "backend": "sim",
        "label": None,
        "model_id": "qwen2.5-7b",
        "num_prompts": 2,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 4,
        "duration": pytest.approx(0.04),
        "completed": 2,
        "failed": 0,
        "total_input_tokens": 40,
        "total_output_tokens": 8,
        "request_throughput": pytest.approx(50),
        "output_throughput": pytest.approx(200),
        "total_token_throughput": pytest.approx(1200),
        "mean_ttft_ms": pytest.approx(10),
        "median_tpot_ms": pytest.approx(10),
        "std_itl_ms": pytest.approx(0),
        "mean_e2el_ms": pytest.approx(40),
        "p99_ttft_ms": None,
        "input_lens": [20, 20],
        "output_lens": [4, 4],
        "ttfts": [pytest.approx(0.01)] * 2,
        "itls": [[pytest.approx(0.01)] * 3] * 2,
        "start_times": [0.0, 0.0],
        "errors": ["", ""],
        "schema_version": 3,
        "variant": "baseline",
    }
    assert {key: result[key] for key in expected} == expected
    assert result["definitions"]["tpot_ms"].startswith("mean of (last - first output) / (output tokens - 1)")


def test_run_results_of_a_virtual_clock_are_in_its_seconds(tmp_path):
    results = builders.write_results(tmp_path, n=1)
    run = results.runs()[0]
    run.write(msgspec.structs.replace(run.read(), clock="virtual", time_scale=20.0))
    write_report(tmp_path)
    result = json.loads((run.path / "result.json").read_bytes())
    assert result["ttfts"][0] == pytest.approx(0.2)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["duration"] == pytest.approx(20 * 0.08)


def test_a_failed_request_stays_in_the_run_result_with_its_error(tmp_path):
    results = builders.write_results(tmp_path, num_requests=2, n=1)
    run = results.runs()[0]
    first, second = run.requests()
    failed = msgspec.structs.replace(
        first,
        choices=(),
        completion_tokens=None,
        sent_ns=None,
        error=RequestError(kind="timeout", message="too slow"),
    )
    (run.path / "requests.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in (failed, second)))
    write_report(tmp_path)
    result = json.loads((run.path / "result.json").read_bytes())
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["errors"] == ["too slow", ""]
    assert result["ttfts"][0] is result["start_times"][0] is result["output_lens"][0] is None


def test_an_unreadable_profile_leaves_the_schedule_unknown(tmp_path):
    results = builders.write_results(tmp_path)
    (tmp_path / "profile.yaml").write_text("name: [")
    write_report(tmp_path)
    result = json.loads((results.runs()[0].path / "result.json").read_bytes())
    assert result["request_rate"] is result["max_concurrency"] is None


def test_an_open_loop_names_its_rate(tmp_path):
    results = builders.write_results(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        profile.read_text().replace("{kind: closed-loop, max_concurrency: 4}", "{kind: poisson, request_rate: 2.5}")
    )
    write_report(tmp_path)
    result = json.loads((results.runs()[0].path / "result.json").read_bytes())
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == (2.5, 1.0, None)


def test_pictures_that_cannot_be_drawn_are_skipped_with_a_reason(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs():
        run.write(msgspec.structs.replace(run.read(), state="failed"))
    files = write_report(tmp_path)
    assert files.skipped == (
        "topk_sweep.png: no variant has finished runs beside the baseline in two or more cells of a sweep",
        "per_step_breakdown.png: no finished run has a step log",
        "step_time_over_time.png: no finished run has a step log",
        "flops_breakdown.png: FLOPs are unknown: no finished run with known model shapes and token counts",
    )
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("cells", "picture"),
    [
        ([{"value_model": m} for m in ("qwen2.5-0.5b", "qwen2.5-3b")], "value_model_sweep.png"),
        ([{"top_k": k, "value_model": "qwen2.5-0.5b"} for k in (2, 3)], "topk_sweep.png"),
        ([{"top_k": 2, "server.max_num_seqs": n} for n in (8, 16)], "server_max_num_seqs_sweep.png"),
        (
            [{"top_k": k, "value_model": m} for k in (2, 3) for m in ("qwen2.5-0.5b", "qwen2.5-3b")],
            "top_k_value_model_sweep.png",
        ),
        ([{"top_k": 2}, {"top_k": 2, "server.max_num_seqs": 8}], "server_max_num_seqs_sweep.png"),
    ],
)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_sweep_picture_is_named_after_its_factors(tmp_path, cells, picture, num_blocks):
    builders.write_results(tmp_path, cells=cells, block_factors=({"baseline": 1.0, "guided": 1.2},) * num_blocks)
    files = write_report(tmp_path)
    assert picture in names(files)
    assert not files.skipped


def test_the_picture_of_a_sweep_has_a_line_for_each_variant(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 2}, {"top_k": 3}])
    changed = {"variant": "second", "block": 0}
    planned = [(run, run.block == 2 and run.variant == "guided") for run in results.plan().runs]
    for run, is_second in planned:
        if is_second:
            builders.edit_run(results, run.run_id, **changed)
    runs = tuple(msgspec.structs.replace(run, **changed) if is_second else run for run, is_second in planned)
    results.write_plan(msgspec.structs.replace(results.plan(), runs=runs))
    (sweep,) = (chart for chart in write_report(tmp_path).charts if chart.file == "topk_sweep.png")
    assert {row["line"] for row in sweep.spec["datasets"]["rows"]} == {"guided", "second"}


def test_a_directory_that_is_no_result_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is not a result directory: it has no manifest\.json"):
        write_report(tmp_path)


def test_a_newer_directory_is_refused(tmp_path):
    builders.write_results(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 4}))
    with pytest.raises(SchemaVersionError, match="schema_version 4 is newer than 3"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["plan.json", "profile.yaml"])
def test_a_missing_document_is_reported_and_the_rest_is_written(tmp_path, name):
    builders.write_results(tmp_path)
    (tmp_path / name).unlink()
    files = write_report(tmp_path)
    assert len(files.damage) == 1
    assert name in files.damage[0]
    assert "summary.csv" in names(files)


def test_a_damaged_run_document_is_reported_and_the_other_runs_are_read(tmp_path):
    results = builders.write_results(tmp_path)
    (results.runs()[0].path / "run.json").write_text("{")
    analysis = analyze_directory(tmp_path)
    assert len(analysis.runs) == 5
    assert "run.json" in analysis.damage[0]


def test_bars_of_nothing_are_still_a_picture():
    png = picture_bytes(stacked_bars([("a", {"part": 0.0})], "x"), "title")
    assert png_size(png)[0] >= 1000
