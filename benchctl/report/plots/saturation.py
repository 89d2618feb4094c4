"""The saturation curve as PNG: metrics of each arm over the size of its load, with the limits they must keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchctl.analysis.metrics.table import METRICS
from benchctl.report.charts.palette import SERIES, SLATE
from benchctl.report.plots.style import legend_beside, new_figure, plain, png_bytes, tidy, wrapped

_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
_WIDE_RANGE: Final = 8.0
"""A quotient of the largest and the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLine:
    """One arm: its loads, ascending, and the metrics of each; ``largest`` is the largest load that keeps limits."""

    label: str
    sizes: Sequence[float]
    metrics: Sequence[Mapping[str, float | None]]
    largest: float | None = None


def draw_saturation(
    title: str, x_label: str, lines: Sequence[SaturationLine], names: Sequence[str], limits: Mapping[str, float]
) -> bytes:
    """One panel for each metric of ``names``; ``limits`` are drawn as dashed lines."""
    figure = new_figure(1.2 + 2.6 * len(names), title)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        values: list[float] = []
        for number, line in enumerate(lines):
            pairs = [(size, each[name]) for size, each in zip(line.sizes, line.metrics, strict=True)]
            points = [(size, value) for size, value in pairs if value is not None]
            style = {"color": SERIES[number % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)]}
            axes.plot(
                [size for size, _ in points], [value for _, value in points], label=wrapped(line.label), **style
            )
            values += [value for _, value in points]
            if line.largest is not None:
                axes.axvline(line.largest, color=style["color"], linewidth=0.8, linestyle=":")
        if name in limits:
            axes.axhline(limits[name], color=SLATE, linestyle="--", linewidth=1.0, label=f"limit {limits[name]:g}")
        axes.set_ylabel(f"{name}, {METRICS[name].unit}")
        if _is_wide(values):
            axes.set_yscale("log")
            _plain_numbers(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        tidy(axes, grid="both")
    sizes = [size for line in lines for size in line.sizes]
    if _is_wide(sizes):
        panels[-1].set_xscale("log")
        _plain_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel(plain(x_label))
    legend_beside(panels[0])
    return png_bytes(figure)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) >= _WIDE_RANGE * min(values)
