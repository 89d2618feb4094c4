"""The sweep: cells as lines over a swept factor, with the ratio to the baseline, its interval and its blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import stdev
from typing import Final

from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, few_requests
from benchctl.analysis.summary.summary import SweepRow
from benchctl.formats import range_of
from benchctl.records.directory import arm_label, cell_name
from benchctl.report.charts import figure

NO_SWEEP: Final = "no variant has finished runs beside the baseline in two or more cells of a sweep"
MEASURED: Final = {
    "wall": ("wall_s", "wall time"),
    "step_ms": ("step_ms", "time per step"),
    "ttft": ("ttft_ms", "mean TTFT"),
    "p99_ttft": ("p99_ttft_ms", "p99 TTFT"),
}
"""Name in a row of the sweep, then name of the metric, and in words."""
WITH_FLOPS: Final = {
    "wall": ("wall_s", "wall time"),
    "pflops": ("", "FLOPs, published rule"),
    "pflops_observed": ("", "FLOPs, observed"),
    "achieved_tflops": ("", "achieved FLOP/s, published rule"),
}
_MAX_BANDS: Final = 3
"""Bands of more lines than this cover one another."""
_MAX_TICKS: Final = 12
_LOG_FROM: Final = 10.0
"""A factor whose largest value is this many times the smallest gets a logarithmic axis."""
_REACH: Final = 1.0
"""An interval over few blocks can extend far; beyond the points it is cut at this multiple of their span."""


def draw_sweep(source: figure.ChartSource, quantities: Mapping[str, tuple[str, str]] = MEASURED) -> figure.Chart:
    """With the noise of an A/A experiment as a band around 1, or else with the baseline's own scatter."""
    rows = [row for row in source.analysis.sweep if row.cell and not quantities.keys().isdisjoint(row.estimates)]
    if len(rows) < 2:
        return figure.Chart(id="sweep", title="Cost over the swept factor", skipped=NO_SWEEP)
    factor = swept_factor(rows)
    lines = list(dict.fromkeys(_line_of(row, factor) for row in rows))
    reaches = {name: reach_of(rows, name) for name in quantities if any(name in row.estimates for row in rows)}
    few = few_requests([run for cell in source.analysis.cells for run in cell.runs], 99)
    encoding = figure.by_series(lines, name="line", first=1)
    encoding["color"]["legend"] = {"symbolOpacity": 1}
    panels = []
    for name, (low, high, _) in reaches.items():
        metric, words = quantities[name]
        of = f" of {few} requests" if few and name == "p99_ttft" else ""
        noise = _noise(source, metric)
        panels.append(
            figure.panel(
                170,
                figure.axis(f"{words}{of}, ratio to baseline", domain=(low, high)),
                [
                    *([] if noise is None else [figure.grey_band(math.exp(-noise), math.exp(noise))]),
                    figure.level(1.0),
                    *_layers(len(lines), is_ordered=factor is not None),
                ],
                where=(f"datum.quantity === '{name}'",),
                encoding=encoding,
            )
        )
    spec = figure.picture(
        panels,
        [row for name in reaches for each in rows for row in _rows(each, name, factor)],
        _x_axis(rows, factor),
        legend=lines,
    )
    estimates = [estimate for row in rows for name, estimate in row.estimates.items() if name in reaches]
    grey = (
        "the noise of an A/A experiment" if source.noise else "one standard deviation of the baseline's own blocks"
    )
    cut = "; intervals extend beyond the picture" if any(is_cut for _, _, is_cut in reaches.values()) else ""
    return figure.Chart(
        id="sweep",
        title="Cost over the swept factor",
        caption=f"Ratio to the baseline with its {interval_label(estimates)}{cut}; grey band around 1: {grey}.",
        definition=(
            "Ratio to the baseline of the same block, as compare estimates it, with its interval; open "
            "circles are single blocks. Above 1 the cell is slower than the baseline."
        ),
        spec=spec,
    )


def swept_factor(rows: Sequence[SweepRow]) -> str | None:
    """The numeric factor with the most values, the first of equals; None where none has two."""
    values = {name: {row.cell.get(name) for row in rows} for row in rows for name in row.cell}
    types = {name: {type(value) for value in cells} for name, cells in values.items() if len(cells) > 1}
    numeric = [name for name in types if types[name] <= {int, float}]
    return max(numeric, key=lambda name: len(values[name]), default=None)


def varied_factors(rows: Sequence[SweepRow]) -> list[str]:
    """The factors that differ between cells; those of a plan that somebody else wrote may have others each."""
    factors = dict.fromkeys(factor for row in rows for factor in row.cell)
    return [factor for factor in factors if len({row.cell.get(factor) for row in rows}) > 1]


def reach_of(rows: Sequence[SweepRow], quantity: str) -> tuple[float, float, bool]:
    """The ends of the y axis, and whether an interval extends beyond them.

    The axis holds all ratios, the baseline's 1, and as much of the intervals as leaves the points readable.
    """
    ratios = [
        1.0,
        *(ratio for row in rows if quantity in row.estimates for ratio in _blocks(row, quantity).values()),
    ]
    estimates = [row.estimates[quantity] for row in rows if quantity in row.estimates]
    ratios += [estimate.ratio for estimate in estimates]
    lowest, highest = min(ratios), max(ratios)
    span = max(highest - lowest, 0.02)
    ends = [end for estimate in estimates for end in (estimate.ci_low, estimate.ci_high) if end is not None]
    low = max(min([lowest, *ends]), lowest - _REACH * span)
    high = min(max([highest, *ends]), highest + _REACH * span)
    is_cut = low > min([low, *ends]) or high < max([high, *ends])
    return round(low - 0.06 * span, 4), round(high + 0.06 * span, 4), is_cut


def interval_label(estimates: Sequence[RatioEstimate]) -> str:
    """Confidence and blocks of the intervals: ``95% interval over 2 to 3 blocks``."""
    blocks = range_of([estimate.num_blocks for estimate in estimates])
    return f"{estimates[0].confidence:.0%} interval over {blocks} blocks"


def _blocks(row: SweepRow, quantity: str) -> Mapping[int, float]:
    return row.ratios[quantity].block_ratios if quantity in row.ratios else {}


def _line_of(row: SweepRow, factor: str | None) -> str:
    """A line for each variant and each combination of the other factors; without a factor, one for each variant."""
    return arm_label(row.variant, {k: v for k, v in row.cell.items() if factor is not None and k != factor})


def _rows(row: SweepRow, quantity: str, factor: str | None) -> Iterator[figure.Row]:
    """The estimate of one cell, then the ratio of each block."""
    estimate = row.estimates.get(quantity)
    if estimate is None:
        return
    line = {"quantity": quantity, "line": _line_of(row, factor), "x": _x_of(row, factor)}
    low, high = estimate.ci_low, estimate.ci_high
    yield {
        **line,
        "kind": "estimate",
        "ratio": estimate.ratio,
        "low": low,
        "high": high,
        "blocks": estimate.num_blocks,
    }
    for block, ratio in _blocks(row, quantity).items():
        yield {**line, "kind": "block", "ratio": ratio, "low": None, "high": None, "blocks": block}


def _x_of(row: SweepRow, factor: str | None) -> float | str:
    """The value of the factor; without one, the cell, by its bare value where it has only one factor."""
    if factor is None:
        return str(next(iter(row.cell.values()))) if len(row.cell) == 1 else cell_name(row.cell)
    value = row.cell.get(factor)
    if not isinstance(value, int | float):
        raise TypeError(f"{factor} = {value!r} is not a number")
    return float(value)


def _layers(num_lines: int, *, is_ordered: bool) -> list[figure.Spec]:
    estimates, blocks = "datum.kind === 'estimate'", "datum.kind === 'block'"
    interval = (("low", "from", ".4~g"), ("high", "to", ".4~g"))
    tip = (("line", "arm"), ("x", "at"), ("ratio", "ratio", ".4~g"))
    beside: figure.Spec = {} if is_ordered else {"xOffset_by": "line"}
    has_bands = is_ordered and num_lines <= _MAX_BANDS
    reach: figure.Spec = {"y_by": "low", "y2_by": "high", "clip": True, **beside}
    return [
        figure.layer("area", where=estimates, opacity=0.2, **reach)
        if has_bands
        else figure.layer("rule", where=estimates, **reach),
        *([figure.layer("line", where=estimates, y_by="ratio", strokeWidth=2)] if is_ordered else []),
        figure.layer(
            "point", where=blocks, y_by="ratio", filled=False, size=30, strokeWidth=1,
            tip=(*tip, ("blocks", "block")), **beside,
        ),
        figure.layer(
            "point", where=estimates, y_by="ratio", tip=(*tip, *interval, ("blocks", "blocks")), **beside
        ),
    ]  # fmt: skip


def _x_axis(rows: Sequence[SweepRow], factor: str | None) -> figure.Spec:
    """The factor at its values, logarithmic where they span much; without one, the cells side by side."""
    if factor is None:
        names = list(dict.fromkeys(str(_x_of(row, None)) for row in rows))
        title = " and ".join(rows[0].cell)
        return {"field": "x", "type": "nominal", "title": title, "sort": names, "axis": {"labelLimit": 160}}
    values = sorted({float(_x_of(row, factor)) for row in rows})
    ticks: figure.Spec = {"values": values} if len(values) <= _MAX_TICKS else {}
    channel = figure.axis(factor, "x", format="~g", **ticks)
    if figure.is_wide(values, _LOG_FROM):
        channel["scale"] = {"type": "log", "nice": False, "padding": 12}
    else:
        channel["scale"] = {"zero": False, "nice": False, "padding": 12}
    return channel


def _noise(source: figure.ChartSource, metric: str) -> float | None:
    """Logarithm up to which a ratio may be noise: of an A/A experiment, or else the baseline's own scatter."""
    if source.noise:
        noise = source.noise.get(metric)
        return None if noise is None else math.log1p(noise.floor_frac)
    return _baseline_scatter(source.analysis, metric)


def _baseline_scatter(analysis: AnalyzedExperiment, metric: str) -> float | None:
    """Standard deviation of the logarithms of the baseline's blocks; None below three."""
    baseline = analysis.results.manifest.baseline
    runs = [run for cell in analysis.cells if cell.variant == baseline and not cell.cell for run in cell.runs]
    values = [value for run in runs if (value := run.number(metric) if metric else None) is not None and value > 0]
    return stdev(map(math.log, values)) if len(values) > 2 else None
