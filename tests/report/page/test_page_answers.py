"""The section of the report page on what is answered: there where answers were judged, with their numbers."""

import html
import re
from pathlib import Path

import pytest
from support.browser import DESKTOP, chromium, look_at_all, needs_browser, opened
from support.results.answered_questions import Said, right, write_answers, wrong
from support.results.builders import edit_run

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results
from benchctl.report.page.page import directory_page

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


def section_of(page: str) -> str | None:
    found = re.search(r'<section class="answers">(.*?)</section>', page, re.DOTALL)
    return None if found is None else found[1]


def said_in(page: str) -> str:
    """What a reader sees in the section without scripts."""
    section = section_of(page)
    assert section is not None
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))).strip()


def test_worse_answers_stand_on_the_page_with_both_accuracies_and_the_difference(tmp_path: Path) -> None:
    """20 of 60 questions are answered worse in each of 6 blocks, so that 240 texts of 360 are alike."""
    said = said_in(page_of(written(tmp_path / "r").path))
    assert said.startswith("Answers top_k=5 regression decides nothing: no margin of quality was set ")
    assert f"Accuracy 100.0 % against 66.7 %: {MINUS}33.3 points [{MINUS}" in said
    assert "60 questions (20 better in A, 0 in B)" in said
    assert "judge numeric 2" in said
    assert "Identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 % (300 of 300)" in said


def test_with_a_margin_of_quality_the_answers_decide_the_page(tmp_path: Path) -> None:
    path = written(tmp_path / "r").path
    page = page_of(path, quality_margin_points=2.0)
    assert "regression at a margin of 2" in said_in(page)
    assert "decides nothing" not in said_in(page)
    assert "<title>regression: " in page
    assert "<title>regression: " not in page_of(path)


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


def test_texts_that_a_simulator_made_up_have_no_section(tmp_path: Path) -> None:
    results = written(tmp_path / "r")
    for run in load_results(results.path).runs:
        edit_run(results, run.record.run_id, clock="virtual")
    assert section_of(page_of(results.path)) is None


def test_what_an_answer_says_never_gets_onto_the_page(tmp_path: Path) -> None:
    """A page tells how good answers are; the texts, which may be anything, stay with the runs."""
    hostile = "<img src=x onerror=alert(1)>"

    def rude(variant: str, block: int, i: int, sample: int) -> str:
        return f"{hostile}{right(i)}" if variant == "guided" else right(i)

    page = page_of(written(tmp_path / "r", rude).path)
    assert "Accuracy" in said_in(page)
    assert "onerror=alert" not in page


@needs_browser
@pytest.mark.browser
def test_a_browser_shows_the_section_between_the_numbers_and_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "r"
    written(path)
    (path / "report.html").write_text(page_of(path))
    with chromium() as browser, opened(browser, path / "report.html", DESKTOP) as page:
        look_at_all(page)
        tops = [page.locator(f"section.{name}").bounding_box()["y"] for name in ("numbers", "answers", "charts")]
        assert tops == sorted(tops)
        shown = page.locator("section.answers")
        assert shown.locator(".badge").inner_text() == "regression"
        assert shown.locator("li").count() == 2
