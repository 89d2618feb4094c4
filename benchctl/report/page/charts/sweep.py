"""Ratios to the baseline over a swept factor, one panel of a Plotly figure for each quantity."""

import math
from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.latencies import few_requests
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.records.noise import MetricNoise
from benchctl.report.charts.palette import GREY
from benchctl.report.charts.sweep import (
    NO_SWEEP,
    SweepLine,
    SweepPoint,
    factor_value,
    interval_label,
    reach_of,
    sweep_lines,
    swept_factor,
    swept_rows,
)
from benchctl.report.page.charts import figure

_QUANTITIES: Final = {
    "wall": ("wall_s", "wall time"),
    "step_ms": ("step_ms", "time per step"),
    "ttft": ("ttft_ms", "mean TTFT"),
    "p99_ttft": ("p99_ttft_ms", "p99 TTFT"),
}
"""Name in a row of the sweep, then name of the metric, and in words."""
_ID: Final = "sweep"
_TITLE: Final = "Cost over the swept factor"
_PANEL_PX: Final = 210
_REST_PX: Final = 80
_MAX_BANDS: Final = 3
_MAX_TICKS: Final = 12
_MAX_UPRIGHT: Final = 4
"""The names of more cells do not fit side by side on a phone."""
_LOG_FROM: Final = 10.0
"""A factor whose largest value is this many times the smallest gets a logarithmic axis."""


def draw_sweep(source: figure.ChartSource) -> figure.Chart:
    """With the noise of an A/A experiment as a band around 1, or else with the baseline's own scatter."""
    rows = swept_rows(source.analysis, _QUANTITIES)
    if len(rows) < 2:
        return figure.no_chart(_ID, _TITLE, NO_SWEEP)
    factor = swept_factor(rows)
    lines = sweep_lines(rows, factor)
    quantities = [name for name in _QUANTITIES if any(name in row.estimates for row in rows)]
    reaches = [reach_of([point for line in lines for point in line.points(name)]) for name in quantities]
    has_bands = factor is not None and len(lines) <= _MAX_BANDS
    few = few_requests([run for cell in source.analysis.cells for run in cell.runs], 99)
    y_axes = [
        figure.axis(
            _QUANTITIES[name][1]
            + (f" of<br>{few} requests" if few and name == "p99_ttft" else "")
            + ",<br>ratio to baseline",
            range=[reach.low, reach.high],
        )
        for name, reach in zip(quantities, reaches, strict=True)
    ]
    noise_bands = [_noise_band(source, _QUANTITIES[name][0], panel) for panel, name in enumerate(quantities)]
    shapes = [*(_one(panel) for panel in range(len(quantities))), *(shape for shape in noise_bands if shape)]
    height = _REST_PX + _PANEL_PX * len(quantities) + figure.legend_px(line.label for line in lines)
    return figure.drawn(
        _ID,
        _TITLE,
        [
            trace
            for panel, name in enumerate(quantities)
            for line in lines
            for trace in _traces(line, line.points(name), panel, has_bands=has_bands)
        ],
        figure.layout(height, **figure.panels(_x_axis(rows, factor), y_axes), shapes=shapes),
        caption=_caption(rows, source.noise, is_cut=any(reach.is_cut for reach in reaches)),
        definition=(
            "Ratio to the baseline of the same block, as compare estimates it, with its interval; open "
            "circles are single blocks. Above 1 the cell is slower than the baseline."
        ),
    )


def _traces(line: SweepLine, points: Sequence[SweepPoint], panel: int, *, has_bands: bool) -> list[figure.Trace]:
    if not points:
        return []
    estimates = [point.estimate for point in points]
    x = [_tick(point.x) for point in points]
    low, high = figure.rounded(e.ci_low for e in estimates), figure.rounded(e.ci_high for e in estimates)
    ratios = figure.rounded(e.ratio for e in estimates)
    shared = {"name": line.label, "legendgroup": line.label, "type": "scatter", "yaxis": figure.panel_axis(panel)}
    mean: figure.Trace = {
        **shared,
        "mode": "lines+markers" if line.is_ordered else "markers",
        "showlegend": panel == 0,
        "x": x,
        "y": ratios,
        "line": {"color": line.color, "dash": line.dash, "width": 2},
        "marker": {"color": line.color, "size": 8},
        "customdata": [[lo, hi, e.num_blocks] for lo, hi, e in zip(low, high, estimates, strict=True)],
        "hovertemplate": (
            "%{x}: %{y:.4~g} [%{customdata[0]:.4~g}, %{customdata[1]:.4~g}] over %{customdata[2]} blocks"
        ),
    }
    blocks = [(_tick(point.x), block, ratio) for point in points for block, ratio in point.blocks]
    single: figure.Trace = {
        **shared,
        "mode": "markers",
        "showlegend": False,
        "x": [at for at, _, _ in blocks],
        "y": figure.rounded(ratio for _, _, ratio in blocks),
        "customdata": [block for _, block, _ in blocks],
        "marker": {"color": line.color, "symbol": "circle-open", "size": 6},
        "hovertemplate": "%{x}, block %{customdata}: %{y:.4~g}",
    }
    if not has_bands:
        return [{**mean, "error_y": figure.error_bars(ratios, low, high, line.color)}, single]
    return [
        figure.band(x, low, high, line.color, legendgroup=line.label, yaxis=figure.panel_axis(panel)),
        mean,
        single,
    ]


def _tick(x: float | str) -> float | str:
    return x.replace("\n", "<br>") if isinstance(x, str) else x


def _x_axis(rows: Sequence[SweepRow], factor: str | None) -> figure.Trace:
    """The factor at its values, logarithmic where they span much; without one, the cells side by side."""
    if factor is None:
        return figure.axis(
            " and ".join(rows[0].cell), type="category", tickangle=0 if len(rows) <= _MAX_UPRIGHT else None
        )
    values = sorted({factor_value(row, factor) for row in rows})
    is_log = values[0] > 0 and values[-1] / values[0] >= _LOG_FROM
    few = {"tickvals": values, "ticktext": [f"{value:g}" for value in values]} if len(values) <= _MAX_TICKS else {}
    return figure.axis(factor, type="log" if is_log else "linear", **few)


def _one(panel: int) -> figure.Trace:
    return {
        "type": "line",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": figure.panel_axis(panel),
        "y0": 1,
        "y1": 1,
        "line": {"color": GREY, "width": 1.5, "dash": "dash"},
    }


def _noise_band(source: figure.ChartSource, metric: str, panel: int) -> figure.Trace | None:
    """A grey band around 1, as wide as the noise alone."""
    noise = source.noise.get(metric)
    scatter = None if source.noise else _baseline_scatter(source.analysis, metric)
    half = scatter if noise is None else math.log1p(noise.floor_frac)
    if half is None:
        return None
    return {
        "type": "rect",
        "layer": "below",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": figure.panel_axis(panel),
        "y0": math.exp(-half),
        "y1": math.exp(half),
        "fillcolor": figure.translucent(GREY, 0.25),
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
    interval = interval_label([estimate for row in rows for estimate in row.estimates.values()])
    grey = "the noise of an A/A experiment" if noise else "one standard deviation of the baseline's own blocks"
    cut = "; intervals extend beyond the picture" if is_cut else ""
    return f"Ratio to the baseline with its {interval}{cut}; the grey band around 1 is {grey}."
