"""The report page as a document: what it says of results in any state, and that its data give its numbers again."""

import base64
import gzip
import html
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev

import pytest
from jinja2 import UndefinedError
from scipy.stats import t as student
from support.cli import benchctl
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.pairing import Side
from benchctl.records.record import RunFailure
from benchctl.report.page.page import closed, directory_page, inert_json, render_page, sides_page
from benchctl.report.page.plots import cell_waterfalls
from benchctl.units import minus
from benchctl.untrusted.text import escaped, visible

FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    builders.write_results(path, block_factors=FACTORS, cells=[{"top_k": 1}, {"top_k": 5}])
    return path


@pytest.fixture(scope="module", name="page")
def _page(directory):
    return directory_page(analyze_directory(directory))


def data_of(page):
    (found,) = re.findall(r'<script type="application/json" id="benchctl-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def text_of(page):
    """What a reader sees without scripts."""
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown)))


def test_the_verdict_is_the_first_thing_on_the_page_with_its_exit_code_and_what_decides(page):
    text = text_of(page)
    heading = re.search(r"<h1.*?</h1>", page, re.DOTALL)[0]
    assert "<svg" in heading
    assert "regression" in heading
    assert text.index("Guided against baseline: ") < text.index("exit code 1") < text.rindex("Changes against")
    assert "decided by step_ms, tpot_ms, wall_s" in text
    assert "6 interleaved blocks" in text


def test_every_deciding_metric_of_every_cell_is_in_the_plot_and_in_the_table(page, directory):
    comparison = compare_sides(Side(directory, "baseline"), Side(directory, "guided"), CompareOptions())
    (forest,) = (chart["spec"] for chart in data_of(page)["charts"] if chart["id"] == "forest-1")
    rows = json.loads(gzip.decompress(base64.b64decode(forest["datasets"])))["rows"]
    plotted = [(row["label"], row["words"], row["verdict"]) for row in rows if "words" in row]
    text = text_of(page)
    for cell in comparison.cells:
        for metric in cell.deciding:
            change = minus(change_text(metric))
            assert change in text
            assert (cell.label, change, metric.verdict) in plotted


def test_a_ratio_is_computed_again_from_the_data_in_the_page(page):
    (comparison,) = data_of(page)["comparisons"]
    positions = {cell["cell"]: cell["positions"] for cell in comparison["cells"]}
    checked = 0
    for metric in comparison["metrics"]:
        if metric["ratio"] is None:
            continue
        d = [math.log(b / a) for a, b in zip(metric["a_blocks"], metric["b_blocks"], strict=True)]
        at_one_position = [
            v - (metric["position_effect"] or 0) * x for v, x in zip(d, positions[metric["cell"]], strict=True)
        ]
        mu = math.fsum(w * v for w, v in zip(metric["block_weights"], at_one_position, strict=True))
        assert metric["estimator"] == "robust"
        assert metric["ratio"] == pytest.approx(math.exp(mu), rel=1e-9)
        assert metric["ci_low"] <= metric["ratio"] <= metric["ci_high"]
        checked += 1
    assert checked > 20


def test_the_interval_of_a_mean_is_computed_again_from_the_data_in_the_page(directory):
    page = directory_page(analyze_directory(directory), CompareOptions(estimator="mean"))
    (comparison,) = data_of(page)["comparisons"]
    positions = {cell["cell"]: cell["positions"] for cell in comparison["cells"]}
    checked = 0
    for metric in comparison["metrics"]:
        if metric["method"] != "t" or metric["ratio"] is None:
            continue
        d = [math.log(b / a) for a, b in zip(metric["a_blocks"], metric["b_blocks"], strict=True)]
        x, n = positions[metric["cell"]], len(d)
        mu, se, df = fmean(d), stdev(d) / math.sqrt(n), n - 1
        if metric["position_effect"] is not None:
            sxx = sum((v - fmean(x)) ** 2 for v in x)
            slope = sum((v - fmean(x)) * (w - fmean(d)) for v, w in zip(x, d, strict=True)) / sxx
            mu = fmean(d) - slope * fmean(x)
            rest = sum((w - mu - slope * v) ** 2 for v, w in zip(x, d, strict=True)) / (n - 2)
            se, df = math.sqrt(rest * (1 / n + fmean(x) ** 2 / sxx)), n - 2
        half = student.ppf((1 + comparison["confidence"]) / 2, df) * se
        assert metric["ratio"] == pytest.approx(math.exp(mu), rel=1e-9)
        assert metric["ci_low"] == pytest.approx(math.exp(mu - half), rel=1e-9)
        assert metric["ci_high"] == pytest.approx(math.exp(mu + half), rel=1e-9)
        checked += 1
    assert checked > 20


def test_the_shown_change_is_that_of_the_data(page):
    text = text_of(page).replace("\N{MINUS SIGN}", "-")
    (comparison,) = data_of(page)["comparisons"]
    metric = next(m for m in comparison["metrics"] if m["name"] == "step_ms" and m["cell"] == "top_k=5")
    assert f"{(metric['ratio'] - 1) * 100:+.1f}% [{(metric['ci_low'] - 1) * 100:+.1f}%" in text


def test_the_page_names_no_address_outside_itself(page):
    without_scripts = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"(?:src|href)=\"(?!#|runs/|data:,)[^\"]*\"|url\(|@import", without_scripts) == []


def test_writing_the_page_again_gives_the_same_bytes(page, directory):
    assert directory_page(analyze_directory(directory)) == page


class Elements(HTMLParser):
    """The names of all elements and attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.names = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(name for name, _ in attrs)}


HOSTILE = (
    '\x1b]0;title\x07\x9b31m\u202e</script><img src=x onerror=alert(1)>\u2028\'" data-x=" '
    "{{ 7 * 7 }} {% raw %} {# none #} &amp;"
)


def test_names_that_look_like_markup_or_templates_stay_text_everywhere(tmp_path):
    results = builders.write_results(tmp_path, block_factors=FACTORS[:2])
    builders.edit_manifest(results, profile=HOSTILE, label=HOSTILE, dataset=HOSTILE, argv=["benchctl", HOSTILE])
    for run in results.runs():
        builders.edit_run(
            results, run.path.name, engine_version=HOSTILE, argv=[HOSTILE], effective_config={"model": HOSTILE}
        )
    run_id = results.runs()[1].path.name
    builders.edit_run(results, run_id, state="failed", failure=RunFailure(cause=HOSTILE, message=HOSTILE))
    page = directory_page(analyze_directory(tmp_path))
    names = Elements(page).names
    assert {"h1", "table", "svg", "details", "title"} <= names
    assert names & {"img", "onerror", "data-x"} == set()
    shown = html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)))
    assert shown.count(visible(HOSTILE)) >= 8
    assert escaped(page) == page  # no control character anywhere, the data of the page included
    assert data_of(page)["directories"][0]["profile"] == HOSTILE


def test_a_cell_with_a_name_like_markup_stays_text_in_attributes_too(tmp_path):
    builders.write_results(tmp_path, block_factors=FACTORS[:2], cells=[{"top_k": 5, "value_model": HOSTILE}])
    page = directory_page(analyze_directory(tmp_path))
    assert Elements(page).names & {"img", "onerror", "data-x"} == set()
    spoken = html.unescape(re.search(r'data-arm="(guided [^"]*)"', page)[1])
    assert "<img src=x onerror=alert(1)>" in spoken
    assert "{{ 7 * 7 }} {% raw %} {# none #} &amp;" in spoken


def test_a_text_of_a_megabyte_is_cut_on_the_page(tmp_path):
    results = builders.write_results(tmp_path, block_factors=FACTORS[:2])
    builders.edit_manifest(results, label="x" * 1_000_000)
    run_id = results.runs()[1].path.name
    failure = RunFailure(cause="unknown", message="x" * 1_000_000)
    builders.edit_run(results, run_id, state="failed", failure=failure)
    page = directory_page(analyze_directory(tmp_path))
    shown = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)  # the data of the page are whole
    assert 1_900 < max(map(len, re.findall("x+", shown))) < 2_000


def test_data_and_scripts_cannot_end_their_element():
    document = inert_json({"text": HOSTILE})
    assert "<" not in document
    assert json.loads(document)["text"] == HOSTILE
    with pytest.raises(ValueError, match="cannot be put into a page"):
        closed("let a = '</ScRiPt>'", "script")


def test_a_template_without_one_of_its_values_is_an_error():
    with pytest.raises(UndefinedError, match="is undefined"):
        render_page({})


def test_a_directory_with_one_variant_says_that_there_is_nothing_to_compare(tmp_path):
    results = builders.write_results(tmp_path, cells=[])
    text = text_of(directory_page(analyze_directory(results.path)))
    assert "no verdict" in text
    assert "only baseline was planned, so there is nothing to compare it with" in text.lower()
    assert "000-b0-baseline" in text


def test_an_unfinished_directory_says_so_before_anything_else(tmp_path):
    results = builders.write_results(tmp_path, block_factors=FACTORS, state="running")
    for planned in results.plan().runs[3:]:
        (results.run(planned.run_id).path / "run.json").unlink()
    text = text_of(directory_page(analyze_directory(tmp_path)))
    assert text.index("Unfinished: 3 of 12 runs of built are done.") < text.rindex("Changes against")
    assert "planned" in text


def test_a_damaged_directory_gets_its_page_with_the_damage_on_top(tmp_path):
    results = builders.write_results(tmp_path)
    path = results.runs()[1].path / "steps.jsonl"
    path.write_text(path.read_text()[:-20])
    page = directory_page(analyze_directory(tmp_path))
    text = text_of(page)
    assert text.index("Damaged: ") < text.rindex("Runs")
    assert "steps.jsonl" in text
    assert data_of(page)["verdict"]["exit_code"] == 4


def test_sides_that_must_not_be_compared_show_each_difference_as_not_allowed(tmp_path):
    a = builders.write_results(tmp_path / "a")
    b = builders.write_results(tmp_path / "b", asks="How much is")
    analyses = [analyze_directory(a.path), analyze_directory(b.path)]
    page = sides_page((analyses[0], Side(a.path)), (analyses[1], Side(b.path)))
    text = text_of(page)
    assert text.index("not comparable") < text.index("exit code 4") < text.index("request_set_sha256")
    assert "NOT allowed" in text


def test_a_failed_run_shows_its_cause_and_the_end_of_its_log_whatever_is_in_it(tmp_path):
    results = builders.write_results(tmp_path)
    run_id = results.plan().runs[1].run_id
    failure = RunFailure(cause="server-died", message="it went <b>away</b>")
    builders.edit_run(results, run_id, state="failed", failure=failure)
    noise = b"".join(b"line %d\n" % i for i in range(100)) + b"\xff</script><img src=x onerror=alert(1)>\n"
    (results.run(run_id).path / "server.log").write_bytes(noise)
    page = directory_page(analyze_directory(tmp_path))
    text = text_of(page)
    assert "server-died: it went <b>away</b>" in text
    assert "line 61 " in text
    assert "line 60 " not in text
    assert "\N{REPLACEMENT CHARACTER}</script><img src=x onerror=alert(1)>" in text
    assert "<img" not in re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert f'href="runs/{run_id}/server.log"' in page


def test_waterfalls_add_up_to_what_the_other_side_takes(directory):
    comparison = compare_sides(Side(directory, "baseline"), Side(directory, "guided"), CompareOptions())
    for cell in comparison.cells:
        falls = list(cell_waterfalls(cell))
        assert [fall.unit for fall in falls] == ["s", "ms"]
        for fall in falls:
            assert len(fall.falls) >= 2
            assert fall.start + sum(step.added for step in fall.falls) == pytest.approx(fall.end)


def test_style_script_and_templates_are_files_of_the_package():
    for name in ("page.css", "page.js", "templates/page.html"):
        assert (files("benchctl.report.page") / name).is_file()


def run_report(*arguments, cwd):
    return benchctl("report", *arguments, cwd=cwd)


def test_two_sides_make_one_page_where_it_was_asked_for_or_in_the_working_directory(directory, tmp_path):
    sides = (f"{directory}:baseline", f"{directory}:guided")
    done = run_report(*sides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = f"report-{directory.name}-baseline-vs-{directory.name}-guided.html"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert run_report(*sides, "-o", "other.html", cwd=tmp_path).returncode == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / name).read_bytes()
    assert 'href="runs/' not in (tmp_path / name).read_text()


def test_the_report_of_one_directory_is_written_elsewhere_on_request(directory, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    done = run_report(directory, "-o", "elsewhere", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    written = {path.name for path in (tmp_path / "elsewhere").rglob("*")}
    assert {"report.html", "summary.csv", "sweep_summary.json", "result.json"} <= written


def test_the_findings_stand_right_under_the_verdict_with_their_numbers(page, directory):
    findings = analyze_directory(directory).findings
    assert findings
    text = text_of(page).replace("\N{MINUS SIGN}", "-")
    places = [text.index(finding.sentence) for finding in findings]
    assert places == sorted(places)
    assert text.index("exit code 1") < text.index("What follows") < places[0]
    assert places[-1] < text.rindex("Changes against the margin")


def test_every_deciding_verdict_has_its_reason_in_the_table(tmp_path):
    factors = [{"baseline": 1.0, "guided": 0.4 + 0.4 * (i % 3)} for i in range(6)]
    builders.write_results(tmp_path, block_factors=factors)
    page = directory_page(analyze_directory(tmp_path))
    comparison = compare_sides(Side(tmp_path, "baseline"), Side(tmp_path, "guided"), CompareOptions())
    (cell,) = comparison.cells
    text = text_of(page)
    table = text[text.rindex("Deciding metrics in bold") :]
    assert {metric.verdict for metric in cell.deciding} == {"inconclusive"}
    for metric in cell.deciding:
        assert metric.reason
        assert metric.reason in table
    assert " Why " in text[: text.rindex("Changes against")]


def test_a_reason_that_all_metrics_share_stands_once_at_the_top(tmp_path):
    builders.write_results(tmp_path, block_factors=FACTORS[:2], cells=[{"top_k": 1}, {"top_k": 5}])
    text = text_of(directory_page(analyze_directory(tmp_path)))
    top = text[: text.rindex("Changes against")]
    assert top.count("screening: 2 blocks give no verdict; at least 6 are needed") == 1
    assert "and 4 more: screening" in top


def test_a_decided_verdict_names_the_confidence_that_several_tests_ask_for():
    example = Path(__file__).parents[3] / "results" / "example"
    comparison = compare_sides(Side(example, "baseline"), Side(example, "guided"), CompareOptions())
    deciding = [metric for cell in comparison.cells for metric in cell.deciding]
    text = text_of(directory_page(analyze_directory(example)))
    assert max(metric.judged_confidence for metric in deciding) > comparison.rules.confidence
    for metric in deciding:
        assert f"the whole {metric.judged_confidence * 100:.4g}% interval is worse than the margin of 1%" in text
