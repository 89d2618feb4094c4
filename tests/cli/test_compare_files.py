"""A comparison written to files, drawn, and appended to the summary of a CI job."""

import csv
import json
import re
from pathlib import Path

import pytest
from support.results.builders import edit_run, write_results
from typer.testing import CliRunner

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.app import app
from benchctl.errors import NotComparableError, UsageError
from benchctl.report.page.plots import forest_plot

BLOCKS = tuple({"baseline": 1 + 0.002 * i, "guided": 1.02 - 0.002 * i} for i in range(6))
FOREIGN = Path(__file__).parents[1] / "interop" / "foreign"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=BLOCKS)


def call(results, *arguments):
    sides = f"{results.path}:baseline", f"{results.path}:guided"
    return CliRunner().invoke(app, ["compare", *sides, *map(str, arguments)])


def height(png):
    assert png.startswith(PNG)
    return int.from_bytes(png[20:24], "big")


def test_each_suffix_gives_its_form_and_the_screen_stays_what_it_was(results, tmp_path):
    files = [tmp_path / f"c{suffix}" for suffix in (".json", ".md", ".csv", ".png", ".svg", ".pdf")]
    found = call(results, *(word for file in files for word in ("--output", file)))
    assert (found.exit_code, found.stdout) == (1, call(results).stdout)
    assert json.loads(files[0].read_text()) == json.loads(call(results, "--json").stdout)
    assert files[1].read_text() == call(results, "--markdown").stdout
    with files[2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    step = next(row for row in rows if row["name"] == "step_ms")
    assert (step["cell"], step["role"], step["verdict"], step["blocks"]) == (
        "top_k=5",
        "deciding",
        "regression",
        "6",
    )
    assert float(step["ci_low"]) < float(step["ratio"]) < float(step["ci_high"])
    assert height(files[3].read_bytes()) > 300
    assert files[4].read_text().startswith("<svg")
    assert files[5].read_bytes().startswith(b"%PDF")


def test_a_page_judges_by_what_the_comparison_was_told(results, tmp_path):
    page = tmp_path / "page.html"
    told = ["--threshold", "90%", "--metrics", "step_ms"]
    found = call(results, *told, "--output", page)
    assert found.stdout == call(results, *told).stdout
    text = page.read_text()
    assert "<title>equivalent: guided against baseline</title>" in text
    assert call(results, "--output", page).exit_code == 1
    assert "<title>regression: guided against baseline</title>" in page.read_text()


def test_files_of_other_tools_have_a_page_with_their_verdict_percentiles_and_requests(tmp_path):
    sides = []
    for side, factor in (("a", 1.0), ("b", 1.5)):
        (tmp_path / side).mkdir()
        for i in range(5):
            document = json.loads((FOREIGN / "vllm-0.json").read_text())
            gap = 0.006 * factor * (1 + 0.01 * i)
            details = {"ttfts": [0.01 + 0.001 * k for k in range(12)], "itls": [[gap] * 15] * 12}
            document |= details | {"output_lens": [16] * 12, "errors": [""] * 12}
            document |= {"mean_tpot_ms": gap * 1e3, "median_tpot_ms": gap * 1e3}
            (tmp_path / side / f"{i}.json").write_text(json.dumps(document))
        sides.append(str(tmp_path / side))
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", *sides, "--metrics", "tpot_ms", "-o", str(page)])
    assert done.exit_code == 1, done.output
    text = page.read_text()
    assert "<title>regression: b against a</title>" in text
    assert "result files of vllm" in text
    assert 'data-chart="latencies"' in text
    assert "gap between chunks (ITL)" in text
    assert re.search(r"<td>b</td><td class=\"num\">9\.1\d+ \[", text)
    assert "5 against 5 runs" in text


def test_files_without_single_requests_have_a_page_without_distributions(tmp_path):
    page = tmp_path / "page.html"
    files = [str(FOREIGN / f"vllm-{i}.json") for i in (0, 1)]
    done = CliRunner().invoke(app, ["compare", *files, "-o", str(page)])
    assert done.exit_code == 3, done.output
    text = page.read_text()
    assert "screening" in text
    assert 'data-chart="latencies"' not in text


@pytest.mark.parametrize(("file", "message"), [("c.txt", "unknown suffix"), ("no/c.md", "is not a directory")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compared(results, tmp_path, file, message):
    refused = call(results, "--output", tmp_path / file, "--json")
    assert isinstance(refused.exception, UsageError)
    assert message in str(refused.exception)
    assert refused.stdout == ""


def test_markdown_is_appended_to_the_summary_of_a_job(results, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("what another step wrote\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert call(results, "--github-summary").exit_code == 1
    assert summary.read_text() == f"what another step wrote\n{call(results, '--markdown').stdout}"


def test_without_a_job_there_is_no_summary_to_append_to(results, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    refused = call(results, "--github-summary")
    assert isinstance(refused.exception, UsageError)
    assert "GITHUB_STEP_SUMMARY, which is not set" in str(refused.exception)


def test_a_refusal_is_written_where_words_can_be(results, tmp_path, monkeypatch):
    edit_run(results, "000-b0-baseline", effective_config={"model": "other"})
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = [tmp_path / f"c{suffix}" for suffix in (".json", ".md", ".png")]
    refused = call(results, "--github-summary", *(word for file in files for word in ("-o", file)))
    assert isinstance(refused.exception, NotComparableError)
    assert json.loads(files[0].read_text())["verdict"] == "not-comparable"
    for path in (files[1], tmp_path / "summary.md"):
        assert path.read_text().startswith("**not compared: the two sides differ")
        assert 'model: "other"' in path.read_text()
    assert not files[2].exists()


def compared(path, factors=BLOCKS, **options):
    results = write_results(path, block_factors=factors, cells=options.pop("cells", ({"top_k": 5},)))
    sides = parse_side(f"{results.path}:baseline"), parse_side(f"{results.path}:guided")
    return compare_sides(*sides, CompareOptions(**options))


def test_a_picture_grows_by_its_rows_and_is_the_same_each_time(tmp_path):
    one = compared(tmp_path / "one", metrics=("step_ms",))
    many = compared(tmp_path / "many", cells=tuple({"top_k": k} for k in (1, 2, 5, 10, 20)))
    assert forest_plot(one) == forest_plot(one)
    assert height(forest_plot(many)) > 3 * height(forest_plot(one))


def test_a_comparison_without_intervals_or_ratios_is_drawn_all_the_same(tmp_path):
    assert height(forest_plot(compared(tmp_path / "lone", BLOCKS[:1]))) > 200
    exact = compared(tmp_path / "exact", metrics=("num_failed",))
    assert height(forest_plot(exact)) > 200
