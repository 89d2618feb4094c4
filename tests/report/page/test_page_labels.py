"""Labels that look like markup, entities or formulas are drawn as they are, in charts and in pictures."""

import pytest
from support.browser import chromium, look_at_all, needs_browser, opened
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.ratios import sweep_name
from benchctl.report.charts.steps import stacked_bars
from benchctl.report.page.page import directory_page

LABEL = '<a href="https://evil.example">go</a><b>&lt;c\x1b[31m\u202e'
SHOWN = '<a href="https://evil.example">go</a><b>&lt;c\\x1b[31m\\u202e'
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]


@pytest.mark.browser
@needs_browser
def test_a_browser_draws_labels_as_they_are(tmp_path) -> None:
    results = builders.write_results(
        tmp_path, block_factors=FACTORS, cells=[{"value_model": value} for value in (LABEL, "other")]
    )
    builders.write_samples(results)
    path = tmp_path / "report.html"
    path.write_text(directory_page(analyze_directory(tmp_path)), encoding="utf-8")
    with chromium() as browser, opened(browser, path) as page:
        look_at_all(page)
        page.wait_for_function("document.querySelectorAll('[data-chart] svg.marks').length > 0")
        page.wait_for_timeout(300)
        texts = page.evaluate("Array.from(document.querySelectorAll('svg.marks text'), (e) => e.textContent)")
        assert any(SHOWN in text for text in texts)
        assert page.locator("svg.marks a").count() == 0
        options = page.locator("select[data-choice=arm] option").all_text_contents()
        assert any(SHOWN in option for option in options)


@pytest.mark.browser
@needs_browser
def test_block_values_saved_from_the_page_hold_no_formula(tmp_path) -> None:
    builders.write_results(tmp_path, block_factors=FACTORS)
    path = tmp_path / "report.html"
    text = directory_page(analyze_directory(tmp_path)).replace('"b":"guided"', '"b":"=cmd()"')
    path.write_text(text, encoding="utf-8")
    with chromium() as browser, opened(browser, path) as page:
        with page.expect_download() as download:
            page.locator("[data-save=csv]").click()
        rows = download.value.path().read_text(encoding="utf-8").splitlines()
    assert rows[1].startswith("'=cmd() against baseline,")
    assert rows[1].split(",")[-1][0].isdecimal()


def test_a_picture_shows_markup_and_controls_as_text_and_a_long_label_leaves_room() -> None:
    hostile = ["<b>$\\frac$", "datum.x", "\x1b[31m\x07\u202e", "\ud800", "x" * 10_000]
    spec = stacked_bars([(label, {label: 1.0}) for label in hostile], "<i>x")
    svg = picture_bytes(spec, "<title>\x1b", suffix=".svg").decode()
    assert "&lt;b&gt;$\\frac$" in svg
    assert "\\x1b[31m\\x07\\u202e" in svg
    assert "<b>" not in svg
    assert "x" * 400 not in svg
    assert picture_bytes(spec, "<title>\x1b").startswith(b"\x89PNG")


def test_the_name_of_a_picture_is_one_part_of_a_path() -> None:
    cells = [{"a/../../b.c": number, "d": number} for number in (1, 2)]
    assert sweep_name(cells) == "a_______b_c_d_sweep.png"
