"""Distributions of latencies: for each arm the share of its requests that are at most so slow, and for each block.

Every line goes through quantiles at equal steps of the share, by the rule of the percentiles in the tables (rank
(n - 1) p, linear between neighbours), so a percentile can be read from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import LATENCY_NAMES, Sorted, run_latencies
from benchctl.report.charts import figure
from benchctl.report.charts.figure import MAX_ARMS, arm_styles, series_color, series_dash

MAX_POINTS: Final = 300
"""Of the line of an arm; a percentile between two points is off by at most their distance."""
_MAX_BLOCK_POINTS: Final = 100
_MAX_POINTS_OF_BLOCKS: Final = 24_000
_LEAST_POINTS: Final = 20
_HEIGHT: Final = 380
_ID: Final = "latencies"
_TITLE: Final = "Latency distributions"
SECTION: Final = "latency"
NO_LATENCIES: Final = "no finished run has the times of its requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLatencies:
    """The latencies of one arm; ``blocks`` are pairs of a name and the values by latency."""

    label: str
    color: str
    dash: str
    blocks: tuple[tuple[str, Mapping[str, Sorted]], ...]

    def of(self, latency: str) -> tuple[tuple[str, Sorted], ...]:
        """The blocks that know a latency."""
        return tuple((name, values[latency]) for name, values in self.blocks if latency in values)


def named_arms(arms: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Sorted]]]]]) -> tuple[ArmLatencies, ...]:
    """Arms with the colours of their places, at most as many as can be told apart."""
    return tuple(
        ArmLatencies(label=label, color=series_color(i), dash=series_dash(i), blocks=tuple(blocks))
        for i, (label, blocks) in enumerate(arms[:MAX_ARMS])
    )


def draw_latencies(source: figure.ChartSource) -> figure.Chart | None:
    """The distributions of all usable runs. None for forward passes, which have no requests."""
    if source.analysis.passes is not None:
        return None
    arms = [
        ArmLatencies(
            label=arm.label,
            color=arm.color,
            dash=arm.dash,
            blocks=tuple((f"block {run.record.block}", run_latencies(run)) for run in arm.cell.runs),
        )
        for arm in arm_styles(source.analysis)
    ]
    return draw_distributions(arms, unit="block")


def draw_distributions(arms: Sequence[ArmLatencies], unit: str) -> figure.Chart:
    """A thick line for each arm over all its blocks, a thin one for each; ``unit`` is the word for a block."""
    names = [name for name in LATENCY_NAMES if any(arm.of(name) for arm in arms)]
    if not names:
        return replace(figure.no_chart(_ID, _TITLE, NO_LATENCIES), section=SECTION)
    num_lines = sum(len(arm.of(name)) for arm in arms for name in names)
    most = max(_LEAST_POINTS, min(_MAX_BLOCK_POINTS, _MAX_POINTS_OF_BLOCKS // num_lines))
    labels = [arm.label for arm in arms]
    chart = figure.drawn(
        _ID,
        _TITLE,
        [
            {**trace, "meta": {"latency": name, "arm": arm.label}}
            for name in names
            for arm in arms
            if arm.of(name)
            for trace in _traces(arm, arm.of(name), most)
        ],
        figure.layout(
            _HEIGHT + figure.legend_px(labels),
            xaxis=figure.axis("latency, ms"),
            yaxis=figure.axis("share at most so slow", range=[0, 1.01], tickformat=".0%"),
        ),
        caption=(
            f"Share of the completed requests (of gaps: of all gaps) with at most this latency in ms: a thick line "
            f"for each arm over all its {unit}s, a thin one for each {unit}."
        ),
        definition="; ".join(f"{name} = {_formula(name)}" for name in names),
        choices=(
            figure.Choice(
                name="latency",
                label="Latency",
                options=tuple((name, LATENCY_NAMES[name]) for name in names),
                selected="tpot" if "tpot" in names else names[0],
            ),
            figure.arm_choice(labels),
        ),
    )
    return replace(chart, section=SECTION, has_log_switch=True)


def _formula(latency: str) -> str:
    return METRICS[f"{latency}_ms"].formula.removeprefix("mean of ")


def quantiles(values: Sorted, at_most: int) -> Sorted:
    """Quantiles of ascending values at equal steps from the smallest to the largest; all where they are few."""
    if len(values) <= at_most:
        return values
    result: Sorted = np.interp(np.linspace(0, len(values) - 1, at_most), np.arange(len(values)), values)
    return result


def _traces(arm: ArmLatencies, blocks: Sequence[tuple[str, Sorted]], most: int) -> list[figure.Trace]:
    pooled = np.sort(np.concatenate([values for _, values in blocks]))
    thin = [
        _line(arm, quantiles(values, most), f"{arm.label}, {name}", width=0.8, opacity=0.45)
        for name, values in (blocks if len(blocks) > 1 else ())
    ]
    return [*thin, _line(arm, quantiles(pooled, MAX_POINTS), arm.label, width=2.6, opacity=1.0)]


def _line(arm: ArmLatencies, values: Sorted, name: str, *, width: float, opacity: float) -> figure.Trace:
    """The heights follow from the number of points and are left to Plotly."""
    is_arm = name == arm.label
    return {
        "type": "scatter",
        "mode": "lines" if len(values) > 1 else "markers",
        "name": name,
        "legendgroup": arm.label,
        "showlegend": is_arm,
        "x": figure.rounded(values.tolist()),
        "y0": 0 if len(values) > 1 else 1,
        "dy": 1 / max(1, len(values) - 1),
        "opacity": opacity,
        "line": {"color": arm.color, "dash": arm.dash if is_arm else "solid", "width": width},
        "marker": {"color": arm.color, "size": 6},
        "hovertemplate": "%{y:.1%} at most %{x:.4~g} ms",
    }
