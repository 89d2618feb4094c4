"""The data of the page, inside the page: what somebody else needs to compute its ratios again.

The content security policy of a page: what a browser runs and loads of it, whatever else gets into its text.
Plain values to HTML by the templates in ``templates/``: every text is escaped, whatever it looks like.
The report page: one HTML file that needs nothing else, neither network nor server nor the result directory.
From result directories to the text of a page, whatever state they are in.
"""

import base64
import gzip
import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from benchctl import __version__
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.formats import capitalized, minus, minus_in_numbers, percentage
from benchctl.records.noise import MetricNoise
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.charts.figure import Chart
from benchctl.report.charts.ratios import draw_acceptance, draw_block_values, draw_sweep
from benchctl.report.charts.requests import draw_gpu, draw_host, draw_latencies, draw_requests
from benchctl.report.charts.steps import draw_batch_size, draw_sections, draw_step_time
from benchctl.report.documents import comparison_document
from benchctl.report.model_documents import verdicts_document
from benchctl.report.page.foreign import ForeignSides, distribution_charts, file_rows
from benchctl.report.page.foreign import percentile_values as foreign_percentiles
from benchctl.report.page.sections import (
    answer_values,
    bonus_values,
    comparison_values,
    directory_values,
    node_values,
    passes_values,
    percentile_values,
    runs_values,
    table_values,
    top_values,
)
from benchctl.report.page.verdict import (
    AnalyzedSide,
    PageVerdict,
    directory_verdict,
    made_verdict,
    sides_verdict,
)
from benchctl.report.page.waterfall import (
    Waterfall,
    forest_values,
    from_decomposition,
    from_ladder,
    from_model,
    from_sections,
    packed,
    waterfall_values,
)
from benchctl.report.page.words import SHAPES, SIGNS, definition_values, kind_of
from benchctl.untrusted.text import visible, visible_lines


def data_document(
    verdict: PageVerdict, analyses: Sequence[AnalyzedExperiment], charts: Sequence[Chart]
) -> dict[str, Any]:
    """``benchctl-data``: comparisons with their block values, runs, and the series of the charts, downsampled."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": {"verdict": verdict.word, "exit_code": verdict.exit_code, "summary": verdict.sentence},
        "comparisons": [comparison_document(one) for one in verdict.all],
        "directories": [_directory(analysis) for analysis in analyses],
        "charts": [
            {
                "id": chart.id,
                "title": chart.title,
                "definition": chart.definition,
                "choices": [{"name": choice.name, "selected": choice.selected} for choice in chart.choices],
                "spec": {**chart.spec, "datasets": packed(chart.spec["datasets"])},
            }
            for chart in charts
            if chart.spec
        ],
        "definitions": {name: f"{metric.formula} [{metric.unit}]" for name, metric in METRICS.items()},
    }


def _directory(analysis: AnalyzedExperiment) -> dict[str, Any]:
    manifest = analysis.results.manifest
    return {
        "name": analysis.results.path.resolve().name,
        "profile": manifest.profile,
        "profile_sha256": manifest.profile_sha256,
        "request_set_sha256": manifest.request_set_sha256,
        "created_at": manifest.created_at,
        "runs": [dict(run.values) for run in analysis.runs],
        **({} if analysis.bonus is None else {"bonus": verdicts_document(analysis.bonus)}),
    }


def content_policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    """The policy under which the given inline scripts and styles are the only ones of a document.

    Pictures may be ``data:`` addresses: the empty icon. Vega sets its styles by the object model, and a policy
    judges only those in the text; expressions of a specification are interpreted (``ast``). So neither
    ``unsafe-inline`` nor ``unsafe-eval`` is needed.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes(styles)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hashes(texts: Iterable[str]) -> str:
    """Source expressions of Content Security Policy Level 3: ``'sha256-`` and the digest of the UTF-8 in base64."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)


def render_page(values: dict[str, Any]) -> str:
    """The page as HTML; the same values give the same bytes. Raises jinja2.UndefinedError for a missing value."""
    return _environment().get_template("page.html").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("benchctl.report.page"),
        autoescape=True,
        finalize=_visible_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "capitalized": capitalized,
        "kind": kind_of,
        "minus": minus,
        "minus_in_numbers": minus_in_numbers,
        "percentage": percentage,
        "whole": whole,
    }
    environment.globals |= {"shapes": SHAPES, "signs": SIGNS}
    return environment


def _visible_value(value: Any) -> Any:
    """A value on its way into the page: of a text, what can be seen; markup stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def whole(text: str) -> Markup:
    """A text of many lines, such as a log, of which only lines that are too long are cut."""
    return escape(visible_lines(text))


def inert_json(document: Any) -> Markup:
    """A JSON document for a ``<script>`` element, which scripts and people can read out again.

    Nothing in it can end its element: every ``<`` is written as an escape of JSON, which means the same.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - nothing in it can end its element


def closed(code: str, tag: str) -> Markup:
    """Our own rules or script as the content of a ``tag`` element. Raises ValueError for code that ends it."""
    if f"</{tag}" in code.lower():
        raise ValueError(f"this {tag} holds </{tag} and cannot be put into a page")
    return Markup(code)  # noqa: S704 - code of our own that cannot end its element


def resource(name: str) -> str:
    """A text file of this package."""
    return (files("benchctl.report.page") / name).read_text(encoding="utf-8")


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as they are run."""
    return resource("vendor/vega.js")


@cache
def packed_vega() -> Markup:
    """The same, compressed by gzip and written in base64: 0.4 MB instead of 0.9; the page unpacks it."""
    code = base64.b64encode(gzip.compress(vega().encode(), mtime=0)).decode()
    return Markup(code)  # noqa: S704 - base64 has no markup


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
        "policy": content_policy(scripts=(script, vega()), styles=(css, sizes)),
        "css": css,
        "sizes": sizes,
        "script": script,
        "vega": packed_vega(),
        "data": inert_json(data_document(verdict, analyses, charts)),
        "verdict": verdict,
        "comparisons": comparisons,
        "waterfalls": _waterfalls(analyses, verdict),
        "backfills": [values for analysis in analyses if (values := bonus_values(analysis)) is not None],
        "passes": [values for analysis in analyses if (values := passes_values(analysis)) is not None],
        "charts": [chart for chart in charts if chart.section != "latency"],
        "latency_charts": [chart for chart in charts if chart.section == "latency" and chart.spec],
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
    heights = sorted({chart.height for chart in charts if chart.spec})
    labels = sorted({each["forest"]["label_ch"] for each in comparisons if each["forest"] is not None})
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
        {"table": table, "name": analysis.results.path.resolve().name if len(analyses) > 1 else ""}
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


def directory_page(
    analysis: AnalyzedExperiment,
    options: CompareOptions | None = None,
    *,
    verdict: PageVerdict | None = None,
    is_inside: bool = True,
) -> str:
    """The page of one directory: every other variant against its baseline.

    ``verdict`` is that of the directory where it is known already; ``is_inside``: the page is written into it.
    """
    verdict = directory_verdict(analysis, options) if verdict is None else verdict
    title = f"{verdict.word}: {analysis.results.manifest.profile}"
    return render(title, (analysis,), verdict, _charts(analysis, verdict), is_inside=is_inside)


def sides_page(
    a: AnalyzedSide, b: AnalyzedSide, options: CompareOptions | None = None, comparison: Comparison | None = None
) -> str:
    """The page of two sides. Charts are those of each directory; of one directory, once.

    ``comparison`` is theirs where it was already made.
    """
    verdict = sides_verdict(a, b, options, comparison)
    (side_verdict,) = verdict.deciding
    analyses = (a[0],) if a[0] is b[0] else (a[0], b[0])
    charts = _charts(analyses[0], verdict) if len(analyses) == 1 else _charts_of_each(analyses)
    title = f"{verdict.word}: {side_verdict.b_name} against {side_verdict.a_name}"
    return render(title, analyses, verdict, charts, is_inside=False)


def files_page(comparison: Comparison, sides: ForeignSides) -> str:
    """The page of an unpaired comparison, of which at least one side are result files of other tools."""
    verdict = made_verdict(comparison)
    title = f"{verdict.word}: {sides.b_name} against {sides.a_name}"
    return render(title, (), verdict, distribution_charts(sides), is_inside=False, foreign=sides)


def draw_charts(
    analysis: AnalyzedExperiment,
    *,
    cells: Sequence[CellComparison] = (),
    noise: Mapping[str, MetricNoise] | None = None,
) -> tuple[Chart, ...]:
    """Every chart of a result directory in the order of a reader's questions, drawn or with the reason why not.

    A chart of something that no run did, such as drafting tokens, is left out. ``cells`` are the comparisons of the
    directory's variants with its baseline, ``noise`` is that of an A/A experiment by metric; without them outliers
    are not marked, and the baseline's own scatter replaces the noise.
    """
    charts = (
        draw_latencies(analysis),
        draw_block_values(analysis, cells),
        draw_sweep(analysis, noise),
        draw_acceptance(analysis),
        draw_sections(analysis),
        draw_step_time(analysis),
        draw_batch_size(analysis),
        draw_requests(analysis),
        draw_gpu(analysis),
        draw_host(analysis),
    )
    return tuple(chart for chart in charts if chart is not None)


def _charts(analysis: AnalyzedExperiment, verdict: PageVerdict) -> tuple[Chart, ...]:
    """Those of one directory whose own variants were compared."""
    cells = [cell for comparison in verdict.comparisons for cell in comparison.cells]
    noise = {name: floor for comparison in verdict.comparisons for name, floor in comparison.noise.items()}
    return draw_charts(analysis, cells=cells, noise=noise)


def _charts_of_each(analyses: Sequence[AnalyzedExperiment]) -> tuple[Chart, ...]:
    """Those of several directories, told apart by their names."""
    return tuple(
        replace(chart, id=f"{chart.id}-{i}", title=f"{chart.title}: {analysis.results.path.resolve().name}")
        for i, analysis in enumerate(analyses, start=1)
        for chart in draw_charts(analysis)
    )
