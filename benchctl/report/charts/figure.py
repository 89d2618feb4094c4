"""Charts of the report page: Plotly figures as plain data, with the words that belong to them.

Colours and dashes of every chart.
The arms and runs that charts draw, each arm in the same colour everywhere.
The logarithmic scale of the forest plot, on which twice and half are equally far from no change.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchctl.analysis.attribution.breakdown import CLOCK_NOTE
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.summary import CellSummary, RunSummary
from benchctl.records.noise import MetricNoise
from benchctl.records.schema import Clock

_BAND_OPACITY: Final = 0.2
_BUTTON_GREY: Final = "#7b818a"
"""Colour of a chart's buttons, readable on light and on dark; Plotly's own would be a grey box on a clear chart."""
_PHONE_PX: Final = 300
_LEGEND_SYMBOL_PX: Final = 45
_LEGEND_ROW_PX: Final = 21
_CHARACTER_PX: Final = 7
_TITLE_CHARACTERS: Final = 34

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSource:
    """The data that charts are drawn from.

    ``cells`` are the comparisons of the directory's variants with its baseline, ``noise`` is that of an A/A
    experiment by metric; without them outliers are not marked, and the baseline's own scatter replaces the noise.
    """

    analysis: AnalyzedExperiment
    cells: Sequence[CellComparison] = ()
    noise: Mapping[str, MetricNoise] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A selector above a chart: it shows the traces and annotations whose ``meta`` names the selected option.

    Those whose ``meta`` does not have ``name`` are always shown; the option ``ALL`` shows every one.
    """

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    """Value and text of each."""
    selected: str

    @property
    def selected_text(self) -> str:
        return dict(self.options)[self.selected]


ALL: Final = "*"
"""The option of a choice that leaves nothing out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page, or the reason why it is not drawn.

    Exactly one of ``figure`` and ``skipped`` is None.
    """

    id: str
    """Unique on the page and fit for an HTML id: lower case and hyphens."""
    title: str
    caption: str
    """One plain sentence: what is seen, in which unit, with which interval."""
    definition: str
    """How the numbers are measured or computed."""
    figure: Mapping[str, Any] | None
    """``{"data": [...], "layout": {...}}`` for ``Plotly.newPlot``; only numbers, text, None, lists and dicts."""
    skipped: str | None
    height: int
    """Pixels; the width is the page's."""
    choices: tuple[Choice, ...] = ()
    """Empty where there is nothing to select."""
    has_log_switch: bool = False
    """The x axis can be made logarithmic."""
    section: str = "measurements"
    """``latency`` or ``measurements``: where on the page it stands."""
    is_of_machine: bool = False
    """It shows the machine and not the work: it is folded."""

    def __post_init__(self) -> None:
        if (self.figure is None) == (self.skipped is None):
            raise ValueError(f"chart {self.id!r} needs either a figure or a reason why it has none")


def translucent(hex_color: str, opacity: float = _BAND_OPACITY) -> str:
    """``#rrggbb`` as a CSS colour that lets the grid and other bands through."""
    red, green, blue = (int(hex_color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def layout(height: int, **axes_and_more: Any) -> dict[str, Any]:
    """The layout that all charts share: transparent, the legend at the bottom, room for labels made by Plotly."""
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _BUTTON_GREY, "activecolor": _BUTTON_GREY},
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
        },
        **axes_and_more,
    }


def legend_px(labels: Iterable[str]) -> int:
    """Height of the legend on a phone, in pixels; on a wide screen the data has what is left of it."""
    rows, used_px = 0, _PHONE_PX
    for label in labels:
        entry_px = _LEGEND_SYMBOL_PX + _CHARACTER_PX * len(label)
        is_new_row = used_px + entry_px > _PHONE_PX
        rows, used_px = (rows + 1, entry_px) if is_new_row else (rows, used_px + entry_px)
    return _LEGEND_ROW_PX * rows


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title, which ends with the unit; margins grow with its labels."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def wrapped(label: str, width: int) -> str:
    """A label in lines of about ``width`` characters, broken after spaces and equals signs only."""
    lines = [""]
    for piece in re.findall(r"[^ =]+[ =]?|[ =]", label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "<br>".join(line.rstrip() for line in lines)


def panels(
    x_axis: Mapping[str, Any],
    y_axes: Sequence[Mapping[str, Any]],
    *,
    shares: Sequence[float] | None = None,
    gap_frac: float = 0.06,
) -> dict[str, Any]:
    """Axes of panels above each other that share the x axis at the bottom; the first y axis is the top one.

    ``shares`` are their relative heights, equal by default; ``gap_frac`` is the share of the whole height between
    two. The traces of panel i belong to ``panel_axis(i)``.
    """
    heights = list(shares or [1.0] * len(y_axes))
    scale = (1 - gap_frac * (len(y_axes) - 1)) / sum(heights)
    axes: dict[str, Any] = {"xaxis": {**x_axis, "anchor": panel_axis(len(y_axes) - 1)}}
    top = 1.0
    for i, (y_axis, height) in enumerate(zip(y_axes, heights, strict=True)):
        bottom = max(0.0, top - height * scale)
        domain = [round(bottom, 4), round(top, 4)]
        axes["yaxis" if i == 0 else f"yaxis{i + 1}"] = {**y_axis, "domain": domain, "anchor": "x"}
        top = bottom - gap_frac
    return axes


def panel_axis(index: int) -> str:
    """The name that a trace of the panel at ``index`` uses for its y axis."""
    return "y" if index == 0 else f"y{index + 1}"


def panel_titles(titles: Sequence[str]) -> list[dict[str, Any]]:
    """Annotations: a title of one or two lines on top of each panel, at its left edge.

    They are not in ``<b>``, which plotly.js turns into a ``style`` attribute: the policy of the page refuses it.
    """
    return [
        {
            "text": wrapped(title, _TITLE_CHARACTERS),
            "font": {"weight": 700},
            "align": "left",
            "showarrow": False,
            "xref": "paper",
            "x": 0,
            "xanchor": "left",
            "yref": f"{panel_axis(i)} domain",
            "y": 1,
            "yanchor": "bottom",
        }
        for i, title in enumerate(titles)
    ]


def block_choice(blocks: Iterable[int], selected: int) -> Choice:
    """The selector of a block."""
    options = tuple((str(block), f"block {block}") for block in sorted(set(blocks)))
    return Choice(name="block", label="Block", options=options, selected=str(selected))


def arm_choice(labels: Sequence[str]) -> Choice:
    """The selector of one arm or all of them."""
    return Choice(
        name="arm", label="Arm", options=((ALL, "all arms"), *((label, label) for label in labels)), selected=ALL
    )


def rounded(values: Iterable[float | None], digits: int = 6) -> list[float | None]:
    """Values at ``digits`` significant digits, which a picture cannot tell from more; None where not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{digits}g}") for v in values]


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], hex_color: str, **more: Any) -> Trace:
    """The area between ``low`` and ``high`` as one closed outline; points where either is None are left out."""
    points = [(at, a, b) for at, a, b in zip(x, low, high, strict=True) if a is not None and b is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [at for at, _, _ in points] + [at for at, _, _ in reversed(points)],
        "y": [b for _, _, b in points] + [a for _, a, _ in reversed(points)],
        "fill": "toself",
        "fillcolor": translucent(hex_color),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }


def error_bars(
    values: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None], hex_color: str
) -> Trace:
    """Bars from ``low`` to ``high``, as Plotly takes them: distances from the values."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [
            None if value is None or h is None else max(0.0, h - value)
            for value, h in zip(values, high, strict=True)
        ],
        "arrayminus": [
            None if value is None or lo is None else max(0.0, value - lo)
            for value, lo in zip(values, low, strict=True)
        ],
        "color": hex_color,
        "thickness": 1.5,
        "width": 4,
    }


def drawn(
    chart_id: str,
    title: str,
    data: Sequence[Trace],
    layout: Mapping[str, Any],
    *,
    caption: str,
    definition: str,
    choices: Sequence[Choice] = (),
) -> Chart:
    """A chart with its figure; it is as high as its layout. Choices of one option are left out."""
    return Chart(
        id=chart_id,
        title=title,
        caption=caption,
        definition=definition,
        figure={"data": list(data), "layout": dict(layout)},
        skipped=None,
        height=layout["height"],
        choices=tuple(choice for choice in choices if len(choice.options) > 1),
    )


def no_chart(chart_id: str, title: str, reason: str) -> Chart:
    """A chart that cannot be drawn, with the reason."""
    return Chart(id=chart_id, title=title, caption="", definition="", figure=None, skipped=reason, height=0)


BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SLATE: Final = "#555555"
GREY: Final = "#888888"
"""For whatever belongs to no series: as far from white as from black."""
SERIES: Final = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
"""The colours that stand out on white and on near-black alike: without the black and yellow of the palette."""
DASHES: Final = ("solid", "dash", "dot", "dashdot")


def series_color(index: int) -> str:
    """Colour of the series at ``index``; the colours start over where they run out, with another dash."""
    return SERIES[index % len(SERIES)]


def series_dash(index: int) -> str:
    """Line style of the series at ``index``: another one each time the colours start over."""
    return DASHES[index // len(SERIES) % len(DASHES)]


MAX_ARMS: Final = len(SERIES) * len(DASHES)
"""More lines than this cannot be told apart."""
MAX_RUNS_BY_BLOCK: Final = 72
"""Charts of single runs hold no more than this, in whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStyle:
    """An arm with its colour and dash."""

    cell: CellSummary
    color: str
    dash: str

    @property
    def label(self) -> str:
        return self.cell.label


def arm_styles(analysis: AnalyzedExperiment) -> tuple[ArmStyle, ...]:
    """Every arm with a usable run, the baseline first, at most as many as can be told apart."""
    cells = [cell for cell in analysis.cells if cell.runs][:MAX_ARMS]
    return tuple(ArmStyle(cell=cell, color=series_color(i), dash=series_dash(i)) for i, cell in enumerate(cells))


def runs_of_one_block(arms: Sequence[ArmStyle], runs: Sequence[RunSummary]) -> list[tuple[ArmStyle, RunSummary]]:
    """One of ``runs`` for each arm, all from the block that most of them belong to (the first such block)."""
    blocks = [run.record.block for run in runs]
    block = max(sorted(set(blocks)), key=blocks.count, default=None)
    by_label = {run.label: run for run in runs if run.record.block == block}
    return [(arm, by_label[arm.label]) for arm in arms if arm.label in by_label]


def runs_by_block(
    arms: Sequence[ArmStyle], runs: Sequence[RunSummary], max_runs: int = MAX_RUNS_BY_BLOCK
) -> dict[int, list[tuple[ArmStyle, RunSummary]]]:
    """One of ``runs`` for each arm in each block; the block that most belong to comes first, empty without runs.

    Where these are more than ``max_runs``, the other blocks are chosen at equal distances.
    """
    first = runs_of_one_block(arms, runs)
    if not first:
        return {}
    first_block = first[0][1].record.block
    others = sorted({run.record.block for run in runs} - {first_block})
    room = max(0, max_runs // len(arms) - 1)
    chosen = others if len(others) <= room else [others[i * len(others) // room] for i in range(room)]
    blocks = {first_block: first}
    for block in chosen:
        by_label = {run.label: run for run in runs if run.record.block == block}
        blocks[block] = [(arm, by_label[arm.label]) for arm in arms if arm.label in by_label]
    return blocks


def runs_with_steps(arms: Sequence[ArmStyle]) -> list[RunSummary]:
    """The usable runs of these arms whose step log has steps after the warm-up and times whole steps."""
    runs = [run for arm in arms for run in arm.cell.runs if run.record.times_whole_steps]
    return [run for run in runs if len(run.run.columns)]


def clock_note(clocks: Iterable[Clock]) -> str:
    """The clock of step times in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))


_LEAST_LOG: Final = math.log(1.02)
_PAD_FRAC: Final = 0.04
_TICK_GAP_FRAC: Final = 0.13
_NICE_PERCENT: Final = (
    *(100, -50, 50, 300, 900, -75, -90, 500, 200, 25, -25, 20, -20, 10, -10, 5, -5, 3, -3, 2, -2, 1, -1),
    *(0.5, -0.5, 0.2, -0.2, 0.1, -0.1, 0.05, -0.05, 0.02, -0.02, 0.01, -0.01),
)


@dataclass(frozen=True, slots=True)
class LogScale:
    """From ``low`` to ``high``, both logarithms of ratios."""

    low: float
    high: float

    def at(self, log_ratio: float) -> float:
        """Share of the width at which a value is drawn, 0 to 1; values beyond the ends are drawn at the ends."""
        share = (log_ratio - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def holds(self, log_ratio: float) -> bool:
        return self.low <= log_ratio <= self.high

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Logarithm and label of each tick, from left to right: no change, and round percentages."""
        labels = {0.0: "0"}
        for percent in _NICE_PERCENT:
            log_ratio = math.log1p(percent / 100)
            gap = min(abs(self.at(log_ratio) - self.at(other)) for other in labels)
            if self.holds(log_ratio) and gap >= _TICK_GAP_FRAC:
                labels[log_ratio] = f"{percent:+g}%".replace("-", "\N{MINUS SIGN}")
        return tuple(sorted(labels.items()))


def scale_of(points: Sequence[float], ends: Iterable[float], always: Iterable[float]) -> LogScale:
    """A scale that shows every point and ``always``, and as much of the intervals as does not squeeze these.

    An interval over two blocks may reach from nothing to everything: it is cut where it extends further from the
    points than these are apart.
    """
    required = [0.0, *points, *always]
    low, high = min(required), max(required)
    room = max(high - low, _LEAST_LOG)
    for end in ends:
        low, high = min(low, max(end, min(required) - room)), max(high, min(end, max(required) + room))
    if high - low < _LEAST_LOG:
        low, high = low - _LEAST_LOG / 2, high + _LEAST_LOG / 2
    pad = _PAD_FRAC * (high - low)
    return LogScale(low - pad, high + pad)
