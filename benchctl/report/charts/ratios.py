"""Arms beside each other: values block by block, acceptance of drafts, and the sweep."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, stdev
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment, few_requests
from benchctl.analysis.experiment.summary import CellSummary, SweepRow
from benchctl.analysis.metrics.table import METRICS, STEADY
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.profile.model import Profile
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.schema import Cell
from benchctl.records.stores import MetricNoise
from benchctl.report.charts import figure
from benchctl.report.charts.figure import GREY
from benchctl.units import range_of


def draw_block_values(subject: figure.Subject) -> figure.Chart:
    """A panel for each deciding metric; comparisons with the baseline know the outliers."""
    arms, analysis = subject.arms, subject.analysis
    profile, cells = analysis.profile, [cell for comparison in subject.comparisons for cell in comparison.cells]
    primary = Profile.model_fields["primary_metrics"].default if profile is None else profile.primary_metrics
    decided = {metric.metric.name for cell in cells for metric in cell.deciding}
    primary = tuple(STEADY[name] if STEADY.get(name) in decided else name for name in primary)
    outliers = {(cell.b_label, each.metric.name): each.outlier_blocks for cell in cells for each in cell.metrics}
    rows_of = {
        name: list(_block_rows(name, arms, analysis, outliers))
        for name in primary
        if name in METRICS and not METRICS[name].is_exact
        if any(run.number(name) is not None for arm in arms for run in arm.runs)
    }
    chart = figure.Chart(id="block-values", title="Values block by block", file="block_values.png")
    if not rows_of:
        return replace(chart, skipped="no finished run knows a deciding metric")
    is_relative = any(_hides_scatter(rows) for rows in rows_of.values())
    labels, ordinate = [arm.label for arm in arms], "percent" if is_relative else "value"
    panels = [
        figure.panel(
            150,
            figure.axis(f"{name}, {'% from mean of the arm' if is_relative else METRICS[name].unit}"),
            _block_layers(labels, ordinate),
            where=(f"datum.metric === '{name}'",),
            encoding=figure.by_series(labels),
        )
        for name in rows_of
    ]
    blocks = sorted({run.record.block for run in analysis.runs})
    ticks: figure.Spec = {"values": blocks} if len(blocks) <= 20 else {}
    x = figure.axis("block", "x", domain=(blocks[0] - 0.6, blocks[-1] + 0.6), format="d", grid=False, **ticks)
    units = f"in {' and '.join(dict.fromkeys(METRICS[name].unit for name in rows_of))}"
    server = "" if analysis.results.manifest.engine == "attach" else ", a fresh server"
    origin = server if analysis.passes is None else ", the replays of one pass"
    far = "in per cent from the mean of its arm, because the arms are far apart"
    return replace(
        chart,
        caption=(
            f"Each point is one run{origin}, {far if is_relative else units}; a line joins the runs of one "
            "block. Open circles are outliers and count; crosses are left out."
        ),
        definition="; ".join(f"{name} = {METRICS[name].formula}" for name in rows_of)
        + ". Only runs that failed, are suspect or damaged are left out.",
        spec=figure.picture(panels, [row for rows in rows_of.values() for row in rows], x, legend=labels),
    )


def _block_layers(labels: Sequence[str], ordinate: str) -> list[figure.Spec]:
    """Lines that join what counts of a block, and the runs: open where they stand out, crossed where left out."""
    kinds = {"counted": "circle", "outlier": "circle", "left out": figure.CROSS}
    shapes = {"domain": list(kinds), "range": list(kinds.values())}
    joints = figure.layer(
        "line",
        where="datum.kind !== 'left out'",
        y_by=ordinate,
        detail_by={"field": "block"},
        color_by={"value": GREY},
        strokeDash_by={"value": [1, 0]},
        strokeWidth=1,
    )
    points = figure.layer(
        "point",
        y_by=ordinate,
        shape_by={"field": "kind", "type": "nominal", "legend": None, "scale": shapes},
        fillOpacity_by={"condition": {"test": "datum.kind === 'counted'", "value": 1}, "value": 0},
        stroke_by=figure.by_series(labels)["color"],
        strokeWidth=1.8,
        size=70 if len(labels) <= 4 else 34,  # large markers of more arms would cover one another on a phone
        tip=[("arm", "arm"), ("block", "block"), ("value", "value", ".5~g"), ("run", "run"), ("note", "")],
    )
    return [joints, points]


def _block_rows(
    name: str,
    arms: Sequence[CellSummary],
    analysis: AnalyzedExperiment,
    outliers: Mapping[tuple[str, str], Sequence[int]],
) -> Iterator[figure.Row]:
    """The values of one metric; ``percent`` is that of the geometric mean of those of the arm that count.

    The arms of a block stand side by side over 0.6 of the distance between two blocks.
    """
    for i, arm in enumerate(arms):
        runs = [run for run in analysis.runs if run.label == arm.label]
        values = {run: value for run in runs if (value := run.number(name)) is not None}
        counted = [value for run, value in values.items() if run.reason_excluded(name) is None]
        mean = geometric_mean(counted) if counted and min(counted) > 0 else None
        for run, value in values.items():
            block, reason = run.record.block, run.reason_excluded(name)
            kind = "outlier" if block in outliers.get((arm.label, name), ()) else "counted"
            yield {
                "metric": name,
                "arm": arm.label,
                "block": block,
                "x": block + 0.6 * ((i + 0.5) / len(arms) - 0.5),
                "value": value,
                "percent": None if mean is None else 100 * (value / mean - 1),
                "run": run.record.run_id,
                "kind": kind if reason is None else "left out",
                "note": kind.removesuffix("counted") if reason is None else f"left out: {reason}",
            }


def _hides_scatter(rows: Sequence[figure.Row]) -> bool:
    """True where arms differ so much that on one axis the scatter of each would be a flat line.

    That is when the values of all arms span more than five times what those of one arm do, in logarithms.
    """
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row["value"])
    values = [row["value"] for row in rows]
    if not values or min(values) <= 0:
        return False
    widest = max(math.log(max(group) / min(group)) for group in groups.values())
    return 0 < widest < math.log(max(values) / min(values)) / 5


def draw_acceptance(subject: figure.Subject) -> figure.Chart | None:
    """One line for each arm that drafted tokens, with the interval over its blocks at each position.

    None where no arm drafted any: then the page has nothing to say of it.
    """
    arms = subject.arms
    drafted = {arm.label: drafts for arm in arms if (drafts := arm.drafts()) is not None and drafts.positions}
    if not drafted:
        return None
    tip = (("arm", "arm"), ("position", "position"), ("share", "share", ".4~g"))
    layers = [
        figure.layer("rule", y_by="low", y2_by="high"),
        figure.layer("line", y_by="share"),
        figure.layer("point", y_by="share", tip=tip),
    ]
    encoding = figure.by_series([arm.label for arm in arms], list(drafted))
    titles = ("accepted up to this position, share of all drafts", "accepted where the one before was, share")
    panels = [
        figure.panel(
            180,
            figure.axis(title, domain=(0, 1.05), format=".2~f"),
            layers,
            where=(f"datum.panel === {number}",),
            encoding=encoding,
        )
        for number, title in enumerate(titles)
    ]
    rows = [
        {"arm": label, "panel": panel, "position": at.position, "share": share, "low": low, "high": high}
        for label, drafts in drafted.items()
        for at in drafts.positions
        for panel, share, (low, high) in (
            (0, at.survival, at.survival_interval or (None, None)),
            (1, at.conditional, at.conditional_interval or (None, None)),
        )
    ]
    longest = max(len(drafts.positions) for drafts in drafted.values())
    x = figure.axis("position in the draft", "position", domain=(0.5, longest + 0.5), tickMinStep=1, format="d")
    return figure.Chart(
        id="acceptance",
        title="Acceptance of draft tokens by position",
        caption=(
            "Share of draft tokens that the target model accepted at each position, all usable runs of an arm "
            "together; bars are 95% intervals over its blocks."
        ),
        definition=(
            "Above: drafts accepted up to the position / all drafts. Below: the same / drafts accepted up to the "
            "position before. A draft that is shorter than others counts as rejected at the positions it lacks."
        ),
        spec=figure.picture(panels, rows, x, legend=drafted),
    )


MEASURED: Final = {
    "wall": ("wall_s", "wall time"),
    "step_ms": ("step_ms", "time per step"),
    "ttft": ("ttft_ms", "mean TTFT"),
    "p99_ttft": ("p99_ttft_ms", "p99 TTFT"),
}
"""Name in a row of the sweep, then name of the metric, and in words."""
WITH_FLOPS: Final = {
    "wall": ("wall_s", "wall time"),
    "pflops": ("", "FLOPs, published rule"),
    "pflops_observed": ("", "FLOPs, observed"),
    "achieved_tflops": ("", "achieved FLOP/s, published rule"),
}


def draw_sweep(subject: figure.Subject) -> figure.Chart | None:
    """The sweep of the page: what was measured."""
    noise = {name: floor for comparison in subject.comparisons for name, floor in comparison.noise.items()}
    return _sweep_chart(subject.analysis, MEASURED, noise)


def draw_sweep_of_flops(subject: figure.Subject) -> figure.Chart | None:
    """The sweep of the files: the wall time beside its FLOPs."""
    chart = _sweep_chart(subject.analysis, WITH_FLOPS)
    file = sweep_name([row.cell for row in subject.analysis.sweep if row.cell])
    return None if chart is None else replace(chart, id="sweep-flops", section="", file=file)


def _sweep_chart(
    analysis: AnalyzedExperiment,
    quantities: Mapping[str, tuple[str, str]],
    noise: Mapping[str, MetricNoise] | None = None,
) -> figure.Chart | None:
    """Cells as lines over a swept factor, with the ratio to the baseline, its interval and its blocks.

    The band around 1 is the noise by metric, or else the baseline's own scatter. None where nothing was swept.
    """
    if len({cell_name(cell.cell) for cell in analysis.cells if cell.cell}) < 2:
        return None
    rows = [row for row in analysis.sweep if row.cell and not quantities.keys().isdisjoint(row.estimates)]
    title = "Cost over the swept factor"
    if len(rows) < 2:
        reason = "no variant has finished runs beside the baseline in two or more cells of a sweep"
        return figure.Chart(id="sweep", title=title, skipped=reason)
    factor = swept_factor(rows)
    lines = list(dict.fromkeys(_line_of(row, factor) for row in rows))
    reaches = {name: reach_of(rows, name) for name in quantities if any(name in row.estimates for row in rows)}
    few = few_requests([run for cell in analysis.cells for run in cell.runs], 99)
    encoding = figure.by_series(lines, name="line", first=1)
    encoding["color"]["legend"] = {"symbolOpacity": 1}
    layers = [figure.level(1.0), *_sweep_layers(len(lines), is_ordered=factor is not None)]
    panels = []
    for name, (low, high, _) in reaches.items():
        metric, words = quantities[name]
        of = f" of {few} requests" if few and name == "p99_ttft" else ""
        scatter = _scatter(analysis, noise, metric)
        band = [] if scatter is None else [figure.grey_band(math.exp(-scatter), math.exp(scatter))]
        y = figure.axis(f"{words}{of}, ratio to baseline", domain=(low, high))
        y["scale"]["clamp"] = True  # far beyond the picture an interval is not drawn at all
        where = (f"datum.quantity === '{name}'",)
        panels.append(figure.panel(170, y, [*band, *layers], where=where, encoding=encoding))
    drawn = [row for name in reaches for each in rows for row in _sweep_rows(each, name, factor)]
    estimates = [estimate for row in rows for name, estimate in row.estimates.items() if name in reaches]
    grey = "the noise of an A/A experiment" if noise else "one standard deviation of the baseline's own blocks"
    cut = "; intervals extend beyond the picture" if any(is_cut for _, _, is_cut in reaches.values()) else ""
    return figure.Chart(
        id="sweep",
        title=title,
        caption=f"Ratio to the baseline with its {interval_label(estimates)}{cut}; grey band around 1: {grey}.",
        definition=(
            "Ratio to the baseline of the same block, as compare estimates it, with its interval; open "
            "circles are single blocks. Above 1 the cell is slower than the baseline."
        ),
        spec=figure.picture(panels, drawn, _sweep_axis(rows, factor), legend=lines),
    )


def swept_factor(rows: Sequence[SweepRow]) -> str | None:
    """The numeric factor with the most values, the first of equals; None where none has two."""
    values = {name: {row.cell.get(name) for row in rows} for row in rows for name in row.cell}
    types = {name: {type(value) for value in cells} for name, cells in values.items() if len(cells) > 1}
    numeric = [name for name in types if types[name] <= {int, float}]
    return max(numeric, key=lambda name: len(values[name]), default=None)


def sweep_name(cells: Sequence[Cell]) -> str:
    """The name of a picture of the factors that differ between cells, as one part of a path.

    The cells of a plan that somebody else wrote may have other factors each.
    """
    factors = dict.fromkeys(factor for cell in cells for factor in cell)
    varied = [factor for factor in factors if len({cell.get(factor) for cell in cells}) > 1]
    stem = "topk" if varied in ([], ["top_k"]) else "_".join(varied)
    return re.sub(r"[^\w=-]", "_", f"{stem}_sweep") + ".png"


def reach_of(rows: Sequence[SweepRow], quantity: str) -> tuple[float, float, bool]:
    """The ends of the y axis, which holds all ratios and 1, and whether an interval extends beyond them."""
    drawn = [row for row in rows if quantity in row.estimates]
    estimates = [row.estimates[quantity] for row in drawn]
    ratios = [1.0, *(estimate.ratio for estimate in estimates)]
    ratios += [ratio for row in drawn for ratio in _blocks(row, quantity).values()]
    ends = [end for estimate in estimates for end in (estimate.ci_low, estimate.ci_high) if end is not None]
    low, high = figure.reach(ratios, ends, least=0.02)
    return round(low, 4), round(high, 4), any(not low <= end <= high for end in ends)


def interval_label(estimates: Sequence[RatioEstimate]) -> str:
    """Confidence and blocks of the intervals: ``95% interval over 2 to 3 blocks``."""
    blocks = range_of([estimate.num_blocks for estimate in estimates])
    return f"{estimates[0].confidence:.0%} interval over {blocks} blocks"


def _blocks(row: SweepRow, quantity: str) -> Mapping[int, float]:
    return row.ratios[quantity].block_ratios if quantity in row.ratios else {}


def _line_of(row: SweepRow, factor: str | None) -> str:
    """A line for each variant and each combination of the other factors; without a factor, one for each variant."""
    return arm_label(row.variant, {k: v for k, v in row.cell.items() if factor is not None and k != factor})


def _sweep_rows(row: SweepRow, quantity: str, factor: str | None) -> Iterator[figure.Row]:
    """The estimate of one cell, then the ratio of each block."""
    estimate = row.estimates.get(quantity)
    if estimate is None:
        return
    line = {"quantity": quantity, "line": _line_of(row, factor), "x": _x_of(row, factor)}
    yield {
        **line,
        "kind": "estimate",
        "ratio": estimate.ratio,
        "low": estimate.ci_low,
        "high": estimate.ci_high,
        "blocks": estimate.num_blocks,
    }
    for block, ratio in _blocks(row, quantity).items():
        yield {**line, "kind": "block", "ratio": ratio, "low": None, "high": None, "blocks": block}


def _x_of(row: SweepRow, factor: str | None) -> float | str:
    """The value of the factor; without one, the cell, by its bare value where it has only one factor."""
    if factor is not None:
        return float(row.cell[factor] or 0)
    return str(next(iter(row.cell.values()))) if len(row.cell) == 1 else cell_name(row.cell)


def _sweep_layers(num_lines: int, *, is_ordered: bool) -> list[figure.Spec]:
    estimates, blocks = "datum.kind === 'estimate'", "datum.kind === 'block'"
    tip = (("line", "arm"), ("x", "at"), ("ratio", "ratio", ".4~g"))
    interval = (("low", "from", ".4~g"), ("high", "to", ".4~g"), ("blocks", "blocks"))
    beside: figure.Spec = {} if is_ordered else {"xOffset_by": "line"}
    has_bands = is_ordered and num_lines <= figure.MAX_BANDS
    mark: figure.Spec = {"mark": "area", "opacity": 0.2} if has_bands else {"mark": "rule"}
    return [
        figure.layer(where=estimates, y_by="low", y2_by="high", **mark, **beside),
        *([figure.layer("line", where=estimates, y_by="ratio", strokeWidth=2)] if is_ordered else []),
        figure.layer(
            "point",
            where=blocks,
            y_by="ratio",
            filled=False,
            size=30,
            strokeWidth=1,
            tip=(*tip, ("blocks", "block")),
            **beside,
        ),
        figure.layer("point", where=estimates, y_by="ratio", tip=(*tip, *interval), **beside),
    ]


def _sweep_axis(rows: Sequence[SweepRow], factor: str | None) -> figure.Spec:
    """The factor at its values, logarithmic where they span much; without one, the cells side by side."""
    if factor is None:
        names = list(dict.fromkeys(str(_x_of(row, None)) for row in rows))
        return {
            "field": "x",
            "type": "nominal",
            "title": " and ".join(rows[0].cell),
            "sort": names,
            "axis": {"labelLimit": 160},
        }
    values = sorted({float(_x_of(row, factor)) for row in rows})
    ticks: figure.Spec = {"values": values} if len(values) <= 12 else {}
    scale = {"type": "log"} if figure.is_wide(values, 10.0) else {"zero": False}
    return {**figure.axis(factor, "x", format=",.12~g", **ticks), "scale": {**scale, "nice": False, "padding": 12}}


def _scatter(analysis: AnalyzedExperiment, noise: Mapping[str, MetricNoise] | None, metric: str) -> float | None:
    """Logarithm up to which a ratio may be noise: of an A/A experiment, or else the standard deviation of those of
    the baseline's blocks; None below three of them.
    """
    if noise:
        return math.log1p(noise[metric].floor_frac) if metric in noise else None
    baseline = analysis.results.manifest.baseline
    runs = [run for cell in analysis.cells if cell.variant == baseline and not cell.cell for run in cell.runs]
    values = [value for run in runs if (value := run.number(metric) if metric else None) is not None and value > 0]
    return stdev(map(math.log, values)) if len(values) > 2 else None


CHARTS: Final = (draw_block_values, draw_sweep, draw_acceptance, draw_sweep_of_flops)
"""In the order of the page."""
