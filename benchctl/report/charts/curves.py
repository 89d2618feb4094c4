"""The curves over the load: latency against throughput, and throughput against the speed of one user."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from benchctl.analysis.experiment.curves import Curve
from benchctl.report.charts import figure
from benchctl.report.curve_tables import quantity_title
from benchctl.units import percentage, range_of

_DEFINITION: Final = (
    "Knee: the load with the most throughput / latency, by a parabola in each block. Beyond it twice as many open "
    "requests give less than 1.41 times the tokens, and at a rate latency grows faster than the rate. Speed is "
    "1000 / TPOT. Each interval is that of its point alone. Metrics: "
)


def draw_throughput_latency(subject: figure.Subject) -> figure.Chart | None:
    """Latencies of each arm against its throughput; None where no load was swept."""
    chart = figure.Chart(id="throughput-latency", title="Latency against throughput over the load")
    return _drawn(chart, subject.analysis.curves, "throughput", ("ttft", "tpot"), height=200)


def draw_speed_throughput(subject: figure.Subject) -> figure.Chart | None:
    """Throughput of each arm against the speed that one user sees; None where no load was swept or no TPOT is
    known.
    """
    chart = figure.Chart(id="speed-throughput", title="Throughput against the speed of one user over the load")
    return _drawn(chart, subject.analysis.curves, "speed", ("throughput",), height=320)


CHARTS: Final = (draw_throughput_latency, draw_speed_throughput)
"""In the order of the page."""


def _drawn(
    chart: figure.Chart, curves: Sequence[Curve], x: str, ys: Sequence[str], height: int
) -> figure.Chart | None:
    """The chart with a panel for each of the quantities ``ys`` against ``x``, as far as they are known."""
    labels = list(dict.fromkeys(curve.label for curve in curves))[: figure.MAX_SERIES]
    curves = [curve for curve in curves if curve.label in labels and {x, *ys} & curve.metrics.keys() > {x}]
    if not curves:
        return None
    workloads = list(dict.fromkeys(curve.workload for curve in curves))
    options = tuple((each, each or "all") for each in workloads)
    choice = figure.Choice(name="workload", label="Workload", options=options, selected=workloads[0])
    titles = {
        quantity: quantity_title(quantity, curves[0]) for quantity in (x, *ys) if quantity in curves[0].metrics
    }
    rows_of = {y: [row for curve in curves for row in _rows(curve, labels[0], x, y)] for y in ys if y in titles}
    rows = [row for of_panel in rows_of.values() for row in of_panel]
    has_bands = len(labels) <= figure.MAX_BANDS and all(_is_ordered(curve, x) for curve in curves)
    panels = [
        figure.panel(
            height,
            _axis(titles[y], of_panel, "y"),
            _layers(curves[0].unit, (titles[x], titles[y]), has_bands=has_bands),
            where=(f"datum.panel === '{y}'", "datum.workload === workload"),
            encoding=figure.by_series(labels),
        )
        for y, of_panel in rows_of.items()
    ]
    return replace(
        chart,
        caption=_caption(curves),
        definition=_DEFINITION + ", ".join(dict.fromkeys(curves[0].metrics.values())),
        section="load",
        file=f"{chart.id.replace('-', '_')}.png",
        choices=(choice,),
        spec=figure.picture(panels, rows, _axis(titles[x], rows, "x", "x"), choices=[choice], legend=labels),
    )


def _is_ordered(curve: Curve, quantity: str) -> bool:
    """True where the quantity only grows or only falls with the load: areas are drawn in the order of x."""
    values = [level[quantity].value for level in curve.levels.values()]
    return len({later > earlier for earlier, later in pairwise(values)}) == 1


def _axis(title: str, rows: Sequence[figure.Row], name: str, field: str | None = None) -> figure.Spec:
    axis = figure.suitable_axis(title, [row[name] for row in rows], field)
    return {**axis, "scale": {**axis["scale"], "padding": 14}} if axis["scale"].get("type") == "log" else axis


def _caption(curves: Sequence[Curve]) -> str:
    sizes = [size for curve in curves for size in curve.cells]
    blocks = range_of([len(cell.runs) for curve in curves for cell in curve.cells.values()])
    missing = "".join(f" No knee of {c.label}: {c.knee}." for c in curves if isinstance(c.knee, str))
    return (
        f"One line per arm over {min(sizes):g} to {max(sizes):g} {curves[0].unit}; points are centres over "
        f"{blocks} blocks with {percentage(curves[0].confidence)} intervals, thin lines single blocks. Diamond and "
        f"thick piece: the knee with its interval.{missing}"
    )


def _rows(curve: Curve, first_label: str, x: str, y: str) -> Iterator[figure.Row]:
    """Points, then those of single blocks, then the piece of the curve in the interval of the knee, and the knee.

    Only points of the first arm have their size as ``words``.
    """
    common = {"arm": curve.label, "workload": curve.workload, "panel": y}
    for size, levels in curve.levels.items():
        of_x, of_y, blocks = levels[x], levels[y], curve.blocks(size, y)
        yield {
            **common,
            "kind": "point",
            "size": size,
            "words": f"{size:g}" if curve.label == first_label else None,
            "x": of_x.value,
            "x_low": of_x.low,
            "x_high": of_x.high,
            "y": of_y.value,
            "low": of_y.low,
            "high": of_y.high,
            "n": len(blocks),
        }
        for block, at_x in curve.blocks(size, x).items():
            yield {**common, "kind": "block", "block": block, "size": size, "x": at_x, "y": blocks[block]}
    if not isinstance(knee := curve.knee, str):
        sizes = [*curve.cells]
        low, high = (min(max(end or knee.value, sizes[0]), sizes[-1]) for end in (knee.low, knee.high))
        piece = [low, *(size for size in sizes if low < size < high), high]
        for kind, size in (*(("piece", size) for size in piece), ("knee", knee.value)):
            at = curve.at(size)
            yield {**common, "kind": kind, "size": size, "x": at[x], "y": at[y]}


def _layers(unit: str, titles: tuple[str, str], *, has_bands: bool) -> list[figure.Spec]:
    """From back to front: intervals, single blocks, curves, knees, points and their sizes."""
    at_points, of_blocks = "datum.kind === 'point'", "datum.kind === 'block'"
    joined: figure.Spec = {"y_by": "y", "order_by": {"field": "size", "type": "quantitative"}}
    tip = [("arm", "arm"), ("size", unit, ".4~g"), ("x", titles[0], ".4~g"), ("y", titles[1], ".4~g")]
    ends = [("low", "from", ".4~g"), ("high", "to", ".4~g"), ("n", "blocks")]
    mark: figure.Spec = {"mark": "area", "opacity": 0.2} if has_bands else {"mark": "rule"}
    return [
        figure.layer(where=at_points, y_by="low", y2_by="high", **mark),
        figure.layer("line", where=of_blocks, detail_by="block", strokeWidth=0.8, opacity=0.35, **joined),
        figure.layer("rule", where=at_points, x_by="x_low", x2_by="x_high", y_by="y"),
        figure.layer("line", where=at_points, strokeWidth=2, **joined),
        figure.layer("line", where="datum.kind === 'piece'", strokeWidth=8, opacity=0.4, **joined),
        figure.layer("point", where=at_points, y_by="y", tip=[*tip, *ends]),
        figure.layer(
            "point", where="datum.kind === 'knee'", y_by="y", shape="diamond", size=260, filled=False, tip=tip
        ),
        figure.layer("text", where="isValid(datum.words)", y_by="y", text_by="words", align="left", dx=6, dy=-9),
    ]
