"""The report page under the hand: contents, selectors, filters, folds, and its size; by mouse and by keyboard."""

import base64
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.browser import DESKTOP, chromium, look_at_all, needs_browser, opened
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.page.page import directory_page

pytestmark = [pytest.mark.browser, needs_browser]
EXAMPLE = Path(__file__).parents[3] / "results" / "example"
PHONE = {"width": 390, "height": 844}
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]
MOST_BYTES = 2_000_000
DRAWN = "(id) => document.querySelector(`[data-chart='${id}'] svg.marks`) !== null"
NUM_SVGS = "Array.from(document.querySelectorAll('[data-chart]'), (c) => c.querySelectorAll('svg.marks').length)"
MARKS = """(id) => Array.from(document.querySelectorAll(
    `[data-chart='${id}'] .mark-line.role-mark path, [data-chart='${id}'] .mark-rule.role-mark line`),
    (e) => e.getAttribute("d") ?? e.outerHTML)"""
TEXTS = "(id) => Array.from(document.querySelectorAll(`[data-chart='${id}'] text`), (e) => e.textContent)"


@pytest.fixture(scope="module", name="browser")
def _browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory):
    """Six blocks of six arms, each run with other step times and with samples of every kind."""
    directory = tmp_path_factory.mktemp("results")
    cells = [{"top_k": k} for k in (1, 2, 3, 4, 5)]
    results = builders.write_results(directory, block_factors=FACTORS, cells=cells, num_requests=12)
    builders.write_samples(results)
    path = directory / "report.html"
    path.write_text(directory_page(analyze_directory(directory)))
    return path


@pytest.fixture(scope="module", name="example")
def _example(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "report.html"
    path.write_text(directory_page(analyze_directory(EXAMPLE)))
    return path


def show(page, chart_id):
    page.locator(f"#{chart_id}").scroll_into_view_if_needed()
    page.wait_for_function(DRAWN, arg=chart_id)


def test_a_page_of_usual_size_is_no_larger_than_two_megabytes(path, example):
    assert path.stat().st_size < MOST_BYTES
    assert example.stat().st_size < MOST_BYTES


def test_every_link_of_the_contents_leads_to_a_heading_on_the_page_in_its_order(browser, path):
    with opened(browser, path) as page:
        side = page.locator("nav.side a")
        assert side.first.is_visible()
        assert not page.locator("nav.contents").is_visible()
        tops = []
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        for i in range(1, side.count()):
            target = page.locator(f"[id='{side.nth(i).get_attribute('href')[1:]}']")
            assert target.count() == 1
            tops.append(target.bounding_box()["y"])
        assert len(tops) > 8
        assert tops == sorted(tops)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
        page.get_by_role("link", name="Runs", exact=True).click()
        page.wait_for_function("document.querySelector('.runs-fold').open")
        page.wait_for_function("Math.abs(document.querySelector('#runs-1').getBoundingClientRect().top) < 200")


def test_on_a_phone_the_contents_are_folded_and_fold_again_after_a_choice(browser, path):
    with opened(browser, path, PHONE) as page:
        assert not page.locator("nav.side").is_visible()
        page.locator("nav.contents summary").click()
        page.locator("nav.contents").get_by_role("link", name="Latency", exact=True).click()
        assert not page.locator("nav.contents").get_by_role("link", name="Latency", exact=True).is_visible()
        page.wait_for_function("Math.abs(document.querySelector('#latency').getBoundingClientRect().top) < 200")


def changed(page, chart_id, before):
    """The marks of a chart once they are others than before."""
    page.wait_for_function(
        f"([id, before]) => JSON.stringify(({MARKS})(id)) !== before",
        arg=[chart_id, json.dumps(before, separators=(",", ":"), ensure_ascii=False)],
    )
    return page.evaluate(MARKS, chart_id)


def test_another_block_and_one_arm_of_it_are_shown_when_they_are_chosen(browser, path):
    with opened(browser, path) as page:
        show(page, "step-time")
        before = page.evaluate(MARKS, "step-time")
        page.locator("#step-time [data-choice=block]").select_option("3")
        after = changed(page, "step-time", before)
        assert len(after) == len(before) == 2 * 6  # two panels of six arms
        assert "block 3, all arms" in page.locator("#step-time .shown").inner_text()
        page.locator("#step-time [data-choice=arm]").select_option("guided top_k=4")
        assert len(changed(page, "step-time", after)) == 2


def test_the_other_arm_of_the_requests_is_chosen_by_the_keyboard(browser, path):
    with opened(browser, path) as page:
        show(page, "request-timeline")
        before = page.evaluate(MARKS, "request-timeline")
        assert {"baseline", "guided top_k=5"} <= set(page.evaluate(TEXTS, "request-timeline"))
        page.get_by_label("Below baseline").focus()
        page.keyboard.press("ArrowUp")
        changed(page, "request-timeline", before)
        texts = page.evaluate(TEXTS, "request-timeline")
        assert {"baseline", "guided top_k=4"} <= set(texts)
        assert "guided top_k=5" not in texts


def test_distributions_show_the_latency_that_is_chosen_and_a_logarithmic_axis(browser, path):
    with opened(browser, path) as page:
        show(page, "latencies")
        tpot = page.evaluate(MARKS, "latencies")
        assert len(tpot) == 6 * (6 + 1)  # a line for each block and one for the arm
        page.locator("#latencies [data-choice=latency]").select_option("e2el")
        e2el = changed(page, "latencies", tpot)
        assert len(e2el) == len(tpot)
        switch = page.get_by_role("button", name="Logarithmic axis")
        switch.press("Enter")
        assert len(changed(page, "latencies", e2el)) == len(tpot)
        assert switch.get_attribute("aria-pressed") == "true"


def test_runs_are_folded_and_can_be_filtered_and_sorted(browser, path):
    with opened(browser, path) as page:
        rows = page.locator("table.runs tbody tr:visible")
        assert rows.count() == 0
        page.locator(".runs-fold > summary").click()
        assert rows.count() == 36
        page.locator("[data-filter=arm]").select_option("guided top_k=3")
        assert rows.count() == 6
        page.locator("[data-filter=text]").fill("b4-")
        assert rows.count() == 1
        assert page.locator("[data-filter=count]").inner_text() == "1 of 36 runs"
        page.locator("[data-filter=arm]").select_option("")
        assert rows.count() == 6
        page.locator("[data-filter=text]").fill("")
        step_ms = (
            "Array.from(document.querySelectorAll('table.runs tbody tr'), (r) => Number(r.cells[4].textContent))"
        )
        heading = page.locator("table.runs thead th").nth(4)
        assert heading.inner_text().startswith("step ms")
        heading.get_by_role("button").press("Enter")
        values = page.evaluate(step_ms)
        assert values == sorted(values)
        assert heading.get_attribute("aria-sort") == "ascending"
        heading.get_by_role("button").click()
        assert page.evaluate(step_ms) == sorted(values, reverse=True)


@pytest.mark.parametrize("which", ["path", "example"])
def test_nothing_is_wider_than_a_phone_with_everything_unfolded(browser, which, request):
    with opened(browser, request.getfixturevalue(which), PHONE) as page:
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        look_at_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        wide = page.evaluate(
            "Array.from(document.querySelectorAll('.wide'), (e) => [e.tabIndex, e.ariaLabel, e.role])"
        )
        assert wide
        assert all(tab == 0 and label and role == "region" for tab, label, role in wide)


def test_headings_never_skip_a_level_and_every_table_says_what_it_is(browser, path):
    with opened(browser, path) as page:
        levels = page.evaluate(
            "Array.from(document.querySelectorAll('h1, h2, h3, h4'), (h) => Number(h.tagName[1]))"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        tables = page.evaluate(
            "Array.from(document.querySelectorAll('table'), (t) => t.caption?.textContent ?? '')"
        )
        assert len(tables) > 4
        assert all(tables)
        scopes = page.evaluate("Array.from(document.querySelectorAll('th'), (h) => h.scope)")
        assert set(scopes) <= {"col", "row", "rowgroup"}
        unnamed = page.evaluate(
            "Array.from(document.querySelectorAll('select, input')).filter((e) => !e.labels.length).length"
        )
        assert unnamed == 0


def test_before_printing_charts_in_folds_are_drawn_too_and_folded_again_after(browser, path):
    with opened(browser, path, DESKTOP) as page:
        page.wait_for_timeout(300)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        for _ in range(100):  # the policy of the page lets no string be evaluated again and again
            page.wait_for_timeout(50)
            if page.evaluate(f"Math.min(...{NUM_SVGS})") > 0:
                break
        assert page.evaluate(f"Math.min(...{NUM_SVGS})") > 0
        assert page.locator("details.fold:not([open])").count() == 0
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details.fold:not([open])").count() > 0


def test_the_series_of_the_charts_are_in_the_data_of_the_page(browser, path):
    with opened(browser, path) as page:
        data = json.loads(page.locator("#benchctl-data").text_content())
    chart = next(chart for chart in data["charts"] if chart["id"] == "step-time")
    assert {choice["name"]: choice["selected"] for choice in chart["choices"]} == {"block": "0", "arm": "*"}
    rows = json.loads(gzip.decompress(base64.b64decode(chart["spec"]["datasets"])))["rows"]
    assert {row["block"] for row in rows} == {"0", "1", "2", "3", "4", "5"}
