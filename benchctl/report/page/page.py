"""The report page: one HTML file that needs nothing else, neither network nor server nor the result directory.

Plain values become HTML by the templates in ``templates/``: every text is escaped, whatever it looks like. The data
of the page is inside it, so that somebody else can compute its ratios again.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from benchctl import __version__, units
from benchctl.analysis.analyzed import (
    LATENCY_NAMES,
    AnalyzedExperiment,
    level_of_blocks,
)
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.metrics.latency import PERCENTS
from benchctl.interop.foreign_readers import ForeignRun
from benchctl.profile.engine_table import is_virtual
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.charts import curves, ratios, requests, steps
from benchctl.report.charts.figure import Chart, Subject
from benchctl.report.curve_tables import capacity_lines, capacity_table, curves_table, knee_lines
from benchctl.report.documents import comparison_document, definitions
from benchctl.report.experiment_tables import carry_over_table, scatter_lines, scatter_table
from benchctl.report.model_documents import verdicts_document
from benchctl.report.page.parts import (
    bonus_values,
    comparison_values,
    condition_values,
    directory_name,
    directory_values,
    percentile_values,
    runs_values,
    top_values,
    waterfalls_of,
)
from benchctl.report.table import Table
from benchctl.report.time_tables import launch_table, passes_table, percentile_table
from benchctl.report.verdicts import (
    SHAPES,
    SIGNS,
    AnalyzedSide,
    ComparisonVerdict,
    PageVerdict,
    definition_values,
    directory_verdict,
    kind_of,
    page_verdict,
    verdict_of,
    verdict_of_sides,
)
from benchctl.units import NOT_AVAILABLE, capitalized, minus, minus_in_numbers
from benchctl.untrusted.text import visible, visible_lines

ForeignSides = Sequence[tuple[str, Sequence[ForeignRun]]]
"""Name and runs of each side of an unpaired comparison."""


def directory_page(
    analysis: AnalyzedExperiment,
    options: CompareOptions | None = None,
    *,
    verdict: PageVerdict | None = None,
    charts: Sequence[Chart] | None = None,
    is_inside: bool = True,
) -> str:
    """The page of one directory: every other variant against its baseline.

    ``verdict`` and ``charts`` are those of the directory where they are known already; ``is_inside``: the page is
    written into it.
    """
    verdict = directory_verdict(analysis, options) if verdict is None else verdict
    charts = draw_charts(analysis, verdict.comparisons) if charts is None else charts
    title = f"{verdict.word}: {analysis.results.manifest.profile}"
    return _page(title, verdict, charts, [analysis], is_inside=is_inside)


def sides_page(
    a: AnalyzedSide, b: AnalyzedSide, options: CompareOptions | None = None, comparison: Comparison | None = None
) -> tuple[str, ComparisonVerdict]:
    """The page of two sides, and their verdict. Charts are those of each directory; of one directory, once.

    ``comparison`` is theirs where it was already made.
    """
    one = verdict_of_sides(a, b, options) if comparison is None else verdict_of(comparison)
    analyses = [a[0]] if a[0] is b[0] else [a[0], b[0]]
    verdict = page_verdict([one], one.a_name, analyses)
    if len(analyses) == 1:
        charts = [*draw_charts(analyses[0], verdict.comparisons)]
    else:  # charts of two directories are told apart by their names
        charts = [
            replace(chart, id=f"{chart.id}-{i}", title=f"{chart.title}: {directory_name(analysis)}")
            for i, analysis in enumerate(analyses, start=1)
            for chart in draw_charts(analysis)
        ]
    return _page(f"{verdict.word}: {one.sides}", verdict, charts, analyses), one


def files_page(comparison: Comparison, sides: ForeignSides) -> str:
    """The page of an unpaired comparison with result files of other tools: the files, and the latencies of their
    requests if these are known.
    """
    verdict = page_verdict([verdict_of(comparison)], comparison.a_name)
    runs = [run for _, of_side in sides for run in of_side]
    tools = ", ".join(sorted({run.source for run in runs}))
    models = ", ".join(dict.fromkeys(str(model) for run in runs if (model := run.settings.get("model_id"))))
    numbers = " against ".join(str(len(of_side)) for _, of_side in sides)
    values: dict[str, Any] = {
        "subject": f"result files of {tools} · {models or 'unknown model'} · {numbers} runs",
        "files": [
            {
                "side": name,
                "where": run.where,
                "source": run.source,
                "requests": units.whole(run.metrics.get("num_completed")),
                "failure": run.failure or "",
                "settings": _settings_text(run.settings.items(), ", ", " "),
            }
            for name, of_side in sides
            for run in of_side
        ],
        "percentiles": [
            {"table": table, "name": cell.label if len(comparison.cells) > 1 else ""}
            for cell in comparison.cells
            if (table := _file_percentiles(cell, comparison.rules.confidence)) is not None
        ],
    }
    groups: dict[str, list[ForeignRun]] = {}
    for name, of_side in sides:
        for run in of_side:
            load = (
                f" {_settings_text(run.load_point, ' ', '=')}" if len({run.load_point for run in runs}) > 1 else ""
            )
            groups.setdefault(f"{name}{load}", []).append(run)
    latencies = {
        label: [
            (f"run {i}", {name: np.sort(np.array(values)) for name, values in run.latencies_ms.items()})
            for i, run in enumerate(group, 1)
        ]
        for label, group in groups.items()
    }
    title = f"{verdict.word}: {comparison.b_name} against {comparison.a_name}"
    return _page(title, verdict, [requests.draw_distributions(latencies, unit="run")], **values)


def _settings_text(settings: Iterable[tuple[str, float | str | None]], between: str, sign: str) -> str:
    return between.join(
        f"{key}{sign}{f'{value:g}' if isinstance(value, float) else str(value) or NOT_AVAILABLE}"
        for key, value in settings
        if value is not None
    )


def _file_percentiles(cell: CellComparison, confidence: float) -> Table | None:
    metrics = {metric.metric.name: metric for metric in cell.metrics}
    rows = [
        (
            latency,
            label,
            [
                None if metric is None else level_of_blocks(*side_of(metric), confidence)
                for percent in PERCENTS
                for metric in [metrics.get(f"p{percent}_{latency}_ms")]
            ],
        )
        for latency in LATENCY_NAMES
        for label, side_of in (
            (cell.a_label, attrgetter("a_blocks", "a")),
            (cell.b_label, attrgetter("b_blocks", "b")),
        )
    ]
    return percentile_table(rows, confidence, "run")


def draw_charts(analysis: AnalyzedExperiment, comparisons: Sequence[Comparison] = ()) -> tuple[Chart, ...]:
    """Every chart of a result directory in the order of a reader's questions, drawn or with the reason why not.

    A chart of something that no run did, such as drafting tokens, is left out. Without the ``comparisons`` of its
    variants with its baseline outliers are not marked, and the baseline's own scatter replaces the noise.
    """
    subject = Subject(analysis, comparisons)
    drawn = (draw(subject) for module in (curves, ratios, steps, requests) for draw in module.CHARTS)
    is_simulated = is_virtual(analysis.results.manifest.engine)
    return tuple(replace(chart, is_simulated=is_simulated) for chart in drawn if chart is not None)


def _page(
    title: str,
    verdict: PageVerdict,
    charts: Sequence[Chart],
    analyses: Sequence[AnalyzedExperiment] = (),
    *,
    is_inside: bool = False,
    **more: Any,
) -> str:
    """The page as HTML; the same arguments give the same bytes.

    ``is_inside``: it will be written into the (one) result directory that it is about. ``more`` replaces values of
    the templates where there is no analysis.
    """
    comparisons = comparison_values(verdict)
    charts = [chart for chart in charts if chart.section]
    all_charts = [*(each["forest"] for each in comparisons if each["forest"] is not None), *charts]
    css = closed(resource("page.css"), "style")
    heights = sorted({chart.height for chart in all_charts if chart.spec})
    # Sizes that depend on the results: the policy of the page allows no ``style`` attributes.
    rules = [f'.chart[data-height="{px}"] {{ min-height: {px}px; }}' for px in heights]
    sizes, script = closed("\n".join(rules), "style"), closed(resource("page.js"), "script")
    values = {
        "version": __version__,
        "title": title,
        "policy": content_policy(scripts=(script, vega()), styles=(css, sizes)),
        "css": css,
        "sizes": sizes,
        "script": script,
        "vega": packed_vega(),
        "data": inert_json(data_document(verdict, analyses, all_charts)),
        "verdict": verdict,
        "comparisons": comparisons,
        "waterfalls": waterfalls_of(analyses, verdict),
        "backfills": [values for analysis in analyses if (values := bonus_values(analysis)) is not None],
        "passes": [
            {"name": directory_name(analysis), "times": passes_table(analysis), "launches": launch_table(analysis)}
            for analysis in analyses
            if analysis.passes
        ],
        "capacities": [
            {"name": directory_name(analysis), "table": table, "lines": capacity_lines(analysis)}
            for analysis in analyses
            if (table := capacity_table(analysis)) is not None
        ],
        "scatter": [
            {"name": directory_name(analysis), "of": of, "table": table, "lines": lines}
            for analysis in analyses
            for of, table, lines in (
                ("scatter", scatter_table(analysis), scatter_lines(analysis)),
                ("carry-over", carry_over_table(analysis), list[str]()),
            )
            if table is not None
        ],
        "charts": [chart for chart in charts if chart.section not in {"latency", "load"}],
        "load_charts": [chart for chart in charts if chart.section == "load"],
        "curves": [
            {"name": directory_name(analysis), "table": table, "lines": knee_lines(analysis)}
            for analysis in analyses
            if (table := curves_table(analysis)) is not None
        ],
        "latency_charts": [chart for chart in charts if chart.section == "latency" and chart.spec],
        "percentiles": [
            {"table": table, "name": directory_name(analysis) if len(analyses) > 1 else ""}
            for analysis in analyses
            if (table := percentile_values(analysis)) is not None
        ],
        "files": [],
        "directories": [
            {**directory_values(analysis), "runs": runs_values(analysis, is_inside=is_inside)}
            for analysis in analyses
        ],
        **top_values(analyses, verdict),
        **condition_values(verdict),
        **definition_values(verdict.comparisons),
    }
    return render_page(values | more)


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
                "spec": {**chart.spec, "datasets": packed(json.dumps(chart.spec["datasets"]))},
            }
            for chart in charts
            if chart.spec
        ],
        "definitions": definitions(*analyses),
    }


def _directory(analysis: AnalyzedExperiment) -> dict[str, Any]:
    manifest = analysis.results.manifest
    names = ("profile", "profile_sha256", "request_set_sha256", "created_at")
    return {
        "name": directory_name(analysis),
        **{name: getattr(manifest, name) for name in names},
        "runs": [dict(run.values) for run in analysis.runs],
        **({} if analysis.bonus is None else {"bonus": verdicts_document(analysis.bonus)}),
    }


def content_policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    """The policy under which the given inline scripts and styles are the only ones of a document.

    They are named by source expressions of Content Security Policy Level 3: ``'sha256-`` and the digest of the
    UTF-8 in base64. Pictures may be ``data:`` addresses: the empty icon. Vega sets its styles by the object model,
    and a policy judges only those in the text; expressions of a specification are interpreted (``ast``). So neither
    ``unsafe-inline`` nor ``unsafe-eval`` is needed.
    """
    script_hashes, style_hashes = (
        " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
        for texts in (scripts, styles)
    )
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {script_hashes}; style-src {style_hashes}; {rest}"


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
        "whole": visible_lines,
    }
    environment.globals |= {"shapes": SHAPES, "signs": SIGNS}
    return environment


def _visible_value(value: Any) -> Any:
    """A value on its way into the page: of a text, what can be seen; markup stays as it is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def inert_json(document: Any) -> str:
    """A JSON document for a ``<script>`` element, which scripts and people can read out again.

    Nothing in it can end its element: every ``<`` is written as an escape of JSON, which means the same.
    """
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def closed(code: str, tag: str) -> str:
    """Our own rules or script as the content of a ``tag`` element. Raises ValueError for code that ends it."""
    if f"</{tag}" in code.lower():
        raise ValueError(f"this {tag} holds </{tag} and cannot be put into a page")
    return code


def resource(name: str) -> str:
    """A text file of this package."""
    return (files("benchctl.report.page") / name).read_text(encoding="utf-8")


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as they are run."""
    return resource("vendor/vega.js")


@cache
def packed_vega() -> str:
    """The same in 0.4 MB instead of 0.9."""
    return packed(vega())


def packed(text: str) -> str:
    """A text compressed by gzip and written in base64; the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()  # 9 takes up to four times as long
