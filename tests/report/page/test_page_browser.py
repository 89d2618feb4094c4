"""The report page in a real browser: silent, alone, readable at any width, in any light, on paper."""

import csv
import html
import io
import json
import re

import pytest
from support import bonus_directory
from support.browser import CONTRAST, DESKTOP, PHONE, chromium, look_at_all, needs_browser, opened
from support.cli import benchctl
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.records.record import RunFailure
from benchctl.report.page.page import directory_page

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
        "c.querySelectorAll('svg.marks path, svg.marks line').length)"
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
        page.wait_for_timeout(300)
        assert page.locator(".charts svg.marks").count() == 0
        page.locator(".charts details.fold > summary").click()
        look_at_all(page)
        page.wait_for_function("document.querySelectorAll('[data-chart] svg.marks').length > 0")
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


def test_without_scripts_the_verdict_and_all_tables_are_there_and_no_button_is(browser, path):
    with opened(browser, path, PHONE, java_script_enabled=False) as page:
        assert page.locator("h1").is_visible()
        assert page.locator(".changes noscript").first.is_visible()
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
        assert "Centre ± scatter of 6 blocks" in tip.inner_text()
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
            "Array.from(document.querySelectorAll('[data-chart] svg.marks'), (s) => s.clientWidth)"
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


PLANTED = """<script>document.title = 'owned by a script'</script>
<img src="data:image/gif;base64,broken" onerror="document.title = 'owned by a picture'">
<a id="planted" href="javascript:void(document.title = 'owned by a link')">a link</a>
<p id="styled" style="color: rgb(1, 2, 3)">a style</p><style>#styled { font-size: 99px; }</style>
<base href="https://example.com/"><form id="form" action="https://example.com/"></form>
<iframe src="data:text/html,<p>"></iframe>"""


def test_what_somebody_plants_in_the_file_does_not_run_and_asks_nobody(browser, path, tmp_path):
    """The policy of the page refuses all of it, and the charts are drawn still."""
    planted = tmp_path / "planted.html"
    text = path.read_text()
    planted.write_text(text.replace('<main id="top">', f'<main id="top">{PLANTED}'))
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    asked, refused = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: refused.append(message.text))
    page.goto(planted.as_uri())
    title = page.evaluate("document.title")
    page.locator("#planted").click()
    page.evaluate("document.getElementById('form').requestSubmit()")
    page.evaluate(
        "const late = document.createElement('script'); late.textContent = 'document.title = 1'; "
        "document.body.append(late)"
    )
    look_at_all(page)
    page.wait_for_function("document.querySelectorAll('[data-chart] svg.marks').length > 0")
    style = page.evaluate(
        "(({ color, fontSize }) => [color, fontSize])(getComputedStyle(document.getElementById('styled')))"
    )
    assert page.evaluate("document.title") == title
    assert not title.startswith("owned")
    assert style[0] != "rgb(1, 2, 3)"
    assert style[1] != "99px"
    assert page.evaluate("document.baseURI").startswith("file:")
    assert all(url.startswith(("file:", "data:image")) for url in asked), asked
    for kind in ("script-src", "style-src", "base-uri", "form-action", "default-src"):
        assert any(kind in text for text in refused), kind
    context.close()


def test_a_chart_under_the_pointer_and_saved_as_a_picture_keeps_to_the_policy_of_the_page(browser, path):
    """The test of silence is that of ``opened``: the browser reports what a policy refuses."""
    with opened(browser, path, accept_downloads=True) as page:
        charts = page.locator(".charts > .chart-figure .chart")
        for i in range(charts.count()):
            chart = charts.nth(i)
            chart.scroll_into_view_if_needed()
            chart.locator("svg.marks").first.wait_for()
            box = chart.bounding_box()
            for x in (0.2, 0.5, 0.8):
                page.mouse.move(box["x"] + x * box["width"], box["y"] + box["height"] / 2)
                page.wait_for_timeout(60)
        page.locator("[data-chart=sections] .mark-rect.role-mark path").nth(1).hover(force=True)
        page.locator("#vg-tooltip-element.visible td.key").first.wait_for()
        with page.expect_download() as download:
            chart.get_by_role("link", name="SVG").click()
        assert b"<svg" in download.value.path().read_bytes()
        page.get_by_role("button", name="Dark").click()


def test_pages_of_two_directories_of_files_of_other_tools_and_of_passes_keep_to_the_policy_too(browser, tmp_path):
    sides = [builders.write_results(tmp_path / name, block_factors=FACTORS) for name in "ab"]
    exported = [tmp_path / f"files-{side.path.name}" for side in sides]
    for side, files in zip(sides, exported, strict=True):
        assert benchctl("export", side.path, "--format", "vllm", "-o", files).returncode == 0
    passes = bonus_directory.measured(tmp_path / "passes", batch_sizes=(2,), blocks=3)
    pages = {name: tmp_path / f"{name}.html" for name in ("directories", "files", "passes")}
    benchctl("compare", *(f"{side.path}:baseline" for side in sides), "-o", pages["directories"])
    benchctl("compare", *(files / "baseline" for files in exported), "-o", pages["files"])
    pages["passes"].write_text(directory_page(analyze_directory(passes)))
    for name, path in pages.items():
        with opened(browser, path) as page:
            look_at_all(page)
            page.wait_for_function("document.querySelectorAll('[data-chart] svg.marks').length > 0")
            assert page.locator("meta[http-equiv=Content-Security-Policy]").count() == 1, name


def test_the_policy_of_a_page_allows_its_own_scripts_and_styles_by_hash_and_nothing_else(path):
    text = path.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)[1]
    rules = {name: values for name, *values in (rule.split() for rule in html.unescape(policy).split("; "))}
    assert text.index("Content-Security-Policy") < text.index("<style")
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["img-src"] == ["data:"]
    assert set(rules) == {"default-src", "base-uri", "form-action", "img-src", "script-src", "style-src"}
    assert len(rules["script-src"]) == 2
    assert all(value.startswith("'sha256-") for value in (*rules["script-src"], *rules["style-src"]))
    without_scripts = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=|javascript:", without_scripts)


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
