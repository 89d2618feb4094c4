"""The pieces of all pictures: a chart as a Vega-Lite specification of plain data, and how a file is drawn from it.

A picture is a list of panels above each other that share the x axis at the bottom. Its specification says nothing
of its width and of the colours of text and grid: the page gives both, and a file those of paper.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.errors import UsageError
from benchctl.records.noise import MetricNoise
from benchctl.system_errors import address_space_shortfall
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

_ADDRESS_SPACE_BYTES: Final = 70_000_000_000
"""What vl_convert reserves when it draws; it uses 80 MB of it."""
_WIDTH_PX: Final = 900
_SCALE: Final = 1.5
_RIGHT_PX: Final = 16
_SYMBOL_PX: Final = 40
_CHARACTER_PX: Final = 7
_LABEL_CHARACTERS: Final = 200
_LINE_CHARACTERS: Final = 150
_AROUND_PANEL_PX: Final = 50
_LIGHT: Final = {"background": "white", "font": "Arial, sans-serif", "axis": {"gridColor": "#e5e5e5"}}
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
class ChartSource:
    """The data that charts are drawn from.

    ``cells`` are the comparisons of the directory's variants with its baseline, ``noise`` is that of an A/A
    experiment by metric; without them outliers are not marked, and the baseline's own scatter replaces the noise.
    """

    analysis: AnalyzedExperiment
    cells: Sequence[CellComparison] = ()
    noise: Mapping[str, MetricNoise] = field(default_factory=dict)


ALL: Final = "*"
"""The option of a choice that leaves nothing out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A selector above a chart, whose value is the parameter ``name`` of its specification."""

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    """Value and text of each."""
    selected: str

    @property
    def selected_text(self) -> str:
        return dict(self.options).get(self.selected, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart, or the reason why it is not drawn. Exactly one of ``spec`` and ``skipped`` is None."""

    id: str
    """Unique on the page and fit for an HTML id: lower case and hyphens."""
    title: str
    caption: str = ""
    """One plain sentence: what is seen, in which unit, with which interval."""
    definition: str = ""
    """How the numbers are measured or computed."""
    spec: Spec | None = None
    skipped: str | None = None
    choices: tuple[Choice, ...] = ()
    has_log_switch: bool = False
    """The x axis can be made logarithmic."""
    section: str = "measurements"
    """``latency`` or ``measurements``: where on the page it stands."""
    is_of_machine: bool = False
    """It shows the machine and not the work: it is folded."""

    def __post_init__(self) -> None:
        if (self.spec is None) == (self.skipped is None):
            raise ValueError(f"chart {self.id!r} needs either a specification or a reason why it has none")

    @property
    def height(self) -> int:
        """Pixels that the page keeps free for it, without those of the legend."""
        return sum(panel["height"] + _AROUND_PANEL_PX for panel in (self.spec or {"vconcat": []})["vconcat"])

    @property
    def shown_choices(self) -> tuple[Choice, ...]:
        """Those with something to choose."""
        return tuple(choice for choice in self.choices if len(choice.options) > 1)


def block_choice(blocks: Iterable[int], selected: int) -> Choice:
    """The selector of a block; ``OF_BLOCK`` keeps its rows."""
    options = tuple((str(block), f"block {block}") for block in sorted(set(blocks)))
    return Choice(name="block", label="Block", options=options, selected=str(selected))


def arm_choice(labels: Sequence[str]) -> Choice:
    """The selector of one arm or all of them; ``OF_ARM`` keeps its rows."""
    options = ((ALL, "all arms"), *((label, label) for label in labels))
    return Choice(name="arm", label="Arm", options=options if len(labels) > 1 else options[:1], selected=ALL)


OF_BLOCK: Final = "datum.block === block"
OF_ARM: Final = f"arm === '{ALL}' || datum.arm === arm"


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
    scale: Spec = {"zero": zero, "nice": domain is None}
    return {
        **({} if field is None else {"field": field}),
        "type": "quantitative",
        "title": title,
        "scale": scale if domain is None else {**scale, "domain": list(domain)},
        "axis": {"tickCount": 6, **more},
    }


_WIDE: Final = 8.0
"""A quotient of the largest and the smallest value from which an axis is logarithmic."""
_MAX_OWN_TICKS: Final = 8


def is_wide(values: Sequence[float], least: float = _WIDE) -> bool:
    """Values that are readable on a logarithmic axis only."""
    return bool(values) and min(values) > 0 and max(values) >= least * min(values)


def log_axis(title: str, values: Sequence[float], field: str | None = None) -> Spec:
    """A logarithmic channel for ``values``, labelled at each if they are few, else at 1, 2 and 5 of each decade."""
    distinct = sorted(set(values))
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    inside = [tick for tick in ticks if min(values) <= tick * 1.001 and tick <= max(values) * 1.001]
    inside = distinct if 2 < len(distinct) <= _MAX_OWN_TICKS else inside
    channel = axis(title, field, values=inside, format=",~g")
    return {**channel, "scale": {"type": "log", "nice": False}}


def panel(height: int, y: Spec, layers: Sequence[Spec], *, where: Sequence[str] = (), **more: Any) -> Spec:
    """One panel: ``y`` without a field, which each layer names. Rows are those of the data for which all of
    ``where`` holds; ``encoding`` in ``more`` is that of all layers.
    """
    encoding = {**more.pop("encoding", {}), "y": y}
    filters = [{"filter": test} for test in where]
    return {"height": height, "transform": filters, "encoding": encoding, "layer": list(layers), **more}


def layer(mark: str, *, where: str | None = None, tip: Sequence[tuple[str, ...]] = (), **properties: Any) -> Spec:
    """A layer of marks; properties that end in ``_by`` are channels of its encoding, a text names their field.

    ``tip`` has field, title and format of what is told of a mark under the pointer.
    """
    channels = {name.removesuffix("_by"): value for name, value in properties.items() if name.endswith("_by")}
    encoding = {name: {"field": value} if isinstance(value, str) else value for name, value in channels.items()}
    if tip:
        encoding["tooltip"] = [
            {"field": name, "title": title, **({"format": form[0], "type": "quantitative"} if form else {})}
            for name, title, *form in tip
        ]
    rest = {name: value for name, value in properties.items() if not name.endswith("_by")}
    result: Spec = {"mark": {"type": mark, **rest}, "encoding": encoding}
    return result if where is None else {**result, "transform": [{"filter": where}]}


def level(value: float, color: str = GREY, **properties: Any) -> Spec:
    """A dashed line over the width of a panel, such as the baseline's."""
    encoding = {"x": {"value": 0}, "x2": {"value": "width"}, "y": {"datum": value}, "color": {"value": color}}
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeDash": [5, 3], **properties},
        "encoding": {**encoding, "strokeDash": None, "shape": None, "xOffset": None},
    }


def grey_band(low: float, high: float) -> Spec:
    """The area between two levels over the width of a panel."""
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rect", "opacity": 0.22},
        "encoding": {
            "x": {"value": 0},
            "x2": {"value": "width"},
            "y": {"datum": low},
            "y2": {"datum": high},
            "color": {"value": GREY},
            "strokeDash": None,
        },
    }


def series_color(index: int) -> str:
    """Colour of the series at ``index``; the colours start over where they run out, with another dash."""
    return SERIES[index % len(SERIES)]


def by_series(
    names: Sequence[str], drawn: Sequence[str] | None = None, *, name: str = "arm", first: int = 0
) -> Spec:
    """Colour, and dash where the colours start over, of each series; those that are ``drawn`` have a legend.

    The series at index i of ``names`` has the same colour in every picture.
    """
    series = [(i + first, each) for i, each in enumerate(names) if drawn is None or each in drawn]
    colors = [series_color(i) for i, _ in series]
    encoding = {"color": by_color(name, dict(zip((each for _, each in series), colors, strict=True)))}
    if any(i >= len(SERIES) for i, _ in series):
        dashes = [DASHES[i // len(SERIES) % len(DASHES)] for i, _ in series]
        encoding["strokeDash"] = {
            **encoding["color"],
            "scale": {"domain": [each for _, each in series], "range": dashes},
        }
    return encoding


def by_color(name: str, colors: Mapping[str, str]) -> Spec:
    """A channel of colours by the text in the field ``name``."""
    legend = {"symbolOpacity": 1} if len(colors) > 1 else None
    scale = {"domain": list(colors), "range": list(colors.values())}
    return {"field": name, "type": "nominal", "title": None, "scale": scale, "legend": legend}


def picture(
    panels: Sequence[Spec],
    rows: Sequence[Row],
    x: Spec,
    *,
    choices: Sequence[Choice] = (),
    legend: Iterable[str] = (),
    left: int = 52,
    **datasets: Sequence[Row],
) -> Spec:
    """A specification of Vega-Lite. ``x`` is the channel of all panels.

    ``rows`` is the data of those that name none of ``datasets``. ``left`` is the room for labels at the left of the
    data in pixels, ``legend`` are the texts of the legend.
    """
    above = {**x, "title": None, "axis": {**x.get("axis", {}), "labels": False}}
    placed = [
        {**each, "encoding": {**each["encoding"], "x": x if each is panels[-1] else above}} for each in panels
    ]
    spec = _whole(placed, {"rows": rows, **datasets}, left, max(map(len, legend), default=20))
    params = [{"name": choice.name, "value": choice.selected} for choice in choices]
    return {**spec, "params": params, "resolve": {"scale": {"x": "shared", "color": "shared"}}}


def grid(lines: Sequence[Sequence[Spec]], legend: Iterable[str], **datasets: Sequence[Row]) -> Spec:
    """Panels side by side, each with an x axis, a width and a legend of its own."""
    resolve = {"scale": {"color": "independent"}}
    rows = [{"hconcat": list(line), "spacing": 30, "resolve": resolve} for line in lines]
    spec = _whole(rows, datasets, 56, 2 * max(map(len, legend), default=20))
    return {**spec, "resolve": resolve, "align": "none"}


def _whole(panels: Sequence[Spec], datasets: Mapping[str, Sequence[Row]], left: int, characters: int) -> Spec:
    spec: Spec = _visible(
        {
            "data": {"name": "rows"},
            "datasets": {name: [_plain(row) for row in data] for name, data in datasets.items()},
            "vconcat": list(panels),
            "spacing": 12,
            "config": {**_CONFIG, "axisY": _axis_of(left)},
            "usermeta": {"left": left, "label": characters},
        }
    )
    return spec


def _axis_of(left: int) -> Spec:
    """The title of a y axis stands above it, at the left edge of the picture."""
    return {
        "titleAngle": 0,
        "titleAlign": "left",
        "titleBaseline": "bottom",
        "titleX": -left,
        "titleY": -7,
        "minExtent": left,
        "maxExtent": left,
        "labelLimit": left - 6,
        "tickCount": 5,
    }


def _plain(row: Row) -> Spec:
    return {name: rounded(value) if isinstance(value, float) else value for name, value in row.items()}


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
    columns = max(1, width_px // (_SYMBOL_PX + _CHARACTER_PX * meta["label"]))
    legend = {"orient": "bottom", "columns": columns, "labelLimit": width_px - _SYMBOL_PX, "titleLimit": 0}
    inner = width_px - meta["left"] - _RIGHT_PX
    return {
        **spec,
        "config": {**spec["config"], "legend": legend},
        "vconcat": [{"width": inner, **panel} if "layer" in panel else panel for panel in spec["vconcat"]],
    }


def why_not_drawn() -> str | None:
    """The reason that no picture can be drawn here: a limit of address space below what drawing reserves."""
    return address_space_shortfall(_ADDRESS_SPACE_BYTES)


def picture_bytes(spec: Spec, title: str, note: str = "", suffix: str = ".png") -> bytes:
    """A file for paper: ``note`` stands below the title. The same specification gives the same bytes.

    Raises UsageError where the limit of address space leaves no room for drawing.
    """
    if (reason := why_not_drawn()) is not None:
        raise UsageError(f"no picture can be drawn: {reason}")
    import vl_convert  # noqa: PLC0415 - takes a second, and only pictures need it

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
    full = {**sized(spec, _WIDTH_PX), "title": text, "padding": 12}
    if suffix == ".svg":
        return vl_convert.vegalite_to_svg(full, config=_LIGHT).encode()
    if suffix == ".pdf":
        return bytes(vl_convert.vegalite_to_pdf(full, config=_LIGHT))
    return bytes(vl_convert.vegalite_to_png(full, scale=_SCALE, config=_LIGHT))


def chart_bytes(chart: Chart, suffix: str = ".png") -> bytes:
    """The picture of a drawn chart with its caption. Raises ValueError for one that is skipped."""
    if chart.spec is None:
        raise ValueError(f"chart {chart.id!r} is not drawn: {chart.skipped}")
    selected = ", ".join(choice.selected_text for choice in chart.shown_choices)
    return picture_bytes(
        chart.spec, chart.title, f"{chart.caption} Shown: {selected}." if selected else chart.caption, suffix
    )


def _lines(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= _LINE_CHARACTERS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
