"""From result directories to the text of a page, whatever state they are in."""

from collections.abc import Sequence
from dataclasses import replace

from benchctl.analysis.analyzed import Reading
from benchctl.analysis.compare.compare import CompareOptions, Side
from benchctl.report.page.charts.chart import Chart
from benchctl.report.page.charts.charts import draw_charts
from benchctl.report.page.judged import Verdict, judge_directory, judge_sides
from benchctl.report.page.page import PageContent, render


def directory_page(reading: Reading, options: CompareOptions | None = None) -> str:
    """The page of one directory, to be written into it: every other variant against its baseline."""
    verdict = judge_directory(reading, options)
    content = PageContent(
        title=f"{verdict.word}: {reading.results.manifest.profile}",
        readings=(reading,),
        verdict=verdict,
        charts=_charts(reading, verdict),
        is_inside=True,
    )
    return render(content)


def sides_page(a: tuple[Reading, Side], b: tuple[Reading, Side], options: CompareOptions | None = None) -> str:
    """The page of two sides. Charts are those of each directory; of one directory, once."""
    verdict = judge_sides(a, b, options)
    (judged,) = verdict.judged
    readings = (a[0],) if a[0] is b[0] else (a[0], b[0])
    charts = _charts(readings[0], verdict) if len(readings) == 1 else _charts_of_each(readings)
    content = PageContent(
        title=f"{verdict.word}: {judged.b_name} against {judged.a_name}",
        readings=readings,
        verdict=verdict,
        charts=charts,
        is_inside=False,
    )
    return render(content)


def _charts(reading: Reading, verdict: Verdict) -> tuple[Chart, ...]:
    """Those of one directory whose own variants were compared."""
    cells = [cell for comparison in verdict.comparisons for cell in comparison.cells]
    noise = {name: found for comparison in verdict.comparisons for name, found in comparison.noise.items()}
    return draw_charts(reading, cells=cells, noise=noise)


def _charts_of_each(readings: Sequence[Reading]) -> tuple[Chart, ...]:
    """Those of several directories, told apart by their names."""
    return tuple(
        replace(chart, id=f"{chart.id}-{i}", title=f"{chart.title}: {reading.results.path.resolve().name}")
        for i, reading in enumerate(readings, start=1)
        for chart in draw_charts(reading)
    )
