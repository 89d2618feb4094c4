"""The requests of a run over time, one bar each, and the distributions of their latencies by arm and by block."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from benchctl.analysis.metrics.latency import first_token_ns, is_completed, last_token_ns, measured
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import LATENCY_NAMES, Sorted, run_latencies
from benchctl.analysis.summary.summary import RunSummary
from benchctl.records.record import RequestRecord
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of, runs_by_block
from benchctl.units import NS_PER_S

MAX_REQUESTS: Final = 200
_LEAST_REQUESTS: Final = 50
_MAX_BARS: Final = 8_000
"""Of all runs; where they have more, each run shows fewer requests."""
_PANEL_PX: Final = 160


def draw_requests(source: figure.ChartSource) -> figure.Chart | None:
    """A panel for the first arm and one for another, from the runs of one block.

    Block and other arm can be chosen; at first the block is the one that most arms finished. None for forward
    passes, which have no requests.
    """
    if source.analysis.passes is not None:
        return None
    title = "Requests over the run"
    arms = arms_of(source.analysis)
    blocks = runs_by_block(arms, [run for arm in arms for run in arm.runs if request_rows(run.run.requests)])
    if not blocks:
        reason = "no finished run has a request that was sent"
        return figure.Chart(id="request-timeline", title=title, skipped=reason)
    first_block, first_runs = next(iter(blocks.items()))
    runs = [run for runs in blocks.values() for run in runs]
    labels = [arm.label for arm in arms if any(run.label == arm.label for run in runs)]
    is_virtual = any(run.record.clock == "virtual" for run in first_runs)
    num_drawn = max(_LEAST_REQUESTS, min(MAX_REQUESTS, _MAX_BARS // len(runs)))
    most = max(len(request_rows(run.run.requests)) for run in runs)
    which = f", {num_drawn} of up to {most:,} at equal distances" if most > num_drawn else ""
    other = figure.Choice(
        name="arm",
        label=f"Below {labels[0]}",
        options=tuple((label, label) for label in labels[1:]),
        selected=labels[-1],
    )
    choices = (figure.block_choice(blocks, first_block), other)
    same = figure.by_series([arm.label for arm in arms], labels)
    same["color"]["legend"] = None
    thick = max(1.0, 0.8 * _PANEL_PX / min(most + 1, num_drawn))
    panels = [
        figure.panel(
            _PANEL_PX,
            {**figure.axis("request no.", format="d"), "scale": {"reverse": True, "zero": False, "padding": thick}},
            _layers(thick),
            where=(figure.OF_BLOCK, test),
            encoding=same,
            title=name,
        )
        for test, name in (
            ("datum.is_first", labels[0]),
            ("!datum.is_first && datum.arm === arm", {"text": {"expr": "arm"}}),
        )[: len(labels)]
    ]
    rows = [
        {"block": str(run.record.block), "arm": run.label, "is_first": run.label == labels[0], **row}
        for run in runs
        for row in evenly(_scaled_rows(run), num_drawn)
    ]
    unit = "virtual s" if is_virtual else "s"
    return figure.Chart(
        id="request-timeline",
        title=title,
        caption=f"Each bar is one request{which}, in s: grey until the first output, coloured while it decodes.",
        definition=(
            "Grey: from send to the first output, which is queueing and prefill. Coloured: from the first to the "
            "last output, which is decoding. A cross marks a request that failed. As the client saw it"
            + (", multiplied by time_scale to match the simulator's virtual time." if is_virtual else ".")
        ),
        spec=figure.picture(
            panels, rows, figure.axis(f"time since the first send, {unit}", "sent", zero=True), choices=choices
        ),
        choices=choices,
    )


def _layers(thickness: float) -> list[figure.Spec]:
    bar: figure.Spec = {"y_by": "row", "strokeWidth": thickness}
    tip = (("id", "request"), ("sent", "sent, s", ".4~g"), ("first", "first output, s", ".4~g"))
    return [
        figure.layer("rule", x2_by="waited", color_by={"value": figure.GREY}, tip=tip, **bar),
        figure.layer(
            "rule",
            where="isValid(datum.first)",
            x_by="first",
            x2_by="last",
            tip=(*tip, ("last", "last output, s", ".4~g")),
            **bar,
        ),
        figure.layer(
            "point",
            where="isValid(datum.error)",
            x_by="waited",
            y_by="row",
            color_by={"value": figure.VERMILION},
            shape="M-0.9,-0.9L0.9,0.9M0.9,-0.9L-0.9,0.9",
            strokeWidth=2.5,
            filled=False,
            tip=(("id", "request"), ("error", "error")),
        ),
    ]


def _scaled_rows(run: RunSummary) -> list[figure.Row]:
    return request_rows(run.run.requests, run.record.clock_factor)


def request_rows(requests: Sequence[RequestRecord], time_scale: float = 1.0) -> list[figure.Row]:
    """All that were sent and are no warm-up, in the order of sending, in seconds since the first send.

    Times are multiplied by ``time_scale``; ``waited`` is the end of the grey bar, ``first`` and ``last`` are None
    without any output.
    """
    sends = [(request.sent_ns, request) for request in measured(requests) if request.sent_ns is not None]
    sent = sorted(sends, key=lambda pair: (pair[0], pair[1].index))
    return list(_rows(sent, time_scale))


def _rows(sent: Sequence[tuple[int, RequestRecord]], time_scale: float) -> Iterator[figure.Row]:
    def seconds(t_ns: int | None) -> float | None:
        return None if t_ns is None else (t_ns - sent[0][0]) * time_scale / NS_PER_S

    for i, (sent_ns, request) in enumerate(sent, start=1):
        first, last = seconds(first_token_ns(request)), seconds(last_token_ns(request))
        failure = "not answered to its end" if request.error is None else request.error.kind
        yield {
            "row": i,
            "id": request.request_id,
            "sent": seconds(sent_ns),
            "waited": seconds(sent_ns) if first is None else first,
            "first": first,
            "last": first if last is None else last,
            "error": None if is_completed(request) else failure,
        }


def evenly(rows: Sequence[figure.Row], at_most: int = MAX_REQUESTS) -> list[figure.Row]:
    """At most ``at_most`` of the rows at equal distances, first and last among them."""
    if len(rows) <= at_most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (at_most - 1))] for i in range(at_most)]


MAX_POINTS: Final = 300
"""Of the line of an arm; a percentile between two points is off by at most their distance."""
_MAX_BLOCK_POINTS: Final = 100
_MAX_POINTS_OF_BLOCKS: Final = 24_000
_LEAST_POINTS: Final = 20
_ID: Final = "latencies"
_TITLE: Final = "Latency distributions"
SECTION: Final = "latency"
NO_LATENCIES: Final = "no finished run has the times of its requests"

Blocks = Sequence[tuple[str, Mapping[str, Sorted]]]
"""Name of each block, and its ascending values by latency."""


def draw_latencies(source: figure.ChartSource) -> figure.Chart | None:
    """The distributions of all usable runs. None for forward passes, which have no requests."""
    if source.analysis.passes is not None:
        return None
    arms = [
        (arm.label, [(f"block {run.record.block}", run_latencies(run)) for run in arm.runs])
        for arm in arms_of(source.analysis)
    ]
    return draw_distributions(arms, unit="block")


def draw_distributions(arms: Sequence[tuple[str, Blocks]], unit: str) -> figure.Chart:
    """A thick line for each arm over all its blocks, a thin one for each; ``unit`` is the word for a block."""
    arms = arms[: figure.MAX_SERIES]
    labels = [label for label, _ in arms]
    names = [name for name in LATENCY_NAMES if any(name in values for _, blocks in arms for _, values in blocks)]
    if not names:
        return figure.Chart(id=_ID, title=_TITLE, skipped=NO_LATENCIES, section=SECTION)
    num_lines = sum(name in values for name in names for _, blocks in arms for _, values in blocks)
    most = max(_LEAST_POINTS, min(_MAX_BLOCK_POINTS, _MAX_POINTS_OF_BLOCKS // num_lines))
    rows = [row for name in names for label, blocks in arms for row in _latencies_rows(label, name, blocks, most)]
    latency = figure.Choice(
        name="latency",
        label="Latency",
        options=tuple((name, LATENCY_NAMES[name]) for name in names),
        selected="tpot" if "tpot" in names else names[0],
    )
    choices = (latency, figure.arm_choice(labels))
    tip = (("arm", "arm"), (unit, unit), ("ms", "at most, ms", ".4~g"), ("share", "share", ".1%"))
    rows = [{**row, unit: row["of"] or f"all {unit}s"} for row in rows]
    line: figure.Spec = {"y_by": "share", "detail_by": "of", "tip": tip}
    spec = figure.picture(
        [
            figure.panel(
                280,
                figure.axis("share at most so slow", domain=(0, 1), format="%"),
                [
                    figure.layer("line", where="datum.of !== ''", strokeWidth=0.8, opacity=0.45, **line),
                    figure.layer("line", where="datum.of === ''", strokeWidth=2.6, **line),
                ],
                where=("datum.latency === latency", figure.OF_ARM),
                encoding=figure.by_series(labels),
            )
        ],
        rows,
        figure.axis("latency, ms", "ms"),
        choices=choices,
        legend=labels,
    )
    return figure.Chart(
        id=_ID,
        title=_TITLE,
        caption=(
            f"Share of the completed requests (of gaps: of all gaps) with at most this latency in ms: a thick line "
            f"for each arm over all its {unit}s, a thin one for each {unit}."
        ),
        definition="; ".join(
            f"{name} = {METRICS[f'{name}_ms'].formula.removeprefix('mean of ')}" for name in names
        ),
        spec=spec,
        choices=choices,
        section=SECTION,
        has_log_switch=True,
    )


def _latencies_rows(label: str, name: str, blocks: Blocks, most: int) -> list[figure.Row]:
    """The points of the lines of one arm: ``of`` is the block, or nothing for all of them."""
    of_blocks = [(block, values[name]) for block, values in blocks if name in values]
    if not of_blocks:
        return []
    lines = [(block, quantiles(values, most)) for block, values in of_blocks if len(of_blocks) > 1]
    lines.append(("", quantiles(np.sort(np.concatenate([values for _, values in of_blocks])), MAX_POINTS)))
    return [
        {"latency": name, "arm": label, "of": block, "ms": ms, "share": share}
        for block, values in lines
        for ms, share in zip(values.tolist(), np.linspace(0, 1, len(values)).tolist(), strict=True)
    ]


def quantiles(values: Sorted, at_most: int) -> Sorted:
    """Quantiles of ascending values at equal steps from the smallest to the largest; all where they are few.

    A single value is given twice, as a step from 0 to 1.
    """
    if len(values) == 1:
        values = np.repeat(values, 2)
    if len(values) <= at_most:
        return values
    result: Sorted = np.interp(np.linspace(0, len(values) - 1, at_most), np.arange(len(values)), values)
    return result
