"""The report page: one HTML file that needs nothing else, neither network nor server nor the result directory.

    analyses + verdict + charts ▸ sections ▸ one document with its style, its scripts and its data

The verdict and every table are plain HTML and are there without scripts; the charts are drawn by a script that is
in the page too, when they come into view.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from plotly.offline import get_plotlyjs

from benchctl import __version__
from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.report.page.charts.figure import Chart
from benchctl.report.page.data import data_document
from benchctl.report.page.html import Html, dormant_script, el, embedded_json, join, script, style
from benchctl.report.page.judged import Judged, Verdict
from benchctl.report.page.parts.definitions import definitions
from benchctl.report.page.parts.forest import forest
from benchctl.report.page.parts.icon import legend
from benchctl.report.page.parts.outcome import outcome
from benchctl.report.page.parts.provenance import differences, noise, provenance, warnings
from benchctl.report.page.parts.recompute import recompute_note
from benchctl.report.page.parts.runs import runs_section
from benchctl.report.page.parts.table import comparison_table
from benchctl.report.page.parts.top import top
from benchctl.report.page.parts.waterfall import Waterfall, drawn, from_decomposition, from_ladder, from_sections

_LADDER_QUANTITIES: Final = {"step_ms": "ms", "wall_s": "s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """What goes into a page. ``is_inside`` says that it will lie in the (one) result directory that it is about."""

    title: str
    analyses: tuple[AnalyzedExperiment, ...]
    verdict: Verdict
    charts: tuple[Chart, ...]
    is_inside: bool


def render(content: PageContent) -> str:
    """The page as HTML; the same content gives the same bytes."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content=f"benchctl {__version__}"),
        el("link", rel="icon", href="data:,"),
        el("title", content.title),
        style(_resource("page.css")),
    )
    main = el("main", top(content.analyses, content.verdict), *_sections(content))
    data = embedded_json("benchctl-data", data_document(content.verdict, content.analyses, content.charts))
    body = el("body", main, data, script(_resource("page.js")), dormant_script("plotly-source", get_plotlyjs()))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _resource(name: str) -> str:
    return (files("benchctl.report.page") / name).read_text(encoding="utf-8")


def _sections(content: PageContent) -> Iterator[Html]:
    judged = content.verdict.all
    compared = [one for one in judged if one.comparison is not None]
    if compared:
        plots = [_titled(one, forest(one.comparison), len(compared)) for one in compared if one.comparison]
        yield _section("changes", "Changes against the margin", el("p", legend(), class_="keys"), *plots)
        tables = [
            _titled(one, comparison_table(one.comparison), len(compared)) for one in compared if one.comparison
        ]
        yield _section("numbers", "Numbers", *tables)
    falls = _waterfalls(content)
    if falls:
        shown = el("div", *map(drawn, falls), class_="waterfalls")
        note = el("p", "Pale bars cannot be told from nothing.", class_="quiet")
        yield _section("split", "Where the difference sits", note, shown)
    answers = [_titled(one, outcome(one.comparison), len(compared)) for one in compared if one.comparison]
    if any(answer is not None for answer in answers):
        yield _section("answers", "What is answered", *answers)
    if content.charts:
        yield _section("charts", "Measurements", *map(_chart, content.charts))
    for analysis in content.analyses:
        more = f" of {analysis.results.path.resolve().name}" if len(content.analyses) > 1 else ""
        shown = runs_section(analysis, is_inside=content.is_inside)
        yield _section("runs", f"Runs{more}", shown)
    yield _section("provenance", "Where the numbers come from", *_origins(content))
    yield _section("definitions", "What the words mean", definitions())
    yield _section("data", "Data", recompute_note(content.verdict), _save_buttons())


def _section(identifier: str, title: str, *parts: Html | None) -> Html:
    return el("section", el("h2", title), *parts, class_=identifier)


def _titled(one: Judged, shown: Html | None, num: int) -> Html | None:
    """Under the name of the variant where there are several."""
    if shown is None or num == 1:
        return shown
    return join(el("h3", f"{one.b_name} against {one.a_name}"), shown)


def _waterfalls(content: PageContent) -> list[Waterfall]:
    """Those of the ladders of controls, then of the wall time and of the step in every cell."""
    found = [fall for analysis in content.analyses for fall in _of_ladders(analysis)]
    for comparison in content.verdict.comparisons:
        for cell in comparison.cells:
            found += [fall for fall in (from_decomposition(cell), from_sections(cell)) if fall is not None]
    return found


def _of_ladders(analysis: AnalyzedExperiment) -> Iterator[Waterfall]:
    cells = {cell.label: cell for cell in analysis.cells}
    for ladder in analysis.ladders:
        base = cells.get(ladder.whole.lower)
        for quantity, unit in _LADDER_QUANTITIES.items():
            fall = from_ladder(ladder, base.mean(quantity) if base is not None else None, quantity, unit)
            if fall is not None:
                yield fall


def _chart(chart: Chart) -> Html:
    title = el("h3", el("span", chart.title, class_="term", title=chart.definition, tabindex=0))
    if chart.figure is None:
        reason = el("p", f"Not drawn: {chart.skipped}", class_="quiet")
        return el("figure", title, reason, class_="chart-figure is-skipped", id=chart.id)
    place = el(
        "div",
        el("noscript", "This chart is drawn by a script; its numbers are in the data of the page."),
        class_="chart",
        data_chart=chart.id,
        style=f"min-height:{chart.height}px",
        role="img",
        aria_label=f"{chart.title}: {chart.caption}",
    )
    return el("figure", title, place, el("figcaption", chart.caption), class_="chart-figure", id=chart.id)


def _origins(content: PageContent) -> Iterator[Html]:
    for analysis in content.analyses:
        if len(content.analyses) > 1:
            yield el("h3", analysis.results.path.resolve().name)
        yield provenance(analysis)
    if content.verdict.all:
        yield el("h3", "Settings that differ")
        yield differences(content.verdict)
    floors = noise(content.verdict)
    if content.verdict.comparisons:
        none = el("p", "No A/A experiment of this machine is on file: the margin alone decides.", class_="quiet")
        yield join(el("h3", "Noise floor"), none if floors is None else floors)
    doubts = warnings(content.verdict)
    if doubts is not None:
        yield el("h3", "Warnings")
        yield doubts


def _save_buttons() -> Html:
    buttons: Sequence[tuple[str, str]] = (("csv", "Save block values as CSV"), ("json", "Save everything as JSON"))
    shown = (el("button", text, type="button", data_save=kind) for kind, text in buttons)
    return el("p", *shown, class_="controls", hidden=True)
