"""The report page: one HTML file that needs nothing else, neither network nor server nor the result directory.

    analyses + verdict + charts ▸ plain values ▸ templates ▸ one document with its style, its scripts and its data

The verdict and every table are plain HTML and need no script; a script in the page draws the charts when they come
into view.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, Final

from plotly.offline import get_plotlyjs

from benchctl import __version__
from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.report.page.charts.figure import Chart
from benchctl.report.page.data import data_document
from benchctl.report.page.parts.bonus import bonus_values
from benchctl.report.page.parts.definitions import definition_values
from benchctl.report.page.parts.forest import forest_values
from benchctl.report.page.parts.numbers import answer_values, table_values
from benchctl.report.page.parts.passes import passes_values
from benchctl.report.page.parts.provenance import comparison_values, directory_values
from benchctl.report.page.parts.runs import runs_values
from benchctl.report.page.parts.top import top_values
from benchctl.report.page.parts.waterfall import (
    Waterfall,
    from_decomposition,
    from_ladder,
    from_model,
    from_sections,
    waterfall_values,
)
from benchctl.report.page.render import closed, inert_json, render_page
from benchctl.report.page.verdict import PageVerdict

_LADDER_QUANTITIES: Final = {"step_ms": "ms", "wall_s": "s"}


def render(
    title: str,
    analyses: Sequence[AnalyzedExperiment],
    verdict: PageVerdict,
    charts: Sequence[Chart],
    *,
    is_inside: bool,
) -> str:
    """The page as HTML; the same arguments give the same bytes.

    ``is_inside``: it will be written into the (one) result directory that it is about.
    """
    values = {
        "version": __version__,
        "title": title,
        "css": closed(_resource("page.css"), "style"),
        "script": closed(_resource("page.js"), "script"),
        "plotly": closed(get_plotlyjs(), "script"),
        "data": inert_json(data_document(verdict, analyses, charts)),
        "verdict": verdict,
        "comparisons": _comparisons(verdict),
        "waterfalls": [waterfall_values(waterfall) for waterfall in _waterfalls(analyses, verdict)],
        "backfills": [values for analysis in analyses if (values := bonus_values(analysis)) is not None],
        "passes": [values for analysis in analyses if (values := passes_values(analysis)) is not None],
        "charts": charts,
        "directories": [
            {**directory_values(analysis), "runs": runs_values(analysis, is_inside=is_inside)}
            for analysis in analyses
        ],
        **top_values(analyses, verdict),
        **comparison_values(verdict),
        **definition_values(verdict.comparisons),
    }
    return render_page(values)


def _resource(name: str) -> str:
    return (files("benchctl.report.page") / name).read_text(encoding="utf-8")


def _comparisons(verdict: PageVerdict) -> list[dict[str, Any]]:
    """Every comparison that could be made, under the names of its sides where there are several."""
    has_names = len(verdict.comparisons) > 1
    return [
        {
            "name": f"{each.b_name} against {each.a_name}" if has_names else None,
            "forest": forest_values(each.comparison),
            "table": table_values(each.comparison),
            "answers": answer_values(each.comparison),
        }
        for each in verdict.all
        if each.comparison is not None
    ]


def _waterfalls(analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict) -> Iterator[Waterfall]:
    """Those of the ladders of controls, then of the wall time and of the step in every cell."""
    for analysis in analyses:
        yield from _ladder_waterfalls(analysis)
    if any(analysis.passes is not None for analysis in analyses):
        return  # all of the difference is in the one pass that every step is
    for comparison in verdict.comparisons:
        for cell in comparison.cells:
            yield from (
                fall
                for fall in (from_decomposition(cell), from_sections(cell), from_model(cell))
                if fall is not None
            )


def _ladder_waterfalls(analysis: AnalyzedExperiment) -> Iterator[Waterfall]:
    cells = {cell.label: cell for cell in analysis.cells}
    for ladder in analysis.ladders:
        base = cells.get(ladder.whole.lower)
        for quantity, unit in _LADDER_QUANTITIES.items():
            fall = from_ladder(ladder, base.mean(quantity) if base is not None else None, quantity, unit)
            if fall is not None:
                yield fall
