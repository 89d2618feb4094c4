"""The saturation curve as PNG: metrics of each arm over the size of its load, with the limits they must keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.table import METRICS
from benchctl.report.charts.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SLATE
from benchctl.report.plots.style import legend_beside, new_figure, png_bytes, tidy

_COLORS: Final = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
_WIDE_RANGE: Final = 8.0
"""A quotient of the largest and the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLine:
    """One arm: its loads in ascending order, and the metrics of each. ``largest`` is the largest load that holds."""

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
        shown: list[float] = []
        for number, line in enumerate(lines):
            points = [(size, each[name]) for size, each in zip(line.sizes, line.metrics, strict=True)]
            known = [(size, value) for size, value in points if value is not None]
            style = {"color": _COLORS[number % len(_COLORS)], "marker": _MARKERS[number % len(_MARKERS)]}
            axes.plot([size for size, _ in known], [value for _, value in known], label=line.label, **style)
            shown += [value for _, value in known]
            if line.largest is not None:
                axes.axvline(line.largest, color=style["color"], linewidth=0.8, linestyle=":")
        if name in limits:
            axes.axhline(limits[name], color=SLATE, linestyle="--", linewidth=1.0, label=f"limit {limits[name]:g}")
        axes.set_ylabel(f"{name}\n{METRICS[name].unit}")
        axes.set_yscale("log" if _is_wide(shown) else "linear")
        if not _is_wide(shown):
            axes.set_ylim(bottom=0)
        tidy(axes, grid="both")
    sizes = [size for line in lines for size in line.sizes]
    panels[-1].set_xscale("log" if _is_wide(sizes) else "linear")
    if _is_wide(sizes):
        ticks = sorted(set(sizes)) if len(set(sizes)) <= len(_MARKERS) else None
        if ticks is not None:
            panels[-1].set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
            panels[-1].minorticks_off()
    panels[-1].set_xlabel(x_label)
    legend_beside(panels[0])
    return png_bytes(figure)


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) >= _WIDE_RANGE * min(values)
