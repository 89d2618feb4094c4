"""Sections of the report page on what is answered and on backfill: there where they were judged, with numbers."""

import html
import json
import re
from pathlib import Path

import pytest
from support.bonus_directory import LISTENER, launch_bound, measured
from support.cli import benchctl, document, printed
from support.fake_passes import FakeWorkers
from support.results.answered_questions import Said, right, write_answers, wrong
from support.results.builders import edit_run

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.bonus import measured_bonus, verdict_sentences
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.measure.directory import Origin
from benchctl.micro.experiment import measure_forward
from benchctl.micro.points import forward_profile, grid_of_points
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results
from benchctl.report.documents import summary_document
from benchctl.report.export import write_report
from benchctl.report.page.page import directory_page
from benchctl.report.time_tables import bonus_table

MINUS = "\N{MINUS SIGN}"


def every_third_wrong(variant: str, block: int, i: int, sample: int) -> str:
    return wrong(i) if variant == "guided" and i % 3 == 0 else right(i)


def worded_otherwise_in_tens(variant: str, block: int, i: int, sample: int) -> str:
    """As good an answer to each question; to every tenth the other side has other words, with one at the end."""
    return f"{right(i)} indeed" if variant == "guided" and i % 10 == 0 else right(i)


def written(path: Path, said: Said = every_third_wrong, stop: str = "natural", n: int = 1) -> ResultDirectory:
    return write_answers(path, said, num_questions=60, blocks=6, stop=stop, n=n)


def page_of(path: Path, **options: float) -> str:
    return directory_page(analyze_directory(path), CompareOptions(margin_frac=0.8, metrics=("ttft_ms",), **options))


def sections_of(page: str) -> list[str]:
    return re.findall(r'<section class="answers">(.*?)</section>', page, re.DOTALL)


def said_in(page: str) -> str:
    """What a reader sees in the section without scripts."""
    (section,) = sections_of(page)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))).strip()


def test_worse_answers_stand_on_the_page_and_decide_it_with_a_margin_of_quality(tmp_path: Path) -> None:
    """20 of 60 questions are answered worse in each of 6 blocks, so that 240 texts of 360 are alike."""
    path = written(tmp_path / "r").path
    page = page_of(path)
    said = said_in(page)
    assert said.startswith("Answers top_k=5 regression decides nothing: no margin of quality was set ")
    for text in (
        f"Accuracy 100.0 % against 66.7 %: {MINUS}33.3 points [{MINUS}",
        "60 questions (20 better in A, 0 in B)",
        "judge numeric 2",
        "Identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 % (300 of 300)",
    ):
        assert text in said
    places = [page.index(f'<section class="{name}') for name in ("numbers", "answers", "charts")]
    assert places == sorted(places)
    deciding = page_of(path, quality_margin_points=2.0)
    assert "regression at a margin of 2" in said_in(deciding)
    assert "decides nothing" not in said_in(deciding)
    assert ("<title>regression: " in deciding, "<title>regression: " in page) == (True, False)
    for run in load_results(path).runs:
        edit_run(ResultDirectory(path), run.record.run_id, clock="virtual")
    assert sections_of(page_of(path)) == [], "a simulator made up the texts"


def test_other_words_for_the_same_answers_are_a_divergence_and_no_loss(tmp_path: Path) -> None:
    said = said_in(page_of(written(tmp_path / "r", worded_otherwise_in_tens).path))
    assert "Accuracy 100.0 % against 100.0 %: +0.0 points" in said
    assert "Identical texts 90.0 % (324 of 360)" in said
    assert "others part after " in said


def test_several_samples_of_a_question_are_told_as_pass_at_k(tmp_path: Path) -> None:
    def one_sample_of_two(variant: str, block: int, i: int, sample: int) -> str:
        return wrong(i) if variant == "guided" and sample == 1 else right(i)

    said = said_in(page_of(written(tmp_path / "r", one_sample_of_two, n=2).path))
    assert "Accuracy 100.0 % against 50.0 %" in said
    assert "Pass@1 100.0 % against 50.0 %, pass@2 100.0 % against 100.0 %" in said


def test_answers_that_were_not_judged_have_the_reason_in_the_place_of_a_judgement(tmp_path: Path) -> None:
    said = said_in(page_of(written(tmp_path / "r", stop="forced").path))
    assert "Answers are not judged: " in said
    assert "measured with stop: forced, where answers run on past their end" in said
    assert "Accuracy" not in said


def test_what_an_answer_says_never_gets_onto_the_page(tmp_path: Path) -> None:
    """A page tells how good answers are; the texts, which may be anything, stay with the runs."""
    hostile = "<img src=x onerror=alert(1)>"

    def rude(variant: str, block: int, i: int, sample: int) -> str:
        return f"{hostile}{right(i)}" if variant == "guided" else right(i)

    page = page_of(written(tmp_path / "r", rude).path)
    assert "Accuracy" in said_in(page)
    assert "onerror=alert" not in page


EXAMPLE = Path("results/example")


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory) -> Path:
    return measured(tmp_path_factory.mktemp("bonus"), batch_sizes=(2, 4), blocks=6)


@pytest.fixture(name="page", scope="module")
def _page(directory) -> str:
    return directory_page(analyze_directory(directory))


def section_of(page: str) -> str:
    (section,) = re.findall(r'<section class="backfill">(.*?)</section>', page, re.DOTALL)
    return html.unescape(section).replace("\N{MINUS SIGN}", "-")


def bonus_in_data(page: str):
    (data,) = re.findall(r'<script type="application/json" id="benchctl-data">(.*?)</script>', page, re.DOTALL)
    return [directory.get("bonus") for directory in json.loads(data)["directories"]]


def is_without_verdict(path: Path) -> bool:
    """Nothing on the page, in its data and in the summary speaks of backfill."""
    analysis = analyze_directory(path)
    page = directory_page(analysis)
    is_absent = '<section class="backfill">' not in page and bonus_in_data(page) == [None]
    return is_absent and analysis.bonus is None and "bonus" not in summary_document(analysis)


def test_the_page_has_every_row_and_every_sentence_of_the_verdict(page, directory):
    section = section_of(page)
    (verdict,) = measured_bonus(directory).verdicts
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section)
    assert cells == [
        text for modes in verdict.mode_pairs for row in bonus_table(verdict, modes).texts() for text in row
    ]
    assert len(verdict.comparisons) == 4 * (2 + 3)
    sentences = re.findall(r"<li>(.*?)</li>", section)
    assert [sentence.lower() for sentence in sentences] == [text.lower() for text in verdict_sentences(verdict)]
    assert sentences[-1].endswith("of each, over 6 blocks")
    assert "256 tokens in the cache of each sequence" in section
    assert "llama-68m, float16, on AMD EPYC" in section


def test_the_top_of_the_page_is_the_answer_on_backfill_with_the_exit_code_of_the_command(page, directory):
    top = html.unescape(re.search(r"<header>(.*?)</header>", page, re.DOTALL)[1])
    done = benchctl("micro", "bonus", directory)
    assert f"exit code {done.returncode}" in top
    (verdict,) = measured_bonus(directory).verdicts
    assert all(sentence.lower() in top.lower() for sentence in verdict_sentences(verdict)[:-1])
    assert ("decided</span></h1>" in top) == (done.returncode == 0)
    assert "graph" in re.findall(r'<ul class="each">(.*?)</ul>', top, re.DOTALL)[0], "modes are compared beside it"


def test_page_show_summary_and_command_have_the_same_rows_and_sentences(page, directory):
    bonus, shown = document("micro", "bonus", directory), document("show", directory)["bonus"]
    write_report(directory)
    stored = json.loads((directory / "summary.json").read_text())["bonus"]
    assert len(bonus["verdicts"][0]["comparisons"]) == 20
    assert shown["verdicts"] == stored["verdicts"] == bonus["verdicts"]
    assert bonus_in_data(page) == [shown]
    lines = [line for line in printed("show", directory).splitlines() if line.startswith("* ")]
    output = printed("micro", "bonus", directory)
    assert "* decode and prefill with graphs: batch expansion is cheaper from batch 2 on (measured" in output
    assert len(lines) >= 5
    assert all(line in output for line in lines[:5])


def test_too_few_blocks_decide_nothing_and_each_context_has_a_heading_and_a_table_of_its_own(tmp_path):
    """It is the passes, and not the name of the profile, that say that ways of backfill are compared."""
    path = measured(tmp_path, batch_sizes=(2,), modes=("eager",), contexts=(64, 2048), blocks=2, name="other")
    assert "bonus" not in path.parent.name
    page = directory_page(analyze_directory(path))
    top = re.search(r"<header>(.*?)</header>", page, re.DOTALL)[1]
    for text in ("inconclusive</span></h1>", "0 of 4 comparisons are decided; ", "exit code 3"):
        assert text in top
    section = section_of(page)
    assert re.findall(r"<h3>(\d+) tokens in the cache", section) == ["64", "2048"]
    assert section.count("<table>") == 2
    assert section.count("no verdict from 2 blocks; 6 are the least that give one") == 2
    assert bonus_in_data(page)[0]["verdicts"]


def test_what_compares_no_ways_of_backfill_has_no_such_section(tmp_path):
    assert is_without_verdict(EXAMPLE)
    for context in (0, 256):
        points = grid_of_points(("decode", "prefill"), (1, 2, 4), (context,), (1,))
        settings = {"model": "llama-68m", "device": "cpu", "dtype": "float16", "modes": ("eager",), "blocks": 1}
        origin = Origin(output_root=tmp_path / f"{context}", argv=("benchctl", "micro", "forward"))
        workers = FakeWorkers(launch_bound)
        profile = forward_profile(points, replays=4, **settings)
        assert is_without_verdict(measure_forward(profile, origin, LISTENER, workers.start).path)


def test_an_interrupted_measurement_is_shown_with_what_is_missing(tmp_path):
    workers = FakeWorkers(launch_bound, error=KeyboardInterrupt(), fails_at=3)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, batch_sizes=(2,), modes=("eager",), workers=workers)
    (path,) = (path for path in tmp_path.glob("*/*") if not path.is_symlink())
    section = section_of(directory_page(analyze_directory(path)))
    sentence = "2 of 2 comparisons behind 256 tokens in the cache are missing, at batch 2: "
    assert sentence in section
    assert "<table>" not in section
    assert sentence in printed("show", path)
