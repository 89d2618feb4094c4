"""The pieces of all pictures: a chart as a Vega-Lite specification of plain data, and how a file is drawn from it.

A picture is a list of panels above each other that share the x axis at the bottom. Its specification says nothing
of its width and of the colours of text and grid: the page gives both, and a file those of paper.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.breakdown import CLOCK_NOTE
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.summary import CellSummary, RunSummary
from benchctl.errors import UsageError, address_space_shortfall
from benchctl.records.schema import Clock
from benchctl.report.charts.vega import vega_bytes
from benchctl.untrusted.text import visible, visible_line

Spec = dict[str, Any]
Row = Mapping[str, Any]

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
DASHES: Final = ([1, 0], [6, 3], [2, 2], [6, 2, 2, 2])
MAX_SERIES: Final = len(SERIES) * len(DASHES)
"""More lines than this cannot be told apart."""
MAX_BANDS: Final = 3
"""Bands of more lines than this cover one another."""
CROSS: Final = "M-0.9,-0.9L0.9,0.9M0.9,-0.9L-0.9,0.9"

_SYMBOL_PX: Final = 40
_LABEL_CHARACTERS: Final = 200
_CONFIG: Final[Spec] = {
    "view": {"stroke": None},
    "axis": {"titleFontWeight": "normal", "tickSize": 4, "domain": False, "labelFontSize": 11, "titleFontSize": 12},
    "line": {"strokeWidth": 1.8},
    "rule": {"strokeWidth": 1.5},
    "point": {"size": 55, "filled": True, "opacity": 1},
    "title": {"anchor": "start", "fontSize": 12, "fontWeight": "bold", "offset": 8},
}
"""Size and place; all colours are those of the page or of paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A selector above a chart, whose value is the parameter ``name`` of its specification."""

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    """Value and text of each."""
    selected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart, or in ``skipped`` the reason why it is not drawn."""

    id: str
    """Unique on the page and fit for an HTML id: lower case and hyphens."""
    title: str
    caption: str = ""
    """One plain sentence: what is seen, in which unit, with which interval."""
    definition: str = ""
    """How the numbers are measured or computed."""
    spec: Spec = field(default_factory=dict)
    """Empty where it is not drawn."""
    skipped: str | None = None
    choices: tuple[Choice, ...] = ()
    has_log_switch: bool = False
    """The x axis can be made logarithmic."""
    section: str = "measurements"
    """Where on the page it is: ``load``, ``latency``, ``measurements``, or ``machine``, which is folded; or
    nowhere.
    """
    file: str = ""
    """The name of its picture among the files of a report; empty where it is not one of them."""
    is_simulated: bool = False
    """Its times are those of a simulator, which its picture says."""

    @property
    def height(self) -> int:
        """Pixels that the page keeps free for a drawn chart, without those of the legend."""
        return sum(panel["height"] + 50 for panel in self.spec["vconcat"])

    @property
    def selection(self) -> str:
        """The choices that are selected at first, where there is something to choose."""
        return ", ".join(dict(each.options)[each.selected] for each in self.choices if len(each.options) > 1)


@dataclass(frozen=True, slots=True)
class Subject:
    """A result directory whose charts are drawn."""

    analysis: AnalyzedExperiment
    comparisons: Sequence[Comparison] = ()
    """Those of the variants with the baseline, as far as they were made."""

    @property
    def arms(self) -> list[CellSummary]:
        """Every arm with a usable run, the baseline first, at most as many as can be told apart."""
        return [cell for cell in self.analysis.cells if cell.runs][:MAX_SERIES]


def runs_by_block(
    arms: Sequence[CellSummary], runs: Sequence[RunSummary], max_runs: int = 72
) -> dict[int, list[RunSummary]]:
    """One of ``runs`` for each arm in each block; the first of the blocks that most belong to comes first.

    Where these are more than ``max_runs``, the other blocks are chosen at equal distances.
    """
    sizes = Counter(run.record.block for run in runs)
    if not sizes:
        return {}
    first = max(sorted(sizes), key=lambda block: sizes[block])
    others = sorted(sizes.keys() - {first})
    room = max(0, max_runs // len(arms) - 1)
    chosen = others if len(others) <= room else [others[i * len(others) // room] for i in range(room)]
    of_arm = {(run.record.block, run.label): run for run in runs}
    return {
        block: [of_arm[block, arm.label] for arm in arms if (block, arm.label) in of_arm]
        for block in (first, *chosen)
    }


def labels_of(arms: Iterable[CellSummary], blocks: Mapping[int, Iterable[RunSummary]]) -> list[str]:
    """The arms that have a run in one of the blocks."""
    drawn = {run.label for runs in blocks.values() for run in runs}
    return [arm.label for arm in arms if arm.label in drawn]


def clock_note(clocks: Iterable[Clock]) -> str:
    """The clock of step times in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))


OF_BLOCK: Final = "datum.block === block"
OF_ARM: Final = "arm === '*' || datum.arm === arm"


def block_choice(blocks: Iterable[int]) -> Choice:
    """The selector of a block, at first the first of them; ``OF_BLOCK`` keeps its rows."""
    first, *others = blocks
    options = tuple((str(block), f"block {block}") for block in sorted([first, *others]))
    return Choice(name="block", label="Block", options=options, selected=str(first))


def arm_choice(labels: Sequence[str]) -> Choice:
    """The selector of one arm or all of them; ``OF_ARM`` keeps its rows."""
    options = (("*", "all arms"), *((label, label) for label in labels))
    return Choice(name="arm", label="Arm", options=options if len(labels) > 1 else options[:1], selected="*")


def axis(
    title: str | None,
    field: str | None = None,
    *,
    zero: bool = False,
    domain: Sequence[Any] | None = None,
    **more: Any,
) -> Spec:
    """A channel of numbers; the title ends with the unit. ``more`` are properties of its axis.

    The y axis of a panel names no field: its layers do.
    """
    return {
        **({} if field is None else {"field": field}),
        "type": "quantitative",
        "title": title,
        "scale": {"zero": zero, "nice": domain is None, **({} if domain is None else {"domain": list(domain)})},
        "axis": {"tickCount": 6, **more},
    }


def is_wide(values: Iterable[float], least: float = 8.0) -> bool:
    """Values that are readable on a logarithmic axis only: the largest is ``least`` times the smallest or more."""
    ordered = sorted(values)
    return bool(ordered) and ordered[0] > 0 and ordered[-1] >= least * ordered[0]


def reach(points: Sequence[float], ends: Sequence[float], least: float) -> tuple[float, float]:
    """The ends of an axis that holds all ``points``, and as much of the intervals as leaves these readable.

    An interval over few blocks can extend far: it is cut at the span of the points beyond them. The axis spans at
    least ``least``.
    """
    lowest, highest = min(points), max(points)
    span = max(highest - lowest, least)
    low = max(min([lowest, *ends]), lowest - span)
    high = min(max([highest, *ends]), highest + span)
    pad = 0.05 * span if high - low >= least else 0.55 * least
    return low - pad, high + pad


def log_axis(title: str, values: Sequence[float], field: str | None = None) -> Spec:
    """A logarithmic channel for ``values``, labelled at each if they are few, else at 1, 2 and 5 of each decade."""
    distinct = sorted(set(values))
    ticks = distinct if 2 < len(distinct) <= 8 else ticks_of_decades(distinct[0], distinct[-1])
    return {**axis(title, field, values=ticks, format=",.12~g"), "scale": {"type": "log", "nice": False}}


def ticks_of_decades(low: float, high: float) -> list[float]:
    """The values 1, 2 and 5 of each decade that are between two positive ends."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = (digit * 10.0**decade for decade in decades for digit in (1, 2, 5))
    return [tick for tick in ticks if low <= tick * 1.001 and tick <= high * 1.001]


def suitable_axis(
    title: str, values: Iterable[float], field: str | None = None, *, least: float = 8.0, zero: bool = True
) -> Spec:
    """Logarithmic where the positive values span much; ``zero``: a linear one begins there."""
    positive = [value for value in values if value > 0]
    return log_axis(title, positive, field) if is_wide(positive, least) else axis(title, field, zero=zero)


def panel(height: int, y: Spec, layers: Sequence[Spec], *, where: Sequence[str] = (), **more: Any) -> Spec:
    """One panel: ``y`` without a field, which each layer names. Rows are those of the data for which all of
    ``where`` holds; ``encoding`` in ``more`` is that of all layers.
    """
    encoding = {**more.pop("encoding", {}), "y": y}
    return {
        "height": height,
        "transform": [{"filter": test} for test in where],
        "encoding": encoding,
        "layer": list(layers),
        **more,
    }


def layer(
    mark: str,
    *,
    where: str | None = None,
    tip: Sequence[tuple[str, ...]] = (),
    data: Spec | None = None,
    **properties: Any,
) -> Spec:
    """A layer of marks; properties that end in ``_by`` are channels of its encoding, a text names their field.

    ``tip`` has field, title and format of what is told of a mark under the pointer. ``data`` replaces the rows of
    the picture.
    """
    channels = {name.removesuffix("_by"): value for name, value in properties.items() if name.endswith("_by")}
    encoding = {name: {"field": value} if isinstance(value, str) else value for name, value in channels.items()}
    if tip:
        encoding["tooltip"] = [
            {"field": name, "title": title, **({"format": form[0], "type": "quantitative"} if form else {})}
            for name, title, *form in tip
        ]
    return {
        "mark": {"type": mark, **{name: value for name, value in properties.items() if not name.endswith("_by")}},
        "encoding": encoding,
        **({} if where is None else {"transform": [{"filter": where}]}),
        **({} if data is None else {"data": data}),
    }


_WIDTH: Final[Spec] = {
    "data": {"values": [{}]},
    "x_by": {"value": 0},
    "x2_by": {"value": "width"},
    "strokeDash_by": None,
}


def level(value: float, color: str = GREY, **properties: Any) -> Spec:
    """A dashed line over the width of a panel, such as the baseline's."""
    at: Spec = {"y_by": {"datum": value}, "color_by": {"value": color}, "shape_by": None, "xOffset_by": None}
    return layer("rule", **{"strokeDash": [5, 3], **_WIDTH, **at, **properties})


def grey_band(low: float, high: float) -> Spec:
    """The area between two levels over the width of a panel."""
    ends: Spec = {"y_by": {"datum": low}, "y2_by": {"datum": high}, "color_by": {"value": GREY}}
    return layer("rect", opacity=0.22, **_WIDTH, **ends)


def by_series(
    names: Sequence[str], drawn: Sequence[str] | None = None, *, name: str = "arm", first: int = 0
) -> Spec:
    """Colour, and dash where the colours start over, of each series; those that are ``drawn`` have a legend.

    The series at index i of ``names`` has the same colour in every picture.
    """
    series = {each: i for i, each in enumerate(names, first) if drawn is None or each in drawn}
    encoding = {"color": by_color(name, {each: SERIES[i % len(SERIES)] for each, i in series.items()})}
    if any(i >= len(SERIES) for i in series.values()):
        dashes = [DASHES[i // len(SERIES) % len(DASHES)] for i in series.values()]
        encoding["strokeDash"] = {**encoding["color"], "scale": {"domain": list(series), "range": dashes}}
    return encoding


def by_color(name: str, colors: Mapping[str, str]) -> Spec:
    """A channel of colours by the text in the field ``name``."""
    legend = {"symbolOpacity": 1} if len(colors) > 1 else None
    scale = {"domain": list(colors), "range": list(colors.values())}
    return {"field": name, "type": "nominal", "title": None, "scale": scale, "legend": legend}


LINE_CHARACTERS: Final = 24
"""Longer labels of rows have several lines."""


def wrapped(label: str) -> str:
    """A label in short lines, broken after spaces and equals signs only."""
    lines = [""]
    for piece in re.findall(r"[^ =]+[ =]?|[ =]", label[:200]):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > LINE_CHARACTERS:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def picture(
    panels: Sequence[Spec],
    rows: Sequence[Row],
    x: Spec,
    *,
    choices: Sequence[Choice] = (),
    legend: Iterable[str] = (),
    left: int = 52,
    right: int = 0,
    **datasets: Sequence[Row],
) -> Spec:
    """A specification of Vega-Lite. ``x`` is the channel of all panels.

    ``rows`` is the data of those that name none of ``datasets``. ``left`` and ``right`` are the room in pixels for
    labels at the left of the data and for words at its right, ``legend`` are the texts of the legend.
    """
    above = {**x, "title": None, "axis": {**x.get("axis", {}), "labels": False}}
    placed = [
        {**each, "encoding": {**each["encoding"], "x": x if each is panels[-1] else above}} for each in panels
    ]
    spec = _whole(placed, {"rows": rows, **datasets}, left, max(map(len, legend), default=20))
    spec["usermeta"]["right"] = right
    return spec | {
        "params": [{"name": choice.name, "value": choice.selected} for choice in choices],
        "resolve": {"scale": {"x": "shared", "color": "shared"}},
    }


def grid(lines: Sequence[Sequence[Spec]], legend: Iterable[str], **datasets: Sequence[Row]) -> Spec:
    """Panels side by side, each with an x axis, a width and a legend of its own."""
    resolve = {"scale": {"color": "independent"}}
    rows = [{"hconcat": list(line), "spacing": 30, "resolve": resolve} for line in lines]
    return _whole(rows, datasets, 56, 2 * max(map(len, legend), default=20)) | {"resolve": resolve, "align": "none"}


def _whole(panels: Sequence[Spec], datasets: Mapping[str, Sequence[Row]], left: int, characters: int) -> Spec:
    """Titles of y axes stand above them, at the left edge of the picture."""
    title = {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleX": -left, "titleY": -7}
    y = {**title, "minExtent": left, "maxExtent": left, "labelLimit": left - 6, "tickCount": 5}
    spec = {
        "data": {"name": "rows"},
        "datasets": {},
        "vconcat": list(panels),
        "spacing": 12,
        "config": {**_CONFIG, "axisY": y},
        "usermeta": {"left": left, "label": characters},
    }
    visible_text = cache(_visible)  # rows repeat the texts of few series
    rows = {
        name: [{key: _cell(value, visible_text) for key, value in row.items()} for row in data]
        for name, data in datasets.items()
    }
    return {**_visible(spec), "datasets": rows}


def _cell(value: Any, visible_text: Callable[[str], str]) -> Any:
    """A value of a row as a picture has it."""
    if isinstance(value, float):
        return rounded(value)
    return visible_text(value) if isinstance(value, str) else _visible(value)


def rounded(value: float | None, digits: int = 6) -> float | None:
    """A value at ``digits`` significant digits, which a picture cannot tell from more; None where not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _visible(value: Any) -> Any:
    """The value with texts in which everything can be seen."""
    if isinstance(value, str):
        return visible(value, 2 * _LABEL_CHARACTERS)
    if isinstance(value, Mapping):
        return {key: _visible(part) for key, part in value.items()}
    return [_visible(part) for part in value] if isinstance(value, list | tuple) else value


def sized(spec: Spec, width_px: int) -> Spec:
    """The specification for a picture of this width; ``page.js`` has the same rule."""
    meta = spec["usermeta"]
    columns = max(1, width_px // (_SYMBOL_PX + 7 * meta["label"]))
    legend = {"orient": "bottom", "columns": columns, "labelLimit": width_px - _SYMBOL_PX, "titleLimit": 0}
    inner = width_px - meta["left"] - meta.get("right", 0) - 16
    return {
        **spec,
        "config": {**spec["config"], "legend": legend},
        "vconcat": [{"width": inner, **panel} if "layer" in panel else panel for panel in spec["vconcat"]],
    }


def why_not_drawn() -> str | None:
    """The reason that no picture can be drawn here: a limit of address space below what vl_convert reserves."""
    return address_space_shortfall(70_000_000_000)  # it uses 80 MB of it


def picture_bytes(spec: Spec, title: str, note: str = "", suffix: str = ".png") -> bytes:
    """A file for paper: ``note`` stands below the title. The same specification gives the same bytes.

    Raises UsageError where the limit of address space leaves no room for drawing.
    """
    if (reason := why_not_drawn()) is not None:
        raise UsageError(f"no picture can be drawn: {reason}")
    return vega_bytes(on_paper(spec, title, note), suffix)


def on_paper(spec: Spec, title: str, note: str) -> Spec:
    """The whole specification of a picture for paper, with ``note`` below the title."""
    text = {
        "text": _lines(visible_line(title, _LABEL_CHARACTERS)),
        "subtitle": _lines(visible_line(note, 4 * _LABEL_CHARACTERS)),
        "anchor": "start",
        "fontSize": 15,
        "subtitleFontSize": 11.5,
        "subtitlePadding": 5,
        "offset": 14,
        "subtitleColor": SLATE,
    }
    return {**sized(spec, 900), "title": text, "padding": 12}


def note_of(chart: Chart) -> str:
    """The text below the title of a drawn chart."""
    simulated = "Simulated: no GPU was measured." if chart.is_simulated else ""
    selection = f"Shown: {chart.selection}." if chart.selection else ""
    return " ".join(filter(None, (simulated, chart.caption, selection)))


def chart_bytes(chart: Chart, suffix: str = ".png") -> bytes:
    """The picture of a drawn chart with its caption."""
    return picture_bytes(chart.spec, chart.title, note_of(chart), suffix)


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, 150, break_long_words=False, break_on_hyphens=False) or [""]
