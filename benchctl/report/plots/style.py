"""The style of every picture: size, axes, legend beside the data, stacked bars, PNG bytes.

Figures are built without pyplot: no global state, no display.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchctl.formats import short_number
from benchctl.report.charts.palette import GREY, ORANGE, PURPLE, SKY, YELLOW
from benchctl.untrusted.text import visible_line

_LIGHT: Final = frozenset({YELLOW, SKY, GREY, ORANGE, PURPLE})

_WIDTH_IN: Final = 10.0
_DPI: Final = 130
_LABEL_CHARACTERS: Final = 36
_MOST_CHARACTERS: Final = 200
"""A longer line would leave the data no room."""
_LEGEND_LINE_IN: Final = 0.22
_AROUND_LEGEND_IN: Final = 2.0
"""Height of title and axis labels."""
_LABEL_MIN_FRAC: Final = 0.07
"""A segment narrower than this share of the axis is too narrow for its own number."""
_VISIBLE_MIN_FRAC: Final = 0.001
"""A colour that is nowhere wider than this share of the axis cannot be seen and has no entry in the legend."""
_GROUP_GAP: Final = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture as PNG bytes, or the reason why there is none."""

    name: str
    png: bytes | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One colour of stacked bars: a value for each bar, None where it has none."""

    label: str
    color: str
    values: Sequence[float | None]
    hatch: str = ""
    """A pattern of matplotlib such as ``////``."""


def plain(label: str) -> str:
    r"""A label that matplotlib draws as it is: ``$`` begins no formula."""
    text = "\n".join(visible_line(line, _MOST_CHARACTERS) for line in label.split("\n"))
    return text.replace("$", r"\$")


def wrapped(label: str) -> str:
    """A label beside the data, in short lines that are drawn as they are."""
    return plain(textwrap.fill(visible_line(label, _MOST_CHARACTERS), _LABEL_CHARACTERS))


def new_figure(height_in: float, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def tidy(axes: Axes, *, grid: str) -> None:
    """Only the axes that carry numbers, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="both" if grid == "both" else "x" if grid == "x" else "y", color="#E5E5E5", linewidth=0.8)


def legend_beside(axes: Axes) -> None:
    """The legend to the right of the axes, never over the data; none where nothing can be seen.

    The figure grows with a long legend, which would leave the data no room.
    """
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        figure = axes.get_figure(root=True)
        if figure is not None:
            num_lines = sum(label.count("\n") + 1 for label in labels)
            figure.set_figheight(max(figure.get_figheight(), _AROUND_LEGEND_IN + _LEGEND_LINE_IN * num_lines))


def png_bytes(figure: Figure) -> bytes:
    """The same figure gives the same bytes: no date, no version inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def stacked_bars(
    title: str, x_label: str, bar_labels: Sequence[str], parts: Sequence[Part], *, group: Sequence[str] = ()
) -> bytes:
    """Horizontal stacked bars, the first on top, each with its total behind it.

    ``group`` names the group of each bar; a gap sets groups apart.
    """
    labels = [wrapped(label) for label in bar_labels]
    positions = _positions(group or [""] * len(labels))
    bar_in = 0.42 if all("\n" not in label for label in labels) else 0.55
    figure = new_figure(1.6 + bar_in * positions[-1], title)
    axes = figure.add_subplot()
    ends = [0.0] * len(labels)
    totals = [sum(part.values[i] or 0.0 for part in parts) for i in range(len(labels))]
    span = max(totals) or 1.0
    for part in parts:
        _stack(axes, part, positions, ends, span)
    for position, total in zip(positions, totals, strict=True):
        text = short_number(total)
        axes.text(total + 0.008 * span, position, text, ha="left", va="center", fontsize=9, fontweight="bold")
    axes.set_yticks(positions, labels=labels)
    axes.invert_yaxis()
    axes.set_xlim(0, span * 1.09)
    axes.set_xlabel(plain(x_label))
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")
    legend_beside(axes)
    return png_bytes(figure)


def _positions(groups: Sequence[str]) -> list[float]:
    positions, here = [0.0], 0.0
    for before, after in pairwise(groups):
        here += 1.0 if before == after else 1.0 + (_GROUP_GAP if len(set(groups)) > 1 else 0.0)
        positions.append(here)
    return positions


def _stack(axes: Axes, part: Part, positions: Sequence[float], ends: list[float], span: float) -> None:
    """Draw one colour behind what is there, and move ``ends``."""
    widths = [value or 0.0 for value in part.values]
    is_visible = max(widths) >= _VISIBLE_MIN_FRAC * span
    axes.barh(
        positions,
        widths,
        left=ends,
        height=0.68,
        label=wrapped(part.label) if is_visible else None,
        color=part.color,
        hatch=part.hatch or None,
        edgecolor="white",
        linewidth=0.5,
    )
    ink = "black" if part.color in _LIGHT else "white"
    for i, width in enumerate(widths):
        if width >= _LABEL_MIN_FRAC * span and not part.hatch:
            middle, text = ends[i] + width / 2, short_number(width)
            axes.text(middle, positions[i], text, ha="center", va="center", color=ink, fontsize=8)
        ends[i] += width
