"""From result directories to the text of a page, whatever state they are in."""

from collections.abc import Sequence
from dataclasses import replace

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import Comparison
from benchctl.report.page.charts.figure import Chart
from benchctl.report.page.charts.table import draw_charts
from benchctl.report.page.foreign import ForeignSides, distribution_charts
from benchctl.report.page.page import render
from benchctl.report.page.verdict import (
    AnalyzedSide,
    PageVerdict,
    directory_verdict,
    sides_verdict,
    unpaired_verdict,
)


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
    verdict = unpaired_verdict(comparison)
    title = f"{verdict.word}: {sides.b_name} against {sides.a_name}"
    return render(title, (), verdict, distribution_charts(sides), is_inside=False, foreign=sides)


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
