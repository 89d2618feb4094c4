"""Ratios to the baseline over a swept factor: does the cost grow with it, and by how much?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.formats import range_of
from benchctl.records.noise import MetricNoise
from benchctl.report.page.charts.chart import (
    GREY,
    Chart,
    Trace,
    axis,
    band,
    drawn,
    layout,
    legend_px,
    no_chart,
    panel_axis,
    panels,
    rounded,
    translucent,
)
from benchctl.report.page.charts.sweep_lines import Line, lines_of, swept_factor, x_axis

_QUANTITIES: Final = (("wall", "wall_s", "wall time"), ("step_ms", "step_ms", "time per step"))
"""Name in a row of the sweep, name of the metric, and in words."""
_ID: Final = "sweep"
_TITLE: Final = "Cost over the swept factor"
_PANEL_PX: Final = 210
_REST_PX: Final = 80
_MAX_BANDS: Final = 3
_REACH: Final = 1.0
"""An interval of few blocks can reach far; what lies beyond the points by more than their span is cut."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """What the y axis of a panel shows, and whether an interval reaches beyond it."""

    low: float
    high: float
    is_cut: bool


def draw_sweep(analysis: AnalyzedExperiment, noise: Mapping[str, MetricNoise]) -> Chart:
    """``noise`` is that of an A/A experiment, by metric; without it the baseline's own scatter is shown."""
    rows = [row for row in analysis.sweep if row.cell and any(name in row.estimates for name, _, _ in _QUANTITIES)]
    if len(rows) < 2:
        return no_chart(
            _ID, _TITLE, "no variant has finished runs beside the baseline in two or more cells of a sweep"
        )
    factor = swept_factor(rows)
    lines = lines_of(rows, factor)
    shown = [item for item in _QUANTITIES if any(item[0] in row.estimates for row in rows)]
    reaches = [_reach(rows, quantity) for quantity, _, _ in shown]
    has_bands = factor is not None and len(lines) <= _MAX_BANDS
    y_axes = [
        axis(f"{words},<br>ratio to baseline", range=[reach.low, reach.high])
        for (_, _, words), reach in zip(shown, reaches, strict=True)
    ]
    bands = [_noise_band(analysis, metric, noise, panel) for panel, (_, metric, _) in enumerate(shown)]
    shapes = [*(_one(panel) for panel in range(len(shown))), *(shape for shape in bands if shape)]
    height = _REST_PX + _PANEL_PX * len(shown) + legend_px(line.label for line in lines)
    return drawn(
        _ID,
        _TITLE,
        [
            trace
            for panel, (quantity, _, _) in enumerate(shown)
            for line in lines
            for trace in _traces(line, quantity, panel, has_bands=has_bands)
        ],
        layout(height, **panels(x_axis(rows, factor), y_axes), shapes=shapes),
        caption=_caption(rows, noise, is_cut=any(reach.is_cut for reach in reaches)),
        definition=(
            "Ratio to the baseline of the same block, geometric mean over the blocks, with its interval; open "
            "circles are single blocks. Above 1 the cell is slower than the baseline."
        ),
    )


def _traces(line: Line, quantity: str, panel: int, *, has_bands: bool) -> list[Trace]:
    known = [
        (x, row.estimates[quantity]) for x, row in zip(line.x, line.rows, strict=True) if quantity in row.estimates
    ]
    if not known:
        return []
    x = [at for at, _ in known]
    low, high = rounded(e.ci_low for _, e in known), rounded(e.ci_high for _, e in known)
    ratios = rounded(e.ratio for _, e in known)
    mean: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if isinstance(line.x[0], float) else "markers",
        "name": line.label,
        "legendgroup": line.label,
        "showlegend": panel == 0,
        "x": x,
        "y": ratios,
        "yaxis": panel_axis(panel),
        "line": {"color": line.color, "dash": line.dash, "width": 2},
        "marker": {"color": line.color, "size": 8},
        "customdata": [[lo, hi, e.num_blocks] for lo, hi, (_, e) in zip(low, high, known, strict=True)],
        "hovertemplate": (
            "%{x}: %{y:.4~g} [%{customdata[0]:.4~g}, %{customdata[1]:.4~g}] over %{customdata[2]} blocks"
        ),
    }
    single = _single_blocks(line, quantity, panel)
    if not has_bands:
        return [{**mean, "error_y": _bars(ratios, low, high, line.color)}, single]
    return [band(x, low, high, line.color, legendgroup=line.label, yaxis=panel_axis(panel)), mean, single]


def _single_blocks(line: Line, quantity: str, panel: int) -> Trace:
    blocks = [
        (at, pair.block, ratio)
        for at, row in zip(line.x, line.rows, strict=True)
        for pair in row.pairs
        if (ratio := pair.ratio(quantity)) is not None
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": line.label,
        "legendgroup": line.label,
        "showlegend": False,
        "x": [at for at, _, _ in blocks],
        "y": rounded(value for _, _, value in blocks),
        "yaxis": panel_axis(panel),
        "customdata": [block for _, block, _ in blocks],
        "marker": {"color": line.color, "symbol": "circle-open", "size": 6},
        "hovertemplate": "%{x}, block %{customdata}: %{y:.4~g}",
    }


def _bars(
    ratio: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None], hex_color: str
) -> Trace:
    """Distances of the bounds from the ratio."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if r is None or h is None else max(0.0, h - r) for r, h in zip(ratio, high, strict=True)],
        "arrayminus": [
            None if r is None or lo is None else max(0.0, r - lo) for r, lo in zip(ratio, low, strict=True)
        ],
        "color": hex_color,
        "thickness": 1.5,
        "width": 4,
    }


def _reach(rows: Sequence[SweepRow], quantity: str) -> _Reach:
    """All points and the baseline's 1, and as much of the intervals as leaves the points readable."""
    known = [(row, row.estimates[quantity]) for row in rows if quantity in row.estimates]
    points = [
        1.0,
        *(ratio for row, _ in known for pair in row.pairs if (ratio := pair.ratio(quantity)) is not None),
    ]
    lowest, highest = min(points), max(points)
    span = max(highest - lowest, 0.02)
    lows = [estimate.ci_low for _, estimate in known if estimate.ci_low is not None]
    highs = [estimate.ci_high for _, estimate in known if estimate.ci_high is not None]
    low = max(min([lowest, *lows]), lowest - _REACH * span)
    high = min(max([highest, *highs]), highest + _REACH * span)
    is_cut = low > min([low, *lows]) or high < max([high, *highs])
    return _Reach(round(low - 0.06 * span, 4), round(high + 0.06 * span, 4), is_cut)


def _one(panel: int) -> Trace:
    return {
        "type": "line",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": panel_axis(panel),
        "y0": 1,
        "y1": 1,
        "line": {"color": GREY, "width": 1.5, "dash": "dash"},
    }


def _noise_band(
    analysis: AnalyzedExperiment, metric: str, noise: Mapping[str, MetricNoise], panel: int
) -> Trace | None:
    """A grey band around 1, as wide as what nothing but noise shows."""
    half = math.log1p(noise[metric].floor_frac) if metric in noise else _baseline_scatter(analysis, metric)
    if half is None:
        return None
    return {
        "type": "rect",
        "layer": "below",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": panel_axis(panel),
        "y0": math.exp(-half),
        "y1": math.exp(half),
        "fillcolor": translucent(GREY, 0.25),
        "line": {"width": 0},
    }


def _baseline_scatter(analysis: AnalyzedExperiment, metric: str) -> float | None:
    """Standard deviation of the logarithms of the baseline's blocks; None below three."""
    baseline = analysis.results.manifest.baseline
    cells = [cell for cell in analysis.cells if cell.variant == baseline and not cell.cell]
    values = [
        value for cell in cells for run in cell.runs if (value := run.number(metric)) is not None and value > 0
    ]
    return stdev(map(math.log, values)) if len(values) > 2 else None


def _caption(rows: Sequence[SweepRow], noise: Mapping[str, MetricNoise], *, is_cut: bool) -> str:
    estimates = [estimate for row in rows for estimate in row.estimates.values()]
    blocks = range_of([estimate.num_blocks for estimate in estimates])
    grey = "the noise of an A/A experiment" if noise else "one standard deviation of the baseline's own blocks"
    cut = "; intervals reach beyond the picture" if is_cut else ""
    return (
        f"Ratio to the baseline with its {estimates[0].confidence:.0%} interval over {blocks} blocks{cut}; the "
        f"grey band around 1 is {grey}."
    )
