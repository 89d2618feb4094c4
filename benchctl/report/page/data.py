"""The data of the page, inside the page: what somebody else needs to compute its ratios again."""

from collections.abc import Sequence
from typing import Any

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.metrics.table import METRICS
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.documents.bonus import verdicts_document
from benchctl.report.documents.verdict import comparison_document
from benchctl.report.page.charts.figure import Chart
from benchctl.report.page.packing import packed
from benchctl.report.page.verdict import PageVerdict


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
                "figure": packed(chart.figure),
            }
            for chart in charts
            if chart.figure is not None
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
