"""The report page as a document: what it says of results in any state, and that its data give its numbers again."""

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import pytest
from jinja2 import UndefinedError
from scipy.stats import t as student
from support.cli import printed
from support.results import builders
from support.results.nodes import write_on_nodes

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import Side
from benchctl.records.record import RunFailure
from benchctl.report.page.page import closed, directory_page, inert_json, render_page, sides_page
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


def log_ratios_of(page):
    """Every metric that has a ratio, its log-ratio of each block, and the positions of the blocks."""
    (comparison,) = data_of(page)["comparisons"]
    positions = {cell["cell"]: cell["positions"] for cell in comparison["cells"]}
    for metric in comparison["metrics"]:
        if metric["ratio"] is not None:
            blocks = zip(metric["a_blocks"], metric["b_blocks"], strict=True)
            yield metric, [math.log(b / a) for a, b in blocks], positions[metric["cell"]]


def test_a_ratio_is_computed_again_from_the_data_in_the_page(page):
    metrics = list(log_ratios_of(page))
    assert len(metrics) > 20
    for metric, d, x in metrics:
        effect = metric["position_effect"] or 0
        mu = math.fsum(w * (v - effect * at) for w, v, at in zip(metric["block_weights"], d, x, strict=True))
        assert metric["estimator"] == "robust"
        assert metric["ratio"] == pytest.approx(math.exp(mu), rel=1e-9)
        assert metric["ci_low"] <= metric["ratio"] <= metric["ci_high"]
    shown = text_of(page).replace("\N{MINUS SIGN}", "-")
    metric = next(m for m, *_ in metrics if m["name"] == "step_ms" and m["cell"] == "top_k=5")
    assert f"{(metric['ratio'] - 1) * 100:+.1f}% [{(metric['ci_low'] - 1) * 100:+.1f}%" in shown


def test_the_interval_of_a_mean_is_computed_again_from_the_data_in_the_page(directory):
    page = directory_page(analyze_directory(directory), CompareOptions(estimator="mean"))
    metrics = [(metric, d, x) for metric, d, x in log_ratios_of(page) if metric["method"] == "t"]
    assert len(metrics) > 20
    for metric, d, x in metrics:
        n = len(d)
        mu, se, df = fmean(d), stdev(d) / math.sqrt(n), n - 1
        if metric["position_effect"] is not None:
            sxx = sum((v - fmean(x)) ** 2 for v in x)
            slope = sum((v - fmean(x)) * (w - fmean(d)) for v, w in zip(x, d, strict=True)) / sxx
            mu = fmean(d) - slope * fmean(x)
            rest = sum((w - mu - slope * v) ** 2 for v, w in zip(x, d, strict=True)) / (n - 2)
            se, df = math.sqrt(rest * (1 / n + fmean(x) ** 2 / sxx)), n - 2
        half = student.ppf(0.975, df) * se
        expected = [math.exp(mu), math.exp(mu - half), math.exp(mu + half)]
        assert [metric[key] for key in ("ratio", "ci_low", "ci_high")] == pytest.approx(expected, rel=1e-9)


def test_the_page_names_no_address_outside_itself_and_is_the_same_each_time(page, directory):
    without_scripts = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"(?:src|href)=\"(?!#|runs/|data:,)[^\"]*\"|url\(|@import", without_scripts) == []
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


def test_names_that_look_like_markup_or_templates_stay_text_everywhere_and_long_ones_are_cut(tmp_path):
    cells = [{"top_k": 5, "value_model": HOSTILE}]
    results = builders.write_results(tmp_path, block_factors=FACTORS[:2], cells=cells)
    builders.edit_manifest(
        results, profile=HOSTILE, label="x" * 1_000_000, dataset=HOSTILE, argv=["benchctl", HOSTILE]
    )
    for run in results.runs():
        config = {"model": HOSTILE}
        builders.edit_run(results, run.path.name, engine_version=HOSTILE, argv=[HOSTILE], effective_config=config)
    run_id = results.runs()[1].path.name
    failure = RunFailure(cause=HOSTILE, message=HOSTILE + "x" * 1_000_000)
    builders.edit_run(results, run_id, state="failed", failure=failure)
    page = directory_page(analyze_directory(tmp_path))
    names = Elements(page).names
    assert {"h1", "table", "svg", "details", "title"} <= names
    assert names & {"img", "onerror", "data-x"} == set()
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL))
    assert html.unescape(text).count(visible(HOSTILE)) >= 8
    assert 1_900 < max(map(len, re.findall("x+", text))) < 2_000  # the data of the page are whole
    assert escaped(page) == page  # no control character anywhere, the data of the page included
    assert data_of(page)["directories"][0]["profile"] == HOSTILE
    spoken = html.unescape(re.search(r'data-arm="(guided [^"]*)"', page)[1])
    assert "<img src=x onerror=alert(1)>" in spoken
    assert "{{ 7 * 7 }} {% raw %} {# none #} &amp;" in spoken


def test_data_and_scripts_cannot_end_their_element_and_every_value_of_a_template_is_there():
    document = inert_json({"text": HOSTILE})
    assert "<" not in document
    assert json.loads(document)["text"] == HOSTILE
    with pytest.raises(ValueError, match="cannot be put into a page"):
        closed("let a = '</ScRiPt>'", "script")
    with pytest.raises(UndefinedError, match="is undefined"):
        render_page({})


def test_a_directory_with_one_variant_says_that_there_is_nothing_to_compare(tmp_path):
    text = text_of(directory_page(analyze_directory(builders.write_results(tmp_path, cells=[]).path)))
    sentence = "nly baseline was planned, so there is nothing to compare it with"
    assert [words for words in ("no verdict", sentence, "000-b0-baseline") if words not in text] == []


def test_an_unfinished_or_damaged_directory_says_so_before_anything_else(tmp_path):
    results = builders.write_results(tmp_path, block_factors=FACTORS, state="running")
    for planned in results.plan().runs[3:]:
        (results.run(planned.run_id).path / "run.json").unlink()
    text = text_of(directory_page(analyze_directory(tmp_path)))
    assert text.index("Unfinished: 3 of 12 runs of built are done.") < text.rindex("Changes against")
    assert "planned" in text
    (results.runs()[1].path / "steps.jsonl").write_text("{")
    builders.edit_manifest(results, state="done")
    page = directory_page(analyze_directory(tmp_path))
    assert text_of(page).index("Damaged: ") < text_of(page).rindex("Runs")
    assert "steps.jsonl" in text_of(page)
    assert data_of(page)["verdict"]["exit_code"] == 4


def test_sides_that_must_not_be_compared_show_each_difference_as_not_allowed(tmp_path):
    a = builders.write_results(tmp_path / "a")
    b = builders.write_results(tmp_path / "b", asks="How much is")
    analyses = [analyze_directory(a.path), analyze_directory(b.path)]
    text = text_of(sides_page((analyses[0], Side(a.path)), (analyses[1], Side(b.path))))
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


def test_a_page_is_written_where_it_was_asked_for_or_in_the_working_directory(directory, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    sides = (f"{directory}:baseline", f"{directory}:guided")
    printed("report", *sides, cwd=tmp_path)
    name = f"report-{directory.name}-baseline-vs-{directory.name}-guided.html"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    printed("report", *sides, "-o", "other.html", cwd=tmp_path)
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / name).read_bytes()
    assert 'href="runs/' not in (tmp_path / name).read_text()
    printed("report", directory, "-o", "elsewhere", cwd=tmp_path)
    files = {path.name for path in (tmp_path / "elsewhere").rglob("*")}
    assert {"report.html", "summary.csv", "sweep_summary.json", "result.json"} <= files
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_the_findings_stand_right_under_the_verdict_with_their_numbers(page, directory):
    findings = analyze_directory(directory).findings
    assert findings
    text = text_of(page).replace("\N{MINUS SIGN}", "-")
    places = [text.index(finding.sentence) for finding in findings]
    assert places == sorted(places)
    assert text.index("exit code 1") < text.index("What follows") < places[0]
    assert places[-1] < text.rindex("Changes against the margin")


def deciding_of(path):
    comparison = compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions())
    return [metric for cell in comparison.cells for metric in cell.deciding]


def test_every_deciding_verdict_has_its_reason_in_the_table_and_a_common_one_once_at_the_top(tmp_path):
    factors = [{"baseline": 1.0, "guided": 0.4 + 0.4 * (i % 3)} for i in range(6)]
    builders.write_results(tmp_path / "wide", block_factors=factors)
    top, _, table = text_of(directory_page(analyze_directory(tmp_path / "wide"))).rpartition("Changes against")
    for metric in deciding_of(tmp_path / "wide"):
        assert (metric.verdict, metric.reason in table) == ("inconclusive", True)
    assert " Why " in top
    builders.write_results(tmp_path / "few", block_factors=FACTORS[:2], cells=[{"top_k": 1}, {"top_k": 5}])
    top, *_ = text_of(directory_page(analyze_directory(tmp_path / "few"))).rpartition("Changes against")
    assert top.count("screening: 2 blocks give no verdict; at least 6 are needed") == 1
    assert "and 4 more: screening" in top


def test_a_decided_verdict_names_the_confidence_that_several_tests_ask_for():
    example = Path(__file__).parents[3] / "results" / "example"
    text = text_of(directory_page(analyze_directory(example)))
    percents = [metric.judged_confidence * 100 for metric in deciding_of(example)]
    assert max(percents) > 95
    for percent in percents:
        assert f"the whole {percent:.4g}% interval is worse than the margin of 1%" in text


def test_a_page_of_several_nodes_has_a_section_by_node_whose_names_are_only_text_and_cut(tmp_path):
    def section_of(name, nodes):
        page = directory_page(analyze_directory(write_on_nodes(tmp_path / name, nodes).path))
        return "".join(re.findall(r'<section class="by-nodes">.*?</section>', page, re.DOTALL))

    assert not section_of("one", ("n1",) * 6)
    section = section_of("three", ("<b>evil", "n" * 300, "over blocks") * 4)
    assert "&lt;b&gt;evil" in section
    assert not any(text in section for text in ("<b>evil", "n" * 60))
    assert section.count("<td>over blocks</td>") == 2 * 3 * 2, "a node of that name and the summary"
