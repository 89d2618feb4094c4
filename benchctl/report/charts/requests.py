"""The requests of a run over time, the distributions of their latencies, and the machine while it served them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchctl.analysis.analyzed import LATENCY_NAMES, Sorted, run_latencies
from benchctl.analysis.experiment.summary import CellSummary, RunSummary
from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.validity.machines import gpu_names, machines_of
from benchctl.report.charts import figure
from benchctl.units import GIB, HZ_PER_MHZ, NS_PER_S

_PANEL_PX: Final = 160


def draw_requests(subject: figure.Subject) -> figure.Chart | None:
    """A panel for the first arm and one for another, from the runs of one block.

    Block and other arm can be chosen; at first the block is the one that most arms finished. None for forward
    passes, which have no requests.
    """
    if subject.analysis.passes is not None:
        return None
    title, arms = "Requests over the run", subject.arms
    rows_of = {run.record.run_id: request_rows(run) for arm in arms for run in arm.runs}
    blocks = figure.runs_by_block(arms, [run for arm in arms for run in arm.runs if rows_of[run.record.run_id]])
    if not blocks:
        reason = "no finished run has a request that was sent"
        return figure.Chart(id="request-timeline", title=title, skipped=reason)
    runs = [run for runs in blocks.values() for run in runs]
    labels = figure.labels_of(arms, blocks)
    num_drawn = max(50, min(200, 8_000 // len(runs)))  # of a run; all runs together have 8,000
    most = max(len(rows_of[run.record.run_id]) for run in runs)
    other = figure.Choice(
        name="arm",
        label=f"Below {labels[0]}",
        options=tuple((label, label) for label in labels[1:]),
        selected=labels[-1],
    )
    choices = (figure.block_choice(blocks), other)
    colors = figure.by_series([arm.label for arm in arms], labels)
    panels = _panels_of_requests(labels, colors, max(1.0, 0.8 * _PANEL_PX / min(most + 1, num_drawn)))
    rows = [
        {"block": str(run.record.block), "arm": run.label, "is_first": run.label == labels[0], **row}
        for run in runs
        for row in evenly(rows_of[run.record.run_id], num_drawn)
    ]
    is_virtual = any(run.record.is_virtual for run in next(iter(blocks.values())))
    x = figure.axis(f"time since the first send, {'virtual s' if is_virtual else 's'}", "sent", zero=True)
    which = f", {num_drawn} of up to {most:,} at equal distances" if most > num_drawn else ""
    return figure.Chart(
        id="request-timeline",
        title=title,
        caption=f"Each bar is one request{which}, in s: grey until the first output, coloured while it decodes.",
        definition=(
            "Grey: from send to the first output, which is queueing and prefill. Coloured: from the first to the "
            "last output, which is decoding. A cross marks a request that failed. As the client saw it"
            + (", multiplied by time_scale to match the simulator's virtual time." if is_virtual else ".")
        ),
        spec=figure.picture(panels, rows, x, choices=choices),
        choices=choices,
    )


def _panels_of_requests(labels: Sequence[str], colors: figure.Spec, thickness: float) -> list[figure.Spec]:
    """The first arm, and below it the one that is chosen, where there is another; bars are ``thickness`` pixels."""
    tests = {"datum.is_first": labels[0], "!datum.is_first && datum.arm === arm": {"text": {"expr": "arm"}}}
    y = figure.axis("request no.", format="d")
    y["scale"] = {"reverse": True, "zero": False, "padding": thickness}
    encoding, layers = {**colors, "color": {**colors["color"], "legend": None}}, _bars(thickness)
    return [
        figure.panel(_PANEL_PX, y, layers, where=(figure.OF_BLOCK, test), encoding=encoding, title=title)
        for test, title in list(tests.items())[: len(labels)]
    ]


def _bars(thickness: float) -> list[figure.Spec]:
    bar: figure.Spec = {"y_by": "row", "strokeWidth": thickness}
    tip = (("id", "request"), ("sent", "sent, s", ".4~g"), ("first", "first output, s", ".4~g"))
    last = ("last", "last output, s", ".4~g")
    return [
        figure.layer("rule", x2_by="waited", color_by={"value": figure.GREY}, tip=tip, **bar),
        figure.layer("rule", where="isValid(datum.first)", x_by="first", x2_by="last", tip=(*tip, last), **bar),
        figure.layer(
            "point",
            where="isValid(datum.error)",
            x_by="waited",
            y_by="row",
            color_by={"value": figure.VERMILION},
            shape=figure.CROSS,
            strokeWidth=2.5,
            filled=False,
            tip=(("id", "request"), ("error", "error")),
        ),
    ]


def request_rows(run: RunSummary) -> list[figure.Row]:
    """All that were sent and are no warm-up, in the order of sending, in seconds since the first send.

    Seconds are those of the run's clock; ``waited`` is the end of the grey bar, ``first`` and ``last`` are None
    without any output.
    """
    sends = [(each.sent_ns, each.index, each) for each in measured(run.run.requests) if each.sent_ns is not None]
    sends.sort(key=lambda send: send[:2])
    rows: list[figure.Row] = []
    requests = [request for *_, request in sends]
    for request, answer in zip(requests, chunks_of(requests).answers, strict=True):
        times_ns = (answer.sent_ns, answer.first_ns, answer.last_ns)
        sent, first, last = (
            None if t_ns is None else (t_ns - sends[0][0]) * run.record.clock_factor / NS_PER_S for t_ns in times_ns
        )
        failure = "not answered to its end" if request.error is None else request.error.kind
        rows.append(
            {
                "row": len(rows) + 1,
                "id": request.request_id,
                "sent": sent,
                "waited": sent if first is None else first,
                "first": first,
                "last": first if last is None else last,
                "error": None if is_completed(request) else failure,
            }
        )
    return rows


def evenly(rows: Sequence[figure.Row], at_most: int) -> list[figure.Row]:
    """At most ``at_most`` of the rows at equal distances, first and last among them."""
    if len(rows) <= at_most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (at_most - 1))] for i in range(at_most)]


MAX_POINTS: Final = 300
"""Of the line of an arm or a device; a percentile between two points is off by at most their distance."""

Blocks = Sequence[tuple[str, Mapping[str, Sorted]]]
"""Name of each block, and its ascending values by latency."""


def draw_latencies(subject: figure.Subject) -> figure.Chart | None:
    """The distributions of all usable runs. None for forward passes, which have no requests."""
    if subject.analysis.passes is not None:
        return None
    arms = {
        arm.label: [(f"block {run.record.block}", run_latencies(run)) for run in arm.runs] for arm in subject.arms
    }
    return draw_distributions(arms, unit="block")


def draw_distributions(arms: Mapping[str, Blocks], unit: str) -> figure.Chart:
    """A thick line for each arm over all its blocks, a thin one for each; ``unit`` is the word for a block."""
    labels = list(arms)[: figure.MAX_SERIES]
    words: figure.Spec = {"id": "latencies", "title": "Latency distributions", "section": "latency"}
    of_blocks = [values for label in labels for _, values in arms[label]]
    names = [name for name in LATENCY_NAMES if any(name in values for values in of_blocks)]
    if not names:
        return figure.Chart(skipped="no finished run has the times of its requests", **words)
    num_lines = sum(name in values for name in names for values in of_blocks)
    most = max(20, min(100, 24_000 // num_lines))  # points of a block; all of them have 24,000
    rows = [
        {"latency": name, "arm": label, **row, unit: row["of"] or f"all {unit}s"}
        for name in names
        for label in labels
        for row in _lines([(block, values[name]) for block, values in arms[label] if name in values], most)
    ]
    options = tuple((name, LATENCY_NAMES[name]) for name in names)
    first = "tpot" if "tpot" in names else names[0]
    latency = figure.Choice(name="latency", label="Latency", options=options, selected=first)
    choices = (latency, figure.arm_choice(labels))
    tip = (("arm", "arm"), (unit, unit), ("ms", "at most, ms", ".4~g"), ("share", "share", ".1%"))
    line: figure.Spec = {"y_by": "share", "detail_by": "of", "tip": tip}
    panel = figure.panel(
        280,
        figure.axis("share at most so slow", domain=(0, 1), format="%"),
        [
            figure.layer("line", where="datum.of !== ''", strokeWidth=0.8, opacity=0.45, **line),
            figure.layer("line", where="datum.of === ''", strokeWidth=2.6, **line),
        ],
        where=("datum.latency === latency", figure.OF_ARM),
        encoding=figure.by_series(labels),
    )
    x = figure.axis("latency, ms", "ms")
    return figure.Chart(
        **words,
        caption=(
            f"Share of the completed requests (of gaps: of all gaps) with at most this latency in ms: a thick line "
            f"for each arm over all its {unit}s, a thin one for each {unit}."
        ),
        definition="; ".join(
            f"{name} = {METRICS[f'{name}_ms'].formula.removeprefix('mean of ')}" for name in names
        ),
        spec=figure.picture([panel], rows, x, choices=choices, legend=labels),
        choices=choices,
        has_log_switch=True,
    )


def _lines(of_blocks: Sequence[tuple[str, Sorted]], most: int) -> Iterator[figure.Row]:
    """The points of the lines of one arm: ``of`` is the block, or nothing for all of them."""
    lines = [(block, quantiles(values, most)) for block, values in of_blocks if len(of_blocks) > 1]
    if of_blocks:
        whole = np.sort(np.concatenate([values for _, values in of_blocks]))
        lines.append(("", quantiles(whole, MAX_POINTS)))
    for block, values in lines:
        shares = np.linspace(0, 1, len(values))
        for ms, share in zip(values.tolist(), shares.tolist(), strict=True):
            yield {"of": block, "ms": ms, "share": share}


def quantiles(values: Sorted, at_most: int) -> Sorted:
    """Quantiles of ascending values at equal steps from the smallest to the largest; all where they are few.

    A single value is given twice, as a step from 0 to 1.
    """
    num = min(max(2, len(values)), at_most)
    result: Sorted = np.interp(np.linspace(0, len(values) - 1, num), np.arange(len(values)), values)
    return result


Quantities = Mapping[str, tuple[str, float]]
"""Attribute of a sample and the unit of its values, by the title of their panel."""

_GPU: Final[Quantities] = {
    "power, W": ("power_w", 1),
    "SM clock, MHz": ("sm_clock_hz", HZ_PER_MHZ),
    "memory used, GiB": ("memory_used_bytes", GIB),
    "utilisation, %": ("utilization_frac", 0.01),
}
_HOST: Final[Quantities] = {
    "server CPU, cores": ("server_cpu_cores", 1),
    "client CPU, cores": ("client_cpu_cores", 1),
    "whole host CPU, %": ("host_cpu_frac", 0.01),
}


def draw_gpu(subject: figure.Subject) -> figure.Chart:
    """Readings of each GPU during the load, a line for each arm and device."""
    analysis = subject.analysis
    if any(_inside(run.run.gpu, run) for run in analysis.runs):
        reason = "the GPU reported neither power, clock, memory nor utilisation"
    elif gpu_names(machines_of(analysis.results)) or any(run.run.gpu for run in analysis.runs):
        reason = "no GPU sample was taken during the load"
    else:
        reason = "the measuring machine showed no GPU"
    words = {
        "id": "gpu",
        "title": "GPU over the run",
        "caption": "Reports of the GPU between first send and last output",
        "definition": "Readings of NVML or nvidia-smi; utilisation is the share of time in which any kernel ran.",
        "skipped": reason,
    }
    return _over_the_run(subject.arms, _GPU, lambda run: run.run.gpu, words)


def draw_host(subject: figure.Subject) -> figure.Chart:
    """Processor cores that the server, the client and the whole machine kept busy during the load."""
    words = {
        "id": "host-cpu",
        "title": "Processors over the run",
        "caption": "CPU cores that the server's processes and the load generator kept busy",
        "definition": "CPU time of the processes between two samples / time between them.",
        "skipped": "no run lasted long enough for two samples of the host during the load",
    }
    return _over_the_run(subject.arms, _HOST, lambda run: run.run.host, words, least=2)


def _over_the_run(
    arms: Sequence[CellSummary],
    quantities: Quantities,
    samples_of: Callable[[RunSummary], Sequence[Any]],
    words: figure.Spec,
    least: int = 1,
) -> figure.Chart:
    """A panel for each quantity that a run has ``least`` values of; ``words`` say why there is none."""
    lines = {
        run.record.run_id: _lines_of(_inside(samples_of(run), run), quantities, least)
        for arm in arms
        for run in arm.runs
    }
    blocks = figure.runs_by_block(arms, [run for arm in arms for run in arm.runs if lines[run.record.run_id]])
    if not blocks:
        return figure.Chart(id=words["id"], title=words["title"], skipped=words["skipped"], section="machine")
    runs = [run for runs in blocks.values() for run in runs]
    num_lines = sum(len(lines[run.record.run_id]) for run in runs)
    most = max(60, min(MAX_POINTS, 15_000 // num_lines))  # points of a line; all of them have 15,000
    rows: list[figure.Row] = [
        {
            "block": str(run.record.block),
            "arm": run.label,
            "quantity": title,
            "device": device,
            "time": (at_ns - (run.record.times.first_send_ns or 0)) / NS_PER_S,
            "value": value,
        }
        for run in runs
        for (title, device), points in lines[run.record.run_id].items()
        for at_ns, value in thinned(points, most)
    ]
    drawn = figure.labels_of(arms, blocks)
    devices = sorted({row["device"] for row in rows})
    encoding = figure.by_series([arm.label for arm in arms], drawn) | _by_device(devices)
    choices = (figure.block_choice(blocks), figure.arm_choice(drawn))
    tip = [("arm", "arm"), ("device", "device"), ("time", "at, s", ".4~g"), ("value", "value", ".4~g")]
    panels = [
        figure.panel(
            90,
            {**figure.axis(title, zero=True), "axis": {"tickCount": 4}},
            [figure.layer("line", y_by="value", strokeWidth=1.6, tip=tip)],
            where=(figure.OF_BLOCK, figure.OF_ARM, f"datum.quantity === '{title}'"),
            encoding=encoding,
        )
        for title in quantities
        if any(row["quantity"] == title for row in rows)
    ]
    x = figure.axis("time since the load began, s", "time", zero=True)
    return figure.Chart(
        id=words["id"],
        title=words["title"],
        caption=f"{words['caption']}; means of neighbours where a run has many samples.",
        definition=f"{words['definition']} Time is that of the client's clock, never multiplied.",
        spec=figure.picture(panels, rows, x, choices=choices, legend=[*drawn, *devices]),
        choices=choices,
        section="machine",
    )


def _by_device(devices: Sequence[str]) -> figure.Spec:
    """A line for each device, with a dash of its own where there are several."""
    encoding: figure.Spec = {"detail": {"field": "device"}}
    if len(devices) > 1:
        dashes = [figure.DASHES[i % len(figure.DASHES)] for i in range(len(devices))]
        scale = {"domain": devices, "range": dashes}
        encoding["strokeDash"] = {"field": "device", "type": "nominal", "title": None, "scale": scale}
    return encoding


def _inside(samples: Sequence[Any], run: RunSummary) -> list[Any]:
    """Samples between the first send and the last output."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None:
        return []
    return [sample for sample in samples if first_ns <= sample.t_ns <= last_ns]


Points = Sequence[tuple[float, float]]
"""Time in ns and value of each sample."""


def _lines_of(samples: Sequence[Any], quantities: Quantities, least: int) -> dict[tuple[str, str], Points]:
    """The points by title of the panel and name of the device; those of the host have none."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in samples:
        device = f"GPU {sample.index}" if hasattr(sample, "index") else ""
        for title, (name, unit) in quantities.items():
            if (value := getattr(sample, name)) is not None:
                lines.setdefault((title, device), []).append((sample.t_ns, value / unit))
    has_enough = any(len(points) >= least for points in lines.values())
    return dict(sorted(lines.items())) if has_enough else {}


def thinned(points: Points, at_most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Means of time and value over at most ``at_most`` groups of neighbours of equal number."""
    groups = np.array_split(np.asarray(points, dtype=np.float64), min(len(points), at_most)) if points else []
    return [(float(at), float(value)) for at, value in (group.mean(axis=0) for group in groups)]


CHARTS: Final = (draw_latencies, draw_requests, draw_gpu, draw_host)
"""In the order of the page."""
