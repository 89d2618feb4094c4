"""The report page: one HTML file that needs nothing else, neither network nor server nor the result directory.

    analyses + verdict + charts ▸ plain values ▸ templates ▸ one document with its style, its scripts and its data

The verdict and every table are plain HTML and need no script; a script in the page draws the charts when they come
into view.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchctl import __version__
from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import CellComparison
from benchctl.report.page.charts.figure import Chart
from benchctl.report.page.data import data_document
from benchctl.report.page.foreign import ForeignSides, file_rows
from benchctl.report.page.foreign import percentile_values as foreign_percentiles
from benchctl.report.page.parts.bonus import bonus_values
from benchctl.report.page.parts.definitions import definition_values
from benchctl.report.page.parts.forest import forest_values
from benchctl.report.page.parts.nodes import node_values
from benchctl.report.page.parts.numbers import answer_values, table_values
from benchctl.report.page.parts.passes import passes_values
from benchctl.report.page.parts.percentiles import percentile_values
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
from benchctl.report.page.policy import content_policy
from benchctl.report.page.render import closed, inert_json, packed_plotly, plotly, render_page, resource
from benchctl.report.page.verdict import PageVerdict

_LADDER_QUANTITIES: Final = {"step_ms": "ms", "wall_s": "s"}


def render(
    title: str,
    analyses: Sequence[AnalyzedExperiment],
    verdict: PageVerdict,
    charts: Sequence[Chart],
    *,
    is_inside: bool,
    foreign: ForeignSides | None = None,
) -> str:
    """The page as HTML; the same arguments give the same bytes.

    ``is_inside``: it will be written into the (one) result directory that it is about. ``foreign`` are the result
    files of a comparison without analyses.
    """
    comparisons = _comparisons(verdict)
    css = closed(resource("page.css"), "style")
    sizes = closed(_sizes(charts, comparisons), "style")
    script = closed(resource("page.js"), "script")
    values = {
        "version": __version__,
        "title": title,
        "policy": content_policy(scripts=(script, plotly()), styles=(css, sizes)),
        "css": css,
        "sizes": sizes,
        "script": script,
        "plotly": packed_plotly(),
        "data": inert_json(data_document(verdict, analyses, charts)),
        "verdict": verdict,
        "comparisons": comparisons,
        "waterfalls": _waterfalls(analyses, verdict),
        "backfills": [values for analysis in analyses if (values := bonus_values(analysis)) is not None],
        "passes": [values for analysis in analyses if (values := passes_values(analysis)) is not None],
        "charts": [chart for chart in charts if chart.section == "measurements"],
        "latency_charts": [chart for chart in charts if chart.section == "latency" and chart.figure is not None],
        "percentiles": _percentiles(analyses, verdict, foreign),
        "files": [] if foreign is None else file_rows(foreign),
        "directories": [
            {**directory_values(analysis), "runs": runs_values(analysis, is_inside=is_inside)}
            for analysis in analyses
        ],
        **top_values(analyses, verdict, "" if foreign is None else foreign.subject),
        **comparison_values(verdict),
        **definition_values(verdict.comparisons),
    }
    return render_page(values)


def _sizes(charts: Sequence[Chart], comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The rules for sizes that depend on the results. The policy of the page allows no ``style`` attributes."""
    heights = sorted({chart.height for chart in charts if chart.figure is not None})
    plots = [each[name] for each in comparisons for name in ("forest", "nodes") if each[name] is not None]
    labels = sorted({plot["label_ch"] for plot in plots})
    return "\n".join(
        (
            *(f'.chart[data-height="{px}"] {{ min-height: {px}px; }}' for px in heights),
            *(f'.forest[data-label="{ch}"] {{ --label: {ch}ch; }}' for ch in labels),
        )
    )


def _percentiles(
    analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict, foreign: ForeignSides | None
) -> list[dict[str, Any]]:
    """The tables of percentiles, under the names of the directories, or of the cells of result files."""
    if foreign is not None:
        return [table for comparison in verdict.comparisons for table in foreign_percentiles(comparison)]
    return [
        {**table, "name": analysis.results.path.resolve().name if len(analyses) > 1 else ""}
        for analysis in analyses
        if (table := percentile_values(analysis)) is not None
    ]


def _comparisons(verdict: PageVerdict) -> list[dict[str, Any]]:
    """Every comparison that could be made, under the names of its sides where there are several."""
    has_names = len(verdict.comparisons) > 1
    num_cells = sum(len(comparison.cells) for comparison in verdict.comparisons)
    return [
        {
            "name": f"{each.b_name} against {each.a_name}" if has_names else None,
            "forest": forest_values(each.comparison),
            "table": table_values(each.comparison, num_cells),
            "nodes": node_values(each.comparison),
            "answers": answer_values(each.comparison),
        }
        for each in verdict.all
        if each.comparison is not None
    ]


def _waterfalls(analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict) -> dict[str, list[dict[str, Any]]]:
    """Those of the ladders of controls, then of the wall time and of the step in every cell.

    ``open`` are those of the ladders and of the cell with the largest change, ``folded`` all others.
    """
    ladders = [fall for analysis in analyses for fall in _ladder_waterfalls(analysis)]
    cells = [cell for comparison in verdict.comparisons for cell in comparison.cells]
    if any(analysis.passes is not None for analysis in analyses):
        cells = []  # all of the difference is in the one pass that every step is
    groups = [(cell, _cell_waterfalls(cell)) for cell in cells]
    foremost = max((cell for cell, falls in groups if falls), key=_size_of_change, default=None)
    opened = [fall for cell, falls in groups if cell is foremost for fall in falls]
    folded = [fall for cell, falls in groups if cell is not foremost for fall in falls]
    return {
        "open": [waterfall_values(fall) for fall in (*ladders, *opened)],
        "folded": [waterfall_values(fall) for fall in folded],
    }


def _cell_waterfalls(cell: CellComparison) -> list[Waterfall]:
    falls = (from_decomposition(cell), from_sections(cell), from_model(cell))
    return [fall for fall in falls if fall is not None]


def _size_of_change(cell: CellComparison) -> float:
    """The largest change of a deciding metric, up or down, as a logarithm."""
    return max((abs(m.estimate.log_ratio) for m in cell.deciding if m.estimate is not None), default=0.0)


def _ladder_waterfalls(analysis: AnalyzedExperiment) -> Iterator[Waterfall]:
    cells = {cell.label: cell for cell in analysis.cells}
    for ladder in analysis.ladders:
        base = cells.get(ladder.whole.lower)
        for quantity, unit in _LADDER_QUANTITIES.items():
            fall = from_ladder(ladder, base.centre(quantity) if base is not None else None, quantity, unit)
            if fall is not None:
                yield fall
