"""The report page in a real browser: silent, alone, readable at any width, in any light, on paper."""

import csv
import io
import json

import pytest
from support.browser import CONTRAST, DESKTOP, PHONE, chromium, look_at_all, needs_browser, opened
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.records.run import RunFailure
from benchctl.report.page.build import directory_page

pytestmark = [pytest.mark.browser, needs_browser]
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>"
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]


@pytest.fixture(scope="module", name="browser")
def _browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory):
    """A page of a directory with samples of every kind."""
    directory = tmp_path_factory.mktemp("results")
    results = builders.write_results(directory, block_factors=FACTORS, cells=[{"top_k": k} for k in (1, 2, 5)])
    builders.write_samples(results)
    path = directory / "report.html"
    path.write_text(directory_page(analyze_directory(directory)))
    return path


def drawn_charts(page):
    """Of every chart that has a figure, the number of marks in it."""
    return page.evaluate(
        "Array.from(document.querySelectorAll('[data-chart]')).filter((c) => c.checkVisibility()).map((c) => "
        "c.querySelectorAll('svg.main-svg path, svg.main-svg .point').length)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_verdict_is_in_view_at_once_and_nothing_is_wider_than_the_window(browser, path, size, scheme):
    with opened(browser, path, size, color_scheme=scheme) as page:
        for selector in ("h1", ".lead", ".rules"):
            box = page.locator(selector).bounding_box()
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= size["height"]
        look_at_all(page)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_every_chart_is_drawn_when_it_comes_into_view_and_none_before(browser, path, size):
    with opened(browser, path, size) as page:
        assert page.evaluate("typeof Plotly") == "undefined"
        page.locator(".charts details.fold > summary").click()
        look_at_all(page)
        page.wait_for_function("document.querySelectorAll('[data-chart] svg.main-svg').length > 0")
        page.wait_for_timeout(200)
        marks = drawn_charts(page)
        assert len(marks) >= 6
        assert min(marks) > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_light_and_on_dark(browser, path, scheme):
    with opened(browser, path, color_scheme=scheme) as page:
        for selector in ("p", "td", "th", "h1", "h2", ".badge", ".key", "a", "summary", "small", ".quiet", "dt"):
            ratios = page.evaluate(CONTRAST, selector)
            assert ratios
            assert min(ratios) >= 4.5, selector


def test_the_choice_of_colours_goes_over_that_of_the_system(browser, path):
    with opened(browser, path, color_scheme="light") as page:
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.get_by_role("button", name="Dark").click()
        dark = page.evaluate(paper)
        assert dark != light
        page.reload()
        assert page.evaluate(paper) == dark
        page.get_by_role("button", name="Light").click()
        assert page.evaluate(paper) == light


def test_without_scripts_the_verdict_the_plot_and_all_tables_are_there_and_no_button_is(browser, path):
    with opened(browser, path, PHONE, java_script_enabled=False) as page:
        assert page.locator("h1").is_visible()
        assert page.locator(".forest-row .marker").first.is_visible()
        assert page.locator("table.metrics.main td.change").first.is_visible()
        page.locator(".runs-fold > summary").click()
        assert page.locator("table.runs td").first.is_visible()
        assert page.locator(".controls:visible").count() == 0
        assert page.locator(".term[title]").count() > 50


def test_a_number_tells_what_it_is_under_the_pointer_a_finger_and_the_keyboard(browser, path):
    with opened(browser, path) as page:
        term, tip = page.locator("td.change .term").first, page.locator("#tip")
        assert not tip.is_visible()
        term.hover()
        assert "interval over 6 blocks" in tip.inner_text()
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        page.mouse.move(1, 1)
        term.focus()
        assert tip.is_visible()
    with opened(browser, path, PHONE, has_touch=True) as page:
        page.locator("td.value .term").first.tap()
        tip = page.locator("#tip")
        assert "Geometric mean over 6 blocks" in tip.inner_text()
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]


def test_paper_is_light_has_every_chart_and_no_buttons(browser, path):
    with opened(browser, path, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        page.wait_for_timeout(300)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert min(drawn_charts(page)) > 0
        assert page.locator(".controls:visible").count() == 0
        widths = page.evaluate(
            "Array.from(document.querySelectorAll('[data-chart] svg.main-svg'), (s) => s.clientWidth)"
        )
        assert max(widths) <= 720
        content = page.pdf(format="A4")
        assert content.startswith(b"%PDF")
        assert content.count(b"/Type /Page") > 3


def test_hostile_names_logs_and_messages_are_only_text(browser, tmp_path):
    results = builders.write_results(tmp_path, block_factors=FACTORS[:2])
    builders.edit_manifest(results, label=HOSTILE, argv=("benchctl", HOSTILE), dataset=HOSTILE)
    run_id = results.plan().runs[1].run_id
    failure = RunFailure(cause=HOSTILE, message=HOSTILE, log_tail=HOSTILE)
    builders.edit_run(results, run_id, state="failed", failure=failure, engine_version=HOSTILE)
    (results.run(run_id).path / "server.log").write_text(HOSTILE * 3)
    path = tmp_path / "report.html"
    path.write_text(directory_page(analyze_directory(tmp_path)))
    with opened(browser, path) as page:
        title = page.title()
        look_at_all(page)
        assert page.locator("img").count() == 0
        assert page.title() == title != "owned"
        assert HOSTILE in page.locator("details.log").text_content()
        assert json.loads(page.locator("#benchctl-data").text_content())["schema_version"] == 3


def test_block_values_are_saved_as_csv_and_all_data_as_json_without_a_network(browser, path):
    with opened(browser, path, accept_downloads=True) as page:
        saved = {}
        for kind in ("csv", "json"):
            with page.expect_download() as download:
                page.locator(f"[data-save={kind}]").click()
            saved[kind] = download.value.path().read_text()
        document = json.loads(saved["json"])
        rows = list(csv.DictReader(io.StringIO(saved["csv"], newline="")))
    (comparison,) = document["comparisons"]
    metrics = {(metric["cell"], metric["name"]): metric for metric in comparison["metrics"]}
    assert len(rows) == sum(len(metric["a_blocks"]) for metric in metrics.values())
    for row in rows:
        metric = metrics[row["cell"], row["metric"]]
        index = int(row["block"])
        assert row["a"] == "" if metric["a_blocks"][index] is None else float(row["a"]) == metric["a_blocks"][index]
