"""Files of a report and its tables: what is written under which names, in which digits, signs and forms."""

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.text import Text
from support.results.builders import PROFILE_YAML, change_requests, edit_run, write_results

from benchctl import units
from benchctl.analysis.analyzed import analyze_directory
from benchctl.cli.screen import text_console
from benchctl.errors import SchemaVersionError, UsageError
from benchctl.records.record import RequestError, RunFailure
from benchctl.report.documents import show_document
from benchctl.report.experiment_tables import cells_table, sweep_table
from benchctl.report.export import write_report
from benchctl.report.page.page import draw_charts
from benchctl.report.table import Column, Table, csv_bytes, fenced, markdown_text


def png_size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def names(files):
    return [path.name for path in files.written if path.name != "result.json"]


def result_of(results):
    """The document of the first run that a report writes."""
    write_report(results.path)
    return json.loads((results.runs()[0].path / "result.json").read_bytes())


def test_a_report_writes_tables_documents_run_results_and_every_picture_and_the_same_bytes_again(tmp_path):
    write_results(tmp_path, cells=[{"top_k": k} for k in (1, 2, 5)])
    files = write_report(tmp_path)
    pictures = ["ratios.png", "block_values.png", "topk_sweep.png"]
    pictures += ["per_step_breakdown.png", "step_time_over_time.png", "flops_breakdown.png"]
    documents = ["summary.csv", "sweep_summary.csv", "summary.json", "sweep_summary.json", "report.html"]
    assert names(files) == [*documents, *pictures]
    assert files.skipped == files.damage == ()
    assert sum(path.name == "result.json" for path in files.written) == 12
    contents = {path: path.read_bytes() for path in files.written}
    assert min(png_size(content) for path, content in contents.items() if path.suffix == ".png") >= (1000, 250)
    assert not list(tmp_path.rglob("*.partial"))
    assert {path: path.read_bytes() for path in write_report(tmp_path).written} == contents


@pytest.mark.usefixtures("without_pictures")
def test_the_exported_tables_agree_with_the_reading(tmp_path):
    write_results(tmp_path)
    write_report(tmp_path)
    analysis = analyze_directory(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["runs"] == json.loads(msgspec.json.encode([dict(run.values) for run in analysis.runs]))
    assert summary["definitions"]["step_ms"] == "Σ step time / num_steps [ms]"
    assert [finding["code"] for finding in summary["findings"]] == [finding.code for finding in analysis.findings]
    (cell,) = json.loads((tmp_path / "sweep_summary.json").read_bytes())["rows"]
    assert (cell["factors"], cell["blocks"][2]["wall"]) == ({"top_k": 5}, pytest.approx(1.55))


@pytest.mark.usefixtures("without_pictures")
def test_run_results_use_the_names_and_units_of_vllm(tmp_path):
    result = result_of(write_results(tmp_path, num_requests=2, output_tokens=4, n=1))
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


@pytest.mark.usefixtures("without_pictures")
def test_a_run_result_has_the_seconds_of_its_clock_its_failed_requests_and_the_rate_of_its_profile(tmp_path):
    results = write_results(tmp_path, n=1)
    edit_run(results, "000-b0-baseline", clock="virtual", time_scale=20.0)
    result = result_of(results)
    times = (result["ttfts"][0], result["mean_ttft_ms"], result["duration"])
    assert times == pytest.approx((0.2, 200, 20 * 0.08))
    failed = {"choices": (), "completion_tokens": None, "sent_ns": None}
    error = RequestError(kind="timeout", message="too slow")
    change_requests(results, "000-b0-baseline", 0, error=error, **failed)
    closed, opened = "{kind: closed-loop, max_concurrency: 4}", "{kind: poisson, request_rate: 2.5}"
    results.write_profile(PROFILE_YAML.replace(closed, opened))
    result = result_of(results)
    assert (result["completed"], result["failed"], result["errors"]) == (3, 1, ["too slow", "", "", ""])
    assert [result[name][0] for name in ("ttfts", "start_times", "output_lens")] == [None] * 3
    schedule = ("request_rate", "burstiness", "max_concurrency")
    assert [result[name] for name in schedule] == [2.5, 1.0, None]
    results.write_profile("name: [")
    assert [result_of(results)[name] for name in schedule] == [None] * 3


def test_pictures_that_cannot_be_drawn_are_skipped_with_a_reason_but_for_a_sweep_that_was_none(tmp_path):
    results = write_results(tmp_path)
    for run in results.runs():
        edit_run(results, run.path.name, state="failed")
    assert write_report(tmp_path).skipped == (
        "block_values.png: no finished run knows a deciding metric",
        "per_step_breakdown.png, step_time_over_time.png: no finished run has a step log",
        "flops_breakdown.png: FLOPs are unknown: no finished run with known model shapes and token counts",
    )


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
        blocks = ({"baseline": 1.0, "guided": 1.2},) * (len(cells) // 2)  # one block has no intervals
        path = write_results(tmp_path / picture, cells=cells, block_factors=blocks).path
        assert picture in [chart.file for chart in draw_charts(analyze_directory(path)) if not chart.skipped]


@pytest.mark.usefixtures("without_pictures")
def test_no_and_newer_directories_are_refused_and_of_damaged_ones_the_rest_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"is not a result directory: it has no manifest\.json"):
        write_report(tmp_path)
    (write_results(tmp_path).runs()[0].path / "run.json").write_text("{")
    analysis = analyze_directory(tmp_path)
    assert (len(analysis.runs), "run.json" in analysis.damage[0]) == (5, True)
    for name in ("plan.json", "profile.yaml"):
        (tmp_path / name).unlink()
        files = write_report(tmp_path)
        assert [damage for damage in files.damage if name in damage]
        assert "summary.csv" in names(files)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 3', '"schema_version": 4'))
    with pytest.raises(SchemaVersionError, match="schema_version 4 is newer than 3"):
        write_report(tmp_path)


@pytest.mark.usefixtures("without_pictures")
def test_tables_and_files_name_a_cell_infeasible_whose_servers_all_ran_out_of_memory(tmp_path: Path) -> None:
    blocks = ({"baseline": 1.0, "guided": 1.0},) * 2
    results = write_results(tmp_path / "r", block_factors=blocks, cells=({"top_k": 3}, {"top_k": 5}))
    path, lost = results.path, [run.path.name for run in results.runs() if run.path.name.endswith("top_k5")]
    for run_id, cause in zip(lost, ("out-of-memory", "infeasible"), strict=True):
        edit_run(results, run_id, state="failed", failure=RunFailure(cause=cause, message="no room"))
    analysis = analyze_directory(path)
    assert cells_table(analysis).texts()[2][:2] == ["guided top_k=5", "infeasible (out of memory)"]
    assert sweep_table(analysis).texts()[1][:3] == ["guided top_k=5", "0", "infeasible (out of memory)"]
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
    edit_run(results, lost[0], state="done", failure=None)
    analysis = analyze_directory(path)
    assert (analysis.infeasible, cells_table(analysis).texts()[2][1]) == ((), "1 (1 left out)")
    for run_id in lost:
        edit_run(results, run_id, state="failed", failure=RunFailure(cause="server-died", message="gone"))
    assert analyze_directory(path).infeasible == ()


TABLE = Table(
    "Times of 2 arms | in a title that is wider than its table",
    (Column("arm", "arm", is_left=True), Column("mean_ms", "mean", lambda mean: f"{mean:.1f}"), Column("note", "")),
    (
        {"arm": "baseline", "mean_ms": 9.96, "note": "[1]"},
        {"arm": "guided\n@top_k=5", "mean_ms": None, "note": ""},
        {"arm": "lost"},
    ),
)


def printed(drawn: object) -> list[str]:
    console = text_console()
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_shows_what_is_unknown_as_a_hyphen_what_is_absent_as_nothing_and_each_row_in_one_line() -> None:
    assert TABLE.texts() == [["baseline", "10.0", "[1]"], ["guided\n@top_k=5", "-", ""], ["lost", "", ""]]
    assert printed(TABLE) == [
        "Times of 2 arms | in a title that is wider than its table",
        "arm               mean",
        "baseline          10.0  [1]",
        "guided\\n@top_k=5     -",
        "lost",
    ]
    assert printed(TABLE.drawn(80, Text)) == printed(TABLE)
    assert TABLE.markdown().splitlines()[2:4] == [
        "| baseline | 10.0 | [1] |",
        "| guided\\\\n@&#8203;top\\_k=5 | - |  |",
    ]


def test_a_wide_table_leaves_extra_columns_out_then_folds_texts_then_goes_on_below_and_cuts_no_number() -> None:
    text = "a sentence of several words which is folded where it is too wide"
    columns = (
        Column("arm", "arm", is_left=True), Column("said", "said", is_left=True), Column("none", "none"),
        *(Column(f"time {i}", f"time {i}", is_extra=i == 1) for i in range(4)),
    )  # fmt: skip
    table = Table("", columns, ({"arm": "base", "said": text, **{f"time {i}": "123456.789" for i in range(4)}},))
    wide, narrow, least = (Console(file=io.StringIO(), width=width, soft_wrap=True) for width in (160, 100, 50))
    for console in (wide, narrow, least):
        console.print(table)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= console.width
        assert ("no room for the columns time 1" in lines) is (console is not wide)
        assert sum(line.count("123456.789") for line in lines) == (4 if console is wide else 3)
        assert sum(line.startswith("base") for line in lines) == (2 if console is least else 1)
        assert "none" not in " ".join(lines)


def test_csv_has_numbers_in_full_and_computes_nothing() -> None:
    content = csv_bytes(("arm", "mean_ms"), [{"arm": "=1+1", "mean_ms": 1 / 3}, {"arm": "b", "mean_ms": None}])
    assert list(csv.reader(io.StringIO(content.decode()))) == [["arm", "mean_ms"], ["'=1+1", str(1 / 3)], ["b", ""]]


SAMPLES = [
    (units.four_digits, 1234.5, "1234"),
    (units.four_digits, 1.5, "1.500"),
    (units.four_digits, 0.0, "0"),
    (units.four_digits, 0.00123456, "0.0012"),
    (units.four_digits, None, "-"),
    (units.signed_four_digits, -2.0, "-2.000"),
    (units.three_digits, 1.5, "1.50"),
    (units.three_digits, 150.0, "150"),
    (units.signed_three_digits, 0.0004, "+0"),
    (units.signed_three_digits, -58.23, "-58.2"),
    (units.signed_three_digits, 0.0123456, "+0.012"),
    (units.short_number, 1234.5, "1,234"),
    (units.short_number, 99.94, "99.9"),
    (units.short_number, 9.999, "10.00"),
    (units.short_number, 0.25, "0.25"),
    (units.short_number, 0.0123, "0.0123"),
    (units.whole, 3.0, "3"),
    (units.percentage, 0.025, "2.5%"),
    (units.percentage_change, 0.1432, "+14.3%"),
    (units.percentage_change, -0.00432, "-0.43%"),
    (units.change_of_ratio, 5.58, "+458%"),
    (units.change_of_ratio, 0.987, "-1.3%"),
    (units.change_of_ratio, 1.0002, "+0.02%"),
    (units.scatter, 0.0061, "± 0.6%"),
    (units.scatter, 0.0, ""),
    (units.p_value, 0.04, "0.040"),
    (units.p_value, 0.0001, "<0.001"),
    (units.gib, 85_899_345_920, "80.0 GiB"),
    (units.gib, None, "n/a"),
    (units.megabytes, 1_234_567_890, "1,234.6 MB"),
    (units.milliseconds, 1_234_567, "1.23"),
    (units.milliseconds, None, "unknown"),
    (units.duration, 40.2, "40 s"),
    (units.duration, 720.0, "12 min"),
    (units.duration, 12_600.0, "3.5 h"),
    (units.range_of, [8, 6, 8], "6 to 8"),
    (units.range_of, [8, 8], "8"),
    (units.minus, "a-b", "a-b"),
    (units.minus_in_numbers, "a-b [-2.1%, -1]", "a-b [\N{MINUS SIGN}2.1%, \N{MINUS SIGN}1]"),
]


def test_a_number_is_written_in_one_way() -> None:
    for form, value, text in SAMPLES:
        assert form(value) == text, (form, value)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("+55.4% [+52.9%, +57.9%] in top_k=5", r"+55.4% [+52.9%, +57.9%] in top\_k=5"),
        ("a|b*c*`d`~~e~~\\", r"a\|b\*c\*\`d\`\~\~e\~\~" + "\\\\"),
        ("<img src=x onerror=alert(1)>", r"\<img src=x onerror=alert(1)>"),
        ("[text](//evil) ![x][y] [z]: /url", r"[text\](//evil) ![x\][y] [z\]: /url"),
        ("@octocat fixes #12", "@&#8203;octocat fixes #&#8203;12"),
        ("https://evil.example or www.evil.example", "https:&#8203;//evil.example or www&#8203;.evil.example"),
        ("$\\frac{1}{2}$ &lt;b", "&#36;\\\\frac{1}{2}&#36; \\&lt;b"),
        ("\x1b]0;t\x07\x9b31m\u202e\nnext\tcell", "\\\\x1b]0;t\\\\x07\\\\x9b31m\\\\u202e\\\\nnext\\\\tcell"),
    ],
)
def test_a_text_is_shown_as_it_is(text: str, markdown: str) -> None:
    assert markdown_text(text) == markdown


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("a\n```\n# b\x1b[2J\n````") == "`````text\na\n```\n# b\\x1b[2J\n````\n`````"
    assert len(markdown_text("x" * 1_000_000)) == 2_000
