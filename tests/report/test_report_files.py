"""Exports and pictures: what a report writes, under which names, and what it leaves out with a reason."""

import csv
import json
from pathlib import Path

import msgspec
import pytest
from support.results import builders
from support.results.builders import edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.errors import SchemaVersionError, UsageError
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RequestError, RunFailure
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.steps import stacked_bars
from benchctl.report.documents import show_document
from benchctl.report.experiment_tables import cells_table, sweep_table
from benchctl.report.export import write_report
from benchctl.report.page.page import draw_charts


def png_size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def names(files):
    return [path.name for path in files.written if path.name != "result.json"]


def result_of(results, run=0):
    """The document of a run that a report writes."""
    write_report(results.path)
    return json.loads((results.runs()[run].path / "result.json").read_bytes())


def test_a_report_writes_tables_documents_run_results_and_every_picture_and_the_same_bytes_again(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": k} for k in (1, 2, 5)])
    files = write_report(tmp_path)
    pictures = ["topk_sweep.png", "per_step_breakdown.png", "step_time_over_time.png", "flops_breakdown.png"]
    documents = ["summary.csv", "sweep_summary.csv", "summary.json", "sweep_summary.json", "report.html"]
    assert names(files) == [*documents, *pictures]
    assert files.skipped == files.damage == ()
    assert sum(path.name == "result.json" for path in files.written) == 12
    contents = {path: path.read_bytes() for path in files.written}
    for path, content in contents.items():
        if path.suffix == ".png":
            assert png_size(content) >= (1000, 250)
    assert not list(tmp_path.rglob("*.partial"))
    assert {path: path.read_bytes() for path in write_report(tmp_path).written} == contents


def test_the_exported_tables_agree_with_the_reading(tmp_path):
    builders.write_results(tmp_path)
    write_report(tmp_path)
    analysis = analyze_directory(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["runs"] == json.loads(msgspec.json.encode([dict(run.values) for run in analysis.runs]))
    assert summary["definitions"]["step_ms"] == "Σ step time / num_steps [ms]"
    assert [finding["code"] for finding in summary["findings"]] == [finding.code for finding in analysis.findings]
    (cell,) = json.loads((tmp_path / "sweep_summary.json").read_bytes())["rows"]
    shown = (cell["factors"], cell["blocks"][2]["wall"], cell["estimates"]["wall"]["confidence"])
    assert shown == ({"top_k": 5}, pytest.approx(1.55), 0.95)


def test_run_results_use_the_names_and_units_of_vllm(tmp_path):
    result = result_of(builders.write_results(tmp_path, num_requests=2, output_tokens=4, n=1))
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
    builders.edit_run(results, "000-b0-baseline", clock="virtual", time_scale=20.0)
    result = result_of(results)
    measured = (result["ttfts"][0], result["mean_ttft_ms"], result["duration"])
    assert measured == pytest.approx((0.2, 200, 20 * 0.08))


def test_a_failed_request_stays_in_the_run_result_with_its_error(tmp_path):
    results = builders.write_results(tmp_path, num_requests=2, n=1)
    error = RequestError(kind="timeout", message="too slow")

    def fail_first(request):
        changes = {"choices": (), "completion_tokens": None, "sent_ns": None, "error": error}
        return request if request.index else msgspec.structs.replace(request, **changes)

    builders.edit_requests(results, "000-b0-baseline", fail_first)
    result = result_of(results)
    assert (result["completed"], result["failed"], result["errors"]) == (1, 1, ["too slow", ""])
    assert [result[name][0] for name in ("ttfts", "start_times", "output_lens")] == [None] * 3


def test_a_run_result_names_the_rate_of_an_open_loop_and_no_schedule_of_an_unreadable_profile(tmp_path):
    results = builders.write_results(tmp_path)
    closed, opened = "{kind: closed-loop, max_concurrency: 4}", "{kind: poisson, request_rate: 2.5}"
    for profile, expected in (
        (builders.PROFILE_YAML.replace(closed, opened), (2.5, 1.0, None)),
        ("name: [", (None, None, None)),
    ):
        results.write_profile(profile)
        result = result_of(results)
        assert tuple(result[name] for name in ("request_rate", "burstiness", "max_concurrency")) == expected


def test_pictures_that_cannot_be_drawn_are_skipped_with_a_reason(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs():
        builders.edit_run(results, run.path.name, state="failed")
    assert write_report(tmp_path).skipped == (
        "topk_sweep.png: no variant has finished runs beside the baseline in two or more cells of a sweep",
        "per_step_breakdown.png: no finished run has a step log",
        "step_time_over_time.png: no finished run has a step log",
        "flops_breakdown.png: FLOPs are unknown: no finished run with known model shapes and token counts",
    )
    assert not (tmp_path / "plots").exists()
    assert png_size(picture_bytes(stacked_bars([("a", {"part": 0.0})], "x"), "title"))[0] >= 1000, "bars of nothing"


def test_the_sweep_picture_is_named_after_its_factors(tmp_path):
    for cells, picture in (
        ([{"value_model": m} for m in ("qwen2.5-0.5b", "qwen2.5-3b")], "value_model_sweep.png"),
        ([{"top_k": k, "value_model": "qwen2.5-0.5b"} for k in (2, 3)], "topk_sweep.png"),
        (
            [{"top_k": k, "value_model": m} for k in (2, 3) for m in ("small", "large")],
            "top_k_value_model_sweep.png",
        ),
        ([{"top_k": 2}, {"top_k": 2, "server.max_num_seqs": 8}], "server_max_num_seqs_sweep.png"),
    ):
        num_blocks = len(cells) // 2  # one block has no intervals
        blocks = ({"baseline": 1.0, "guided": 1.2},) * num_blocks
        charts = draw_charts(
            analyze_directory(builders.write_results(tmp_path / picture, cells=cells, block_factors=blocks).path)
        )
        assert picture in [chart.file for chart in charts if not chart.skipped]


def test_the_picture_of_a_sweep_has_a_line_for_each_variant(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 2}, {"top_k": 3}])
    changed = {"variant": "second", "block": 0}
    runs = []
    for run in results.plan().runs:
        is_second = run.block == 2 and run.variant == "guided"
        runs.append(msgspec.structs.replace(run, **changed) if is_second else run)
        if is_second:
            builders.edit_run(results, run.run_id, **changed)
    results.write_plan(msgspec.structs.replace(results.plan(), runs=tuple(runs)))
    (sweep,) = (chart for chart in draw_charts(analyze_directory(tmp_path)) if chart.file == "topk_sweep.png")
    assert {row["line"] for row in sweep.spec["datasets"]["rows"]} == {"guided", "second"}


def test_no_and_newer_directories_are_refused_and_of_damaged_ones_the_rest_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"is not a result directory: it has no manifest\.json"):
        write_report(tmp_path)
    (builders.write_results(tmp_path).runs()[0].path / "run.json").write_text("{")
    analysis = analyze_directory(tmp_path)
    assert (len(analysis.runs), "run.json" in analysis.damage[0]) == (5, True)
    for name in ("plan.json", "profile.yaml"):
        (tmp_path / name).unlink()
        files = write_report(tmp_path)
        assert [damage for damage in files.damage if name in damage]
        assert "summary.csv" in names(files)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 4}))
    with pytest.raises(SchemaVersionError, match="schema_version 4 is newer than 3"):
        write_report(tmp_path)


BLOCKS = ({"baseline": 1.0, "guided": 1.0},) * 2
LOST = "guided top_k=5"


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """Two blocks of two cells; the servers of one cell ran out of memory, and were then not tried again."""
    results = write_results(tmp_path / "r", block_factors=BLOCKS, cells=({"top_k": 3}, {"top_k": 5}))
    lost = [run.path.name for run in results.runs() if run.path.name.endswith("top_k5")]
    for run_id, cause in zip(lost, ("out-of-memory", "infeasible"), strict=True):
        edit_run(results, run_id, state="failed", failure=RunFailure(cause=cause, message="no room"))
    return results.path


def test_tables_and_exported_files_name_an_infeasible_cell(path: Path) -> None:
    analysis = analyze_directory(path)
    (cell,) = [row for row in cells_table(analysis).texts() if row[0] == LOST]
    (row,) = [row for row in sweep_table(analysis).texts() if row[0] == LOST]
    assert (cell[1], row[1:3]) == ("infeasible (out of memory)", ["0", "infeasible (out of memory)"])
    write_report(path)
    sweep = csv.DictReader((path / "sweep_summary.csv").read_text().splitlines())
    assert [(row["cell"], row["n_blocks"], row["infeasible"]) for row in sweep] == [
        ("top_k=3", "2", ""),
        ("top_k=5", "0", "out of memory"),
    ]
    failures = sorted(row["failure"] for row in csv.DictReader((path / "summary.csv").read_text().splitlines()))
    assert failures == ["", "", "", "", "infeasible", "out-of-memory"]
    document = json.loads((path / "sweep_summary.json").read_text())["infeasible"]
    assert document == [{"variant": "guided", "factors": {"top_k": 5}, "infeasible": "out of memory"}]
    assert show_document(analysis)["infeasible"] == document


def test_one_block_that_found_room_makes_the_cell_feasible(path: Path) -> None:
    analysis = analyze_directory(path)
    first = next(run.record.run_id for run in analysis.runs if run.record.failure is not None)
    edit_run(ResultDirectory(path), first, state="done", failure=None)
    analysis = analyze_directory(path)
    assert analysis.infeasible == ()
    (cell,) = [row for row in cells_table(analysis).texts() if row[0] == LOST]
    assert cell[1] == "1 (1 left out)"


def test_a_cell_that_failed_otherwise_is_not_called_infeasible(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=BLOCKS)
    for run in results.runs():
        if "guided" in run.path.name:
            failure = RunFailure(cause="server-died", message="gone")
            edit_run(results, run.path.name, state="failed", failure=failure)
    assert analyze_directory(results.path).infeasible == ()
