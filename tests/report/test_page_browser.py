"""The report page in a real browser: silent, alone, readable at any width, in any light, on paper, at hand."""

import base64
import csv
import gzip
import html
import io
import json
import os
import re
import shutil
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from support import bonus_directory
from support.cli import printed
from support.results import builders
from support.results.planted import HOSTILE, write_hostile

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.page.page import directory_page
from benchctl.untrusted.text import visible

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("BENCHCTL_DEMANDED_BROWSER") != "1",
        reason="no Chromium is installed; scripts/browser.sh does it",
    ),
]
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(6)]
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1440, "height": 900}
NUM_DRAWN = """async () => {
    const drawn = () => document.querySelectorAll("[data-chart] svg.marks").length;
    for (let i = 0; i < 600 && drawn() === 0; i++) await new Promise((done) => setTimeout(done, 50));
    return drawn();
}"""
"""The number of charts that are drawn, once there is one."""
MARKS = """(id) => Array.from(document.querySelectorAll(
    `[data-chart='${id}'] .mark-line.role-mark path, [data-chart='${id}'] .mark-rule.role-mark line`),
    (e) => e.getAttribute("d") ?? e.outerHTML)"""
TEXTS = "(id) => Array.from(document.querySelectorAll(`[data-chart='${id}'] text`), (e) => e.textContent)"
COUNTS = (
    "Array.from(document.querySelectorAll('[data-chart]')).filter((c) => c.checkVisibility()).map((c) => "
    "c.querySelectorAll('svg.marks path, svg.marks line').length)"
)
"""Of every chart that has a figure, the number of marks in it."""
FOLD = "document.querySelectorAll('details').forEach((d) => { d.open = false; })"
UNFOLD = FOLD.replace("false", "true")
WIDTH = "document.documentElement.scrollWidth"
PAPER = "getComputedStyle(document.body).backgroundColor"
CONTRAST = """(selectors) => {
    const luminance = (rgb) => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = rgb.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const known = new Map();
    const behind = (element) => {
        if (!element) return [255, 255, 255];
        if (!known.has(element)) {
            const colour = parts(getComputedStyle(element).backgroundColor);
            const shows = colour.length < 4 || colour[3] > 0;
            known.set(element, shows ? colour.slice(0, 3) : behind(element.parentElement));
        }
        return known.get(element);
    };
    const contrast = (element) => {
        const [a, b] = [parts(getComputedStyle(element).color).slice(0, 3), behind(element)].map(luminance);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    return selectors.map((each) => [each, Math.min(...Array.from(document.querySelectorAll(each), contrast))])
        .filter(([, least]) => !(least >= 4.5 && least < Infinity));
}"""
"""Selectors without elements or with too little contrast: the least WCAG ratio of text to what is behind it."""
TEXT = ["p", "td", "th", "h1", "h2", ".badge", ".key", "a", "summary", "small", ".quiet", "dt"]
LOOK_AT_ALL = """async () => {
    for (let y = 0; y < document.body.scrollHeight; y += 0.45 * innerHeight) {
        scrollTo(0, y);
        await new Promise((done) => setTimeout(done, 60));
    }
    scrollTo(0, 0);
}"""
"""Scroll through the page, so that everything in it has been in view."""


@pytest.fixture(scope="module", name="browser")
def _browser():
    assert CHROMIUM is not None, "BENCHCTL_DEMANDED_BROWSER=1 and no Chromium found; run scripts/browser.sh"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, size=DESKTOP, **options):
    """A page from the disk. When it is closed again it must have said nothing and asked nobody for anything."""
    with browser.new_context(viewport=size, **options) as context:
        page, said = context.new_page(), []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: said.append(request.url))
        page.goto(path.as_uri())
        yield page
        page.wait_for_timeout(50)
    assert [each for each in said if not each.startswith(("file:", "data:", "blob:"))] == []


def at_once(page):
    """Where the verdict is, and how many charts are drawn and runs shown, before anybody does anything."""
    boxes = [page.locator(selector).first.bounding_box() for selector in ("h1", ".lead", ".answer li")]
    page.wait_for_timeout(300)
    return boxes, page.locator(".charts svg.marks").count(), page.locator("table.runs tbody tr:visible").count()


@pytest.fixture(scope="module", name="desktop")
def _desktop(browser, path):
    """A page, and what it was at once. Each test finds it as another left it: with choices made and folds open."""
    with opened(browser, path, accept_downloads=True) as page:
        yield page, at_once(page)


@pytest.fixture(scope="module", name="phone")
def _phone(browser, path):
    with opened(browser, path, PHONE, has_touch=True) as page:
        yield page, at_once(page)


def draw_all(page):
    page.evaluate(LOOK_AT_ALL)
    assert page.evaluate(NUM_DRAWN) > 0
    page.wait_for_timeout(200)


def all_of(selector: str, value: str) -> str:
    """A script for the value of every element ``e`` of a selector."""
    return f"Array.from(document.querySelectorAll('{selector}'), (e) => {value})"


def written(directory: Path, page: str) -> Path:
    (directory / "report.html").write_text(page, encoding="utf-8")
    return directory / "report.html"


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory):
    """Six blocks of four arms, each run with other step times and with samples of every kind."""
    directory = tmp_path_factory.mktemp("results")
    cells = [{"top_k": k} for k in (1, 2, 3)]
    builders.write_samples(builders.write_results(directory, block_factors=FACTORS, cells=cells, num_requests=6))
    return written(directory, directory_page(analyze_directory(directory)))


@pytest.mark.parametrize(("name", "size"), [("phone", PHONE), ("desktop", DESKTOP)], ids=["phone", "desktop"])
def test_the_verdict_is_in_view_at_once_charts_are_drawn_as_they_come_and_all_fits_and_can_be_read(
    name, size, request
):
    page, (boxes, drawn, runs) = request.getfixturevalue(name)
    assert all(0 <= box["y"] <= size["height"] - box["height"] for box in boxes)
    assert (drawn, runs) == (0, 0)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST, TEXT) == [], scheme
    page.evaluate(UNFOLD)
    draw_all(page)
    page.wait_for_function(f"() => {COUNTS}.every((count) => count > 0)")
    assert len(page.evaluate(COUNTS)) >= 6
    assert page.evaluate(WIDTH) == size["width"]
    wide = page.evaluate(all_of(".wide", "[e.tabIndex, e.ariaLabel, e.role]"))
    assert wide
    assert all(tab == 0 and label and role == "region" for tab, label, role in wide)


def test_the_contents_lead_to_the_headings_and_headings_tables_and_controls_say_what_they_are(desktop, phone):
    (page, _), (phone, _) = desktop, phone
    near = "(id) => Math.abs(document.getElementById(id).getBoundingClientRect().top) < 200"
    page.evaluate(FOLD)
    page.get_by_role("link", name="Runs", exact=True).click()
    page.wait_for_function("document.querySelector('.runs-fold').open")
    page.wait_for_function(near, arg="runs-1")
    page.evaluate(UNFOLD)
    links = page.evaluate(all_of("nav.side a", 'e.getAttribute("href").slice(1)'))
    tops = [page.locator(f"[id='{link}']").bounding_box()["y"] for link in links[1:]]
    assert len(tops) > 8
    assert tops == sorted(tops)
    levels = page.evaluate(all_of("h1, h2, h3, h4", "Number(e.tagName[1])"))
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(page.evaluate(all_of("table", 'e.caption?.textContent ?? ""')))
    assert set(page.evaluate(all_of("th", "e.scope"))) <= {"col", "row", "rowgroup"}
    assert all(page.evaluate(all_of("select, input", "e.labels.length")))
    assert not phone.locator("nav.side").is_visible()
    phone.evaluate(FOLD)
    phone.locator("nav.contents summary").click()
    phone.locator("nav.contents").get_by_role("link", name="Latency", exact=True).click()
    phone.wait_for_function(near, arg="latency")


def marks_of(page, chart_id, before=()):
    """The marks of a chart once it is in view and drawn, with others than before."""
    page.locator(f"#{chart_id}").scroll_into_view_if_needed()
    page.wait_for_function(
        f"([id, before]) => JSON.stringify(({MARKS})(id)) !== before",
        arg=[chart_id, json.dumps(before, separators=(",", ":"), ensure_ascii=False)],
    )
    return page.evaluate(MARKS, chart_id)


def test_charts_show_the_block_the_arm_the_latency_and_the_axis_that_are_chosen(desktop):
    page, _ = desktop
    before = marks_of(page, "step-time")
    page.locator("#step-time [data-choice=block]").select_option("3")
    after = marks_of(page, "step-time", before)
    assert len(after) == len(before) == 2 * 4  # two panels of four arms
    assert "block 3, all arms" in page.locator("#step-time .shown").inner_text()
    page.locator("#step-time [data-choice=arm]").select_option("guided top_k=2")
    assert len(marks_of(page, "step-time", after)) == 2
    before = marks_of(page, "request-timeline")
    page.get_by_label("Below baseline").focus()
    page.keyboard.press("ArrowUp")
    marks_of(page, "request-timeline", before)
    texts = set(page.evaluate(TEXTS, "request-timeline"))
    assert texts & {"baseline", "guided top_k=2", "guided top_k=3"} == {"baseline", "guided top_k=2"}
    tpot = marks_of(page, "latencies")
    assert len(tpot) == 4 * (6 + 1)  # a line for each block and one for the arm
    page.locator("#latencies [data-choice=latency]").select_option("e2el")
    e2el = marks_of(page, "latencies", tpot)
    switch = page.get_by_role("button", name="Logarithmic axis")
    switch.press("Enter")
    assert len(marks_of(page, "latencies", e2el)) == len(e2el) == len(tpot)
    assert switch.get_attribute("aria-pressed") == "true"


def test_runs_can_be_unfolded_filtered_and_sorted(desktop):
    page, _ = desktop
    page.evaluate(FOLD)
    rows = page.locator("table.runs tbody tr:visible")
    assert rows.count() == 0
    page.locator(".runs-fold > summary").click()
    assert rows.count() == 24
    page.locator("[data-filter=arm]").select_option("guided top_k=2")
    assert rows.count() == 6
    page.locator("[data-filter=text]").fill("b4-")
    assert page.locator("[data-filter=count]").inner_text() == "1 of 24 runs"
    heading = page.locator("table.runs thead th").nth(4)
    heading.get_by_role("button").press("Enter")
    values = page.evaluate(all_of("table.runs tbody tr", "Number(e.cells[4].textContent)"))
    assert (len(values), values) == (24, sorted(values))
    assert heading.get_attribute("aria-sort") == "ascending"


def test_the_choice_of_colours_stays_and_a_number_tells_what_it_is_to_pointer_keyboard_and_finger(
    browser, path, phone
):
    with opened(browser, path, color_scheme="light") as page:
        light = page.evaluate(PAPER)
        page.get_by_role("button", name="Dark").click()
        dark = page.evaluate(PAPER)
        page.reload()
        assert page.evaluate(PAPER) == dark != light
        term, tip = page.locator("td.change .term").first, page.locator("#tip")
        term.hover()
        assert "interval over 6 blocks" in tip.inner_text()
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        page.mouse.move(1, 1)
        term.focus()
        assert tip.is_visible()
    phone, _ = phone
    phone.locator("td.value .term").first.tap()
    assert "Centre ± scatter of 6 blocks" in phone.locator("#tip").inner_text()


def test_without_scripts_the_verdict_and_all_tables_are_there_and_no_button_is(browser, path):
    with opened(browser, path, PHONE, java_script_enabled=False) as page:
        page.locator(".runs-fold > summary").click()
        for selector in ("h1", ".changes noscript", "table.metrics.main td.change", "table.runs td"):
            assert page.locator(selector).first.is_visible()
        assert page.locator(".controls:visible").count() == 0
        assert page.locator(".term[title]").count() > 50


def test_paper_is_light_has_every_chart_unfolded_and_no_buttons(browser, path):
    with opened(browser, path, color_scheme="dark") as page:
        page.wait_for_timeout(300)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        for _ in range(100):  # the policy of the page lets no string be evaluated again and again
            page.wait_for_timeout(50)
            if min(page.evaluate(all_of("[data-chart]", 'e.querySelectorAll("svg.marks").length'))) > 0:
                break
        assert page.locator("details.fold:not([open])").count() == 0
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details.fold:not([open])").count() > 0
        page.emulate_media(media="print", color_scheme="dark")
        page.wait_for_timeout(300)
        assert page.evaluate(PAPER) == "rgb(255, 255, 255)"
        assert min(page.evaluate(COUNTS)) > 0
        assert page.locator(".controls:visible").count() == 0
        assert max(page.evaluate(all_of("[data-chart] svg.marks", "e.clientWidth"))) <= 720
        assert page.pdf(format="A4").count(b"/Type /Page") > 3


def test_hostile_names_labels_logs_and_messages_are_only_text(browser, tmp_path):
    path = write_hostile(tmp_path / "r")
    with opened(browser, written(path, directory_page(analyze_directory(path)))) as page:
        title = page.title()
        draw_all(page)
        seen = visible(HOSTILE)
        assert any(seen[:40] in text for text in page.evaluate(all_of("svg.marks text", "e.textContent")))
        assert any(seen in text for text in page.locator("select[data-choice=arm] option").all_text_contents())
        assert page.locator("img, svg.marks a").count() == 0
        assert page.title() == title
        assert seen[:40] in page.locator("details.log").text_content()
        assert json.loads(page.locator("#benchctl-data").text_content())["schema_version"] == 3


PLANTED = """<script>document.title = 'owned by a script'</script>
<img src="data:image/gif;base64,broken" onerror="document.title = 'owned by a picture'">
<a id="planted" href="javascript:void(document.title = 'owned by a link')">a link</a>
<p id="styled" style="color: rgb(1, 2, 3)">a style</p><style>#styled { font-size: 99px; }</style>
<base href="https://example.com/"><form id="form" action="https://example.com/"></form>
<iframe src="data:text/html,<p>"></iframe>"""


def test_what_somebody_plants_in_the_file_does_not_run_and_asks_nobody(browser, path, tmp_path):
    """The policy of the page refuses all of it, and the charts are drawn still."""
    planted = written(tmp_path, path.read_text().replace('<main id="top">', f'<main id="top">{PLANTED}'))
    with browser.new_context(viewport=DESKTOP) as context:
        page, urls, refused = context.new_page(), [], []
        page.on("request", lambda request: urls.append(request.url))
        page.on("console", lambda message: refused.append(message.text))
        page.goto(planted.as_uri())
        title = page.evaluate("document.title")
        page.locator("#planted").click()
        page.evaluate("document.getElementById('form').requestSubmit()")
        page.evaluate(
            "const late = document.createElement('script'); late.textContent = 'document.title = 1'; "
            "document.body.append(late)"
        )
        page.evaluate("document.getElementById('step-time').scrollIntoView()")
        assert page.evaluate(NUM_DRAWN) > 0
        style = "(({ color, fontSize }) => [color, fontSize])(getComputedStyle(document.getElementById('styled')))"
        assert not {"rgb(1, 2, 3)", "99px"} & set(page.evaluate(style))
        assert page.evaluate("document.title") == title
        assert not title.startswith("owned")
        assert page.evaluate("document.baseURI").startswith("file:")
    assert all(url.startswith(("file:", "data:image")) for url in urls), urls
    kinds = ("script-src", "style-src", "base-uri", "form-action", "default-src")
    assert [kind for kind in kinds if not any(kind in text for text in refused)] == []


def test_a_chart_under_the_pointer_and_saved_as_a_picture_keeps_to_the_policy_of_the_page(desktop):
    """The test of silence is that of ``opened``: the browser reports what a policy refuses."""
    page, _ = desktop
    for chart in page.locator(".charts > .chart-figure .chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg.marks").first.wait_for()
        chart.hover()
        page.wait_for_timeout(60)
    page.locator("[data-chart=sections] .mark-rect.role-mark path").nth(1).hover(force=True)
    page.locator("#vg-tooltip-element.visible td.key").first.wait_for()
    with page.expect_download() as download:
        chart.get_by_role("link", name="SVG").click()
    assert b"<svg" in download.value.path().read_bytes()


def test_pages_of_two_directories_of_files_of_other_tools_and_of_passes_keep_to_the_policy_too(browser, tmp_path):
    sides = [builders.write_results(tmp_path / name, block_factors=FACTORS, num_requests=2).path for name in "ab"]
    for side in sides:
        printed("export", side, "--format", "vllm", "-o", tmp_path / f"files-{side.name}")
    pages = {name: tmp_path / f"{name}.html" for name in ("directories", "files")}
    printed("compare", *(f"{side}:baseline" for side in sides), "-o", pages["directories"])
    printed("compare", *(tmp_path / f"files-{name}" / "baseline" for name in "ab"), "-o", pages["files"], code=3)
    passes = bonus_directory.measured(tmp_path / "passes", batch_sizes=(2,), blocks=2)
    pages["passes"] = written(passes, directory_page(analyze_directory(passes)))
    for name, path in pages.items():
        with opened(browser, path) as page:
            draw_all(page)
            assert page.locator("meta[http-equiv=Content-Security-Policy]").count() == 1, name


def test_the_policy_of_a_page_allows_its_own_scripts_and_styles_by_hash_and_nothing_else(path):
    text = path.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)[1]
    rules = {name: values for name, *values in (rule.split() for rule in html.unescape(policy).split("; "))}
    assert text.index("Content-Security-Policy") < text.index("<style")
    scripts, styles = rules.pop("script-src"), rules.pop("style-src")
    nothing = {name: ["'none'"] for name in ("default-src", "base-uri", "form-action")}
    assert rules == {"img-src": ["data:"], **nothing}
    assert len(scripts) == 2
    assert all(value.startswith("'sha256-") for value in (*scripts, *styles))
    without_scripts = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=|javascript:", without_scripts)


def test_block_values_are_saved_as_csv_without_formulas_and_all_data_with_the_series_of_the_charts_as_json(
    browser, path, tmp_path
):
    named = written(tmp_path, path.read_text().replace('"b":"guided"', '"b":"=cmd()"'))
    with opened(browser, named, accept_downloads=True) as page:
        saved = {}
        for kind in ("csv", "json"):
            with page.expect_download() as download:
                page.locator(f"[data-save={kind}]").click()
            saved[kind] = download.value.path().read_text()
    document = json.loads(saved["json"])
    (comparison,) = document["comparisons"]
    metrics = {(metric["cell"], metric["name"]): metric for metric in comparison["metrics"]}
    rows = list(csv.DictReader(io.StringIO(saved["csv"], newline="")))
    assert len(rows) == sum(len(metric["a_blocks"]) for metric in metrics.values())
    for row in rows:
        assert next(iter(row.values())).startswith("'=cmd() against baseline")
        value = metrics[row["cell"], row["metric"]]["a_blocks"][int(row["block"])]
        assert row["a"] == "" if value is None else float(row["a"]) == value
    (chart,) = (chart for chart in document["charts"] if chart["id"] == "step-time")
    assert {choice["name"]: choice["selected"] for choice in chart["choices"]} == {"block": "0", "arm": "*"}
    series = json.loads(gzip.decompress(base64.b64decode(chart["spec"]["datasets"])))["rows"]
    assert {row["block"] for row in series} == {"0", "1", "2", "3", "4", "5"}
