"""What a chart of the report page is: a Plotly figure as plain data, with the words that belong to it.

Figures are dicts that go into the page as JSON; no Python class of Plotly is involved. Colours of the data are fixed
here and readable on light and on dark; everything else that has a colour (paper, text, grid) is the page's theme, so
a figure never sets it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.report.plot_style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

SERIES: Final = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
"""The colours of Okabe and Ito that stand out on white and on near-black alike: without their black and yellow."""
DASHES: Final = ("solid", "dash", "dot", "dashdot")
PANEL_PX: Final = 150
"""Height of one of several small panels above each other."""
_BAND_OPACITY: Final = 0.2

Trace = dict[str, Any]


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

    def __post_init__(self) -> None:
        if (self.figure is None) == (self.skipped is None):
            raise ValueError(f"chart {self.id!r} needs either a figure or a reason why it has none")


def color(index: int) -> str:
    """Colour of the series at ``index``; beyond the palette it starts over, so give those another dash."""
    return SERIES[index % len(SERIES)]


def dash(index: int) -> str:
    return DASHES[index // len(SERIES) % len(DASHES)]


def translucent(hex_color: str, opacity: float = _BAND_OPACITY) -> str:
    """``#rrggbb`` as a CSS colour that lets the grid and other bands through."""
    red, green, blue = (int(hex_color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def layout(height: int, **axes_and_more: Any) -> dict[str, Any]:
    """The layout that all charts share: transparent, the legend below the data, room for labels made by Plotly."""
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"},
        **axes_and_more,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title, which ends with the unit; margins grow with its labels."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], hex_color: str, **more: Any) -> Trace:
    """The area between ``low`` and ``high`` as one closed outline; points where either is None are left out."""
    known = [(at, a, b) for at, a, b in zip(x, low, high, strict=True) if a is not None and b is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [at for at, _, _ in known] + [at for at, _, _ in reversed(known)],
        "y": [b for _, _, b in known] + [a for _, a, _ in reversed(known)],
        "fill": "toself",
        "fillcolor": translucent(hex_color),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }
