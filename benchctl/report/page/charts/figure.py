"""Charts of the report page: Plotly figures as plain data, with the words that belong to them.

Figures are dicts that go into the page as JSON; no Python class of Plotly is involved. Colours of the data are
fixed here and readable on light and on dark; all else that has a colour (paper, text, grid) is the theme of the
page, so a figure never sets it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import CellComparison
from benchctl.records.noise import MetricNoise

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
