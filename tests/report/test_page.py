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
from support.bonus_directory import measured
from support.cli import benchctl, document, printed, refusal
from support.results.builders import edit_manifest, edit_run, write_results
from support.results.planted import HOSTILE, right, write_answers, write_hostile, write_on_nodes, wrong

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.bonus import measured_bonus, verdict_sentences
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import Side
from benchctl.records.record import RunFailure
from benchctl.report.export import write_report
from benchctl.report.page.page import closed, directory_page, inert_json, render_page, sides_page
from benchctl.report.time_tables import bonus_table
from benchctl.untrusted.text import escaped, visible

EXAMPLE = Path(__file__).parents[2] / "results" / "example"
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]
CELLS = ({"top_k": 1}, {"top_k": 5})


def page_of(path, **options):
    return directory_page(analyze_directory(path), CompareOptions(**options))


def data_of(page):
    (data,) = re.findall(r'<script type="application/json" id="benchctl-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def text_of(page):
    """What a reader sees without scripts."""
    seen = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", seen)))
    return text.replace("\N{MINUS SIGN}", "-")


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results"), block_factors=FACTORS, cells=CELLS).path


@pytest.fixture(scope="module", name="page")
def _page(directory):
    return page_of(directory)


def test_the_verdict_is_the_first_thing_on_the_page_with_its_exit_code_what_decides_and_the_findings(
    page, directory
):
    text = text_of(page)
    heading = re.search(r"<h1.*?</h1>", page, re.DOTALL)[0]
    assert "<svg" in heading
    assert "regression" in heading
    sentences = [finding.sentence for finding in analyze_directory(directory).findings]
    parts = ["guided against baseline (simulated): ", "exit code 1", "What follows", *sentences]
    places = [*map(text.index, parts), text.rindex("Changes against the margin")]
    assert len(places) > 4
    assert places == sorted(places)
    assert "decided by step_ms, tpot_ms, wall_s" in text
    assert "Trust 6 blocks, interleaved" in text


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
    metric = next(m for m, *_ in metrics if m["name"] == "step_ms" and m["cell"] == "top_k=5")
    assert f"{(metric['ratio'] - 1) * 100:+.1f}% [{(metric['ci_low'] - 1) * 100:+.1f}%" in text_of(page)


def test_the_interval_of_a_mean_is_computed_again_from_the_data_in_the_page(directory):
    page = page_of(directory, estimator="mean")
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
    assert page_of(directory) == page


def elements_of(page):
    """The names of all elements and attributes of a page."""
    names, parser = set(), HTMLParser()
    parser.handle_starttag = lambda tag, attrs: names.update([tag], (name for name, _ in attrs))
    parser.feed(page)
    return names


def test_names_and_logs_that_look_like_markup_or_templates_stay_text_everywhere_and_long_ones_are_cut(tmp_path):
    page = page_of(write_hostile(tmp_path / "r"))
    names = elements_of(page)
    assert {"h1", "table", "svg", "details", "title"} <= names
    assert names & {"img", "onerror"} == set()
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL))
    assert html.unescape(text).count(visible(HOSTILE)) >= 8
    assert 1_000 < max(map(len, re.findall("x+", text))) < 2_001  # the data of the page are whole
    assert escaped(page) == page  # no control character anywhere, the data of the page included
    assert data_of(page)["directories"][0]["profile"] == HOSTILE
    spoken = html.unescape(re.search(r'data-arm="(guided [^"]*)"', page)[1])
    assert "<img src=x>" in spoken
    assert "{{ 7*7 }}" in spoken


def test_data_and_scripts_cannot_end_their_element_and_every_value_of_a_template_is_there():
    document = inert_json({"text": HOSTILE})
    assert "<" not in document
    assert json.loads(document)["text"] == HOSTILE
    with pytest.raises(ValueError, match="cannot be put into a page"):
        closed("let a = '</ScRiPt>'", "script")
    with pytest.raises(UndefinedError, match="is undefined"):
        render_page({})


def test_one_variant_an_unfinished_and_a_damaged_directory_are_named_before_anything_else(tmp_path):
    text = text_of(page_of(write_results(tmp_path / "one", cells=[]).path))
    sentence = "nly baseline was planned, so there is nothing to compare it with"
    assert [words for words in ("no verdict", sentence, "000-b0-baseline") if words not in text] == []
    results = write_results(tmp_path / "r", block_factors=FACTORS, state="running")
    for planned in results.plan().runs[3:]:
        (results.run(planned.run_id).path / "run.json").unlink()
    text = text_of(page_of(results.path))
    assert text.index("Unfinished: 3 of 12 runs of built are done.") < text.rindex("Changes against")
    (results.runs()[1].path / "steps.jsonl").write_text("{")
    edit_manifest(results, state="done")
    page = page_of(results.path)
    assert text_of(page).index("Damaged: ") < text_of(page).rindex("Runs")
    assert "steps.jsonl" in text_of(page)
    assert data_of(page)["verdict"]["exit_code"] == 4


def test_sides_that_must_not_be_compared_show_each_difference_as_not_allowed(tmp_path):
    a = write_results(tmp_path / "a").path
    b = write_results(tmp_path / "b", asks="How much is").path
    text = text_of(sides_page(*((analyze_directory(path), Side(path)) for path in (a, b)))[0])
    assert text.index("not comparable") < text.index("exit code 4") < text.index("request_set_sha256")
    assert "NOT allowed" in text


def test_a_failed_run_shows_its_cause_and_the_end_of_its_log(tmp_path):
    results = write_results(tmp_path)
    run_id = results.plan().runs[1].run_id
    edit_run(results, run_id, state="failed", failure=RunFailure(cause="server-died", message="gone"))
    log = b"".join(b"line %d\n" % i for i in range(100)) + b"\xff\n"
    (results.run(run_id).path / "server.log").write_bytes(log)
    page = page_of(tmp_path)
    for words, is_there in (("server-died: gone", True), ("line 61 ", True), ("line 60 ", False)):
        assert (words in text_of(page)) == is_there, words
    assert "\N{REPLACEMENT CHARACTER}" in page
    assert f'href="runs/{run_id}/server.log"' in page


def test_a_page_is_written_where_it_was_asked_for_or_in_the_working_directory(directory, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    sides = (f"{directory}:baseline", f"{directory}:guided")
    printed("report", *sides, cwd=tmp_path)
    (page,) = tmp_path.iterdir()
    assert page.name == f"report-{directory.name}-baseline-vs-{directory.name}-guided.html"
    assert 'href="runs/' not in page.read_text()
    printed("report", *sides, "-o", "other.html", cwd=tmp_path)
    assert (tmp_path / "other.html").read_bytes() == page.read_bytes()
    edit_manifest(write_results(tmp_path / "other"), stop="natural")
    refused = (f"{directory}:baseline", "other:baseline", "-o", "refused.html")
    assert 'stop: "forced" against "natural"' in refusal("report", *refused, cwd=tmp_path, code=4)
    assert "not comparable" in text_of((tmp_path / "refused.html").read_text())
    printed("report", directory, "-o", "elsewhere", cwd=tmp_path)
    files = {path.name for path in (tmp_path / "elsewhere").rglob("*")}
    assert {"report.html", "summary.csv", "sweep_summary.json", "result.json"} <= files
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_figures_for_a_paper_begin_with_the_ratios_and_say_what_is_simulated(directory, tmp_path):
    written = printed("report", directory, "-o", "report", "--figures", "figures", cwd=tmp_path).splitlines()
    figures = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in figures[:6:3]] == ["01-ratios.pdf", "02-block-values.pdf"]
    assert {path.suffix for path in figures} == {".pdf", ".png", ".svg"}
    assert [f"figures/{path.name}, .svg, .pdf" for path in figures[1::3]] == written[: len(figures) // 3]
    assert all("Simulated: no GPU was measured." in path.read_text() for path in figures if path.suffix == ".svg")
    sides = (f"{directory}:baseline", f"{directory}:guided")
    assert "leave out B" in refusal("report", *sides, "--figures", "figures", cwd=tmp_path)


def deciding_of(path):
    comparison = compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions())
    return [metric for cell in comparison.cells for metric in cell.deciding]


def test_every_deciding_verdict_has_its_reason_in_the_table_and_a_common_one_once_at_the_top(tmp_path):
    factors = [{"baseline": 1.0, "guided": 0.4 + 0.4 * (i % 3)} for i in range(6)]
    wide = write_results(tmp_path / "wide", block_factors=factors).path
    _, _, table = text_of(page_of(wide)).rpartition("Changes against")
    for metric in deciding_of(wide):
        assert (metric.verdict, metric.reason in table) == ("inconclusive", True)
    few = write_results(tmp_path / "few", block_factors=FACTORS[:2], cells=CELLS).path
    top, *_ = text_of(page_of(few)).rpartition("Changes against")
    assert top.count("screening: 2 blocks give no verdict; at least 6 are needed") == 1
    assert "and 4 more: screening" in top


def test_a_decided_verdict_names_the_confidence_that_several_tests_ask_for():
    text = text_of(page_of(EXAMPLE))
    percents = [metric.judged_confidence * 100 for metric in deciding_of(EXAMPLE)]
    assert max(percents) > 95
    for percent in percents:
        assert f"the whole {percent:.4g}% interval is worse than the margin of 1%" in text


def test_a_page_of_several_nodes_has_a_section_by_node_whose_names_are_only_text_and_cut(tmp_path):
    def section_of(name, nodes):
        page = page_of(write_on_nodes(tmp_path / name, nodes).path)
        return "".join(re.findall(r'<section class="by-nodes">.*?</section>', page, re.DOTALL))

    assert not section_of("one", ("n1",) * 6)
    section = section_of("three", ("<b>evil", "n" * 300, "over blocks") * 4)
    assert "&lt;b&gt;evil" in section
    assert not any(text in section for text in ("<b>evil", "n" * 60))
    assert section.count("<td>over blocks</td>") == 2 * 3 * 2, "a node of that name and the summary"


def every_third_wrong(variant, block, i, sample):
    return wrong(i) if variant == "guided" and i % 3 == 0 else right(i)


def answers_of(page):
    """What a reader sees in the sections of the page on answers."""
    return [
        text_of(part).strip() for part in re.findall(r'<section class="answers">.*?</section>', page, re.DOTALL)
    ]


def test_worse_answers_stand_on_the_page_and_decide_it_with_a_margin_of_quality(tmp_path):
    """20 of 60 questions are answered worse in each of 6 blocks, so that 240 texts of 360 are alike."""
    results = write_answers(tmp_path / "r", every_third_wrong, num_questions=60, blocks=6)
    options = {"margin_frac": 0.8, "metrics": ("ttft_ms",)}
    page = page_of(results.path, **options)
    (section,) = answers_of(page)
    assert section.startswith("Answers top_k=5 regression decides nothing: no margin of quality was set ")
    for text in (
        "Accuracy 100.0 % against 66.7 %: -33.3 points [-",
        "60 questions (20 better in A, 0 in B)",
        "judge numeric 2",
        "Identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 % (300 of 300)",
    ):
        assert text in section
    places = [page.index(f'<section class="{name}') for name in ("numbers", "answers", "charts")]
    assert places == sorted(places)
    deciding = page_of(results.path, quality_margin_points=2.0, **options)
    assert "regression at a margin of 2" in answers_of(deciding)[0]
    assert "decides nothing" not in answers_of(deciding)[0]
    assert ("<title>regression: " in deciding, "<title>regression: " in page) == (True, False)
    for run in results.runs():
        edit_run(results, run.path.name, clock="virtual")
    assert answers_of(page_of(results.path)) == [], "a simulator made up the texts"


def test_divergence_pass_at_k_and_what_is_not_judged_are_told_and_no_text_of_an_answer_gets_onto_the_page(tmp_path):
    """To every tenth question one side has other words, with one at the end; the texts stay with the runs."""

    def worded_otherwise(variant, block, i, sample):
        return f"{right(i)} indeed<img src=x onerror=alert()>" if variant == "guided" and i % 10 == 0 else right(i)

    def one_sample_of_two(variant, block, i, sample):
        return wrong(i) if variant == "guided" and sample == 1 else right(i)

    for said, options, words in (
        (
            worded_otherwise,
            {},
            ["100.0 %: +0.0 points", "Identical texts 90.0 % (324 of 360)", "others part after "],
        ),
        (one_sample_of_two, {"n": 2}, ["Pass@1 100.0 % against 50.0 %, pass@2 100.0 % against 100.0 %"]),
        (every_third_wrong, {"stop": "forced"}, ["Answers are not judged: ", "measured with stop: forced, where"]),
    ):
        path = write_answers(tmp_path / said.__name__, said, num_questions=60, blocks=6, **options).path
        page = page_of(path)
        (section,) = answers_of(page)
        assert [each for each in words if each not in section] == []
        assert ("Accuracy" in section) == (options != {"stop": "forced"})
        assert "onerror=alert" not in page


@pytest.fixture(name="bonus", scope="module")
def _bonus(tmp_path_factory) -> Path:
    """What ``micro bonus`` measured of passes with planted times."""
    return measured(tmp_path_factory.mktemp("bonus"), batch_sizes=(2, 4), blocks=6)


@pytest.fixture(scope="module", name="bonus_page")
def _bonus_page(bonus) -> str:
    return page_of(bonus)


def backfill_of(page):
    (section,) = re.findall(r'<section class="backfill">(.*?)</section>', page, re.DOTALL)
    return html.unescape(section).replace("\N{MINUS SIGN}", "-")


def test_the_page_has_every_row_and_every_sentence_of_the_verdict_on_backfill_and_its_exit_code_at_the_top(
    bonus, bonus_page, page
):
    section = backfill_of(bonus_page)
    (verdict,) = measured_bonus(bonus).verdicts
    assert len(verdict.comparisons) == 4 * (2 + 3)
    rows = [row for modes in verdict.mode_pairs for row in bonus_table(verdict, modes).texts()]
    assert re.findall(r"<td[^>]*>(.*?)</td>", section) == [text for row in rows for text in row]
    sentences = [sentence.lower() for sentence in re.findall(r"<li>(.*?)</li>", section)]
    assert sentences == [text.lower() for text in verdict_sentences(verdict)]
    assert "256 tokens in the cache of each sequence" in section
    assert "llama-68m, float16, on AMD EPYC" in section
    top = html.unescape(re.search(r"<header>(.*?)</header>", bonus_page, re.DOTALL)[1])
    assert '<section class="backfill">' not in page
    code = benchctl("micro", "bonus", bonus).returncode
    assert (f"exit code {code}" in top, "decided</span></h1>" in top) == (True, code == 0)
    assert all(sentence in top.lower() for sentence in sentences[:-1])


@pytest.mark.usefixtures("without_pictures")
def test_page_show_summary_and_command_have_the_same_verdicts_on_backfill(bonus, bonus_page):
    of_command, shown = document("micro", "bonus", bonus), document("show", bonus)["bonus"]
    write_report(bonus)
    stored = json.loads((bonus / "summary.json").read_text())["bonus"]
    (on_page,) = data_of(bonus_page)["directories"]
    assert on_page["bonus"] == shown
    assert shown["verdicts"] == stored["verdicts"] == of_command["verdicts"]
    lines = [line for line in printed("show", bonus).splitlines() if line.startswith("* ")]
    output = printed("micro", "bonus", bonus)
    assert "* decode and prefill with graphs: batch expansion is cheaper from batch 2 on (measured" in output
    assert len(lines) >= 5
    assert all(line in output for line in lines[:5])


def test_too_few_blocks_decide_nothing_and_each_context_has_a_heading_and_a_table_of_its_own(tmp_path):
    """It is the passes, and not the name of the profile, that say that ways of backfill are compared."""
    page = page_of(measured(tmp_path, batch_sizes=(2,), modes=("eager",), contexts=(64, 2048), blocks=2, name="o"))
    top = re.search(r"<header>(.*?)</header>", page, re.DOTALL)[1]
    for text in ("inconclusive</span></h1>", "0 of 4 comparisons are decided; ", "exit code 3"):
        assert text in top
    section = backfill_of(page)
    assert re.findall(r"<h3>(\d+) tokens in the cache", section) == ["64", "2048"]
    assert section.count("<table>") == 2
    assert section.count("no verdict from 2 blocks; 6 are the least that give one") == 2
