"""The machine during a run: its GPUs, and the processors that server and client kept busy.

The requests over the run, one bar each: waiting, then answered.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np

from benchctl.analysis.metrics.latency import first_token_ns, is_completed, last_token_ns, measured
from benchctl.analysis.summary.summary import RunSummary
from benchctl.analysis.validity.machines import gpu_names, machines_of
from benchctl.records.record import RequestRecord
from benchctl.records.schema import GpuSample, HostSample
from benchctl.report.charts import figure
from benchctl.report.charts.figure import GREY, VERMILION, ArmStyle, arm_styles, runs_by_block
from benchctl.units import GIB, HZ_PER_MHZ, NS_PER_S

MAX_POINTS: Final = 300
_LEAST_POINTS: Final = 60
_MAX_POINTS_OF_ALL: Final = 15_000
_PANEL_PX: Final = 130
_REST_PX: Final = 70
_DEVICE_DASHES: Final = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot")

Points: TypeAlias = Sequence[tuple[int, float]]
"""Time in ns and value of each sample."""


S = TypeVar("S", GpuSample, HostSample)


@dataclass(frozen=True, slots=True)
class Quantity(Generic[S]):
    """One panel, and its value in a sample; None where the device does not report it."""

    title: str
    of: Callable[[S], float | None]


def _per(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


_GPU: Final[tuple[Quantity[GpuSample], ...]] = (
    Quantity("power, W", lambda sample: sample.power_w),
    Quantity("SM clock, MHz", lambda sample: _per(sample.sm_clock_hz, HZ_PER_MHZ)),
    Quantity("memory used, GiB", lambda sample: _per(sample.memory_used_bytes, GIB)),
    Quantity("utilisation, %", lambda sample: _per(sample.utilization_frac, 0.01)),
)
_HOST: Final[tuple[Quantity[HostSample], ...]] = (
    Quantity("server CPU, cores", lambda sample: sample.server_cpu_cores),
    Quantity("client CPU, cores", lambda sample: sample.client_cpu_cores),
    Quantity("whole host CPU, %", lambda sample: _per(sample.host_cpu_frac, 0.01)),
)


def draw_gpu(source: figure.ChartSource) -> figure.Chart:
    """Readings of each GPU during the load, a line for each arm and device."""
    chart_id, title = "gpu", "GPU over the run"
    arms = arm_styles(source.analysis)
    sampled = [run for arm in arms for run in arm.cell.runs if _inside(run.run.gpu, run)]
    blocks = runs_by_block(arms, sampled)
    if not blocks:
        had_gpus = gpu_names(machines_of(source.analysis.results)) or any(
            run.run.gpu for run in source.analysis.runs
        )
        reason = "no GPU sample was taken during the load" if had_gpus else "the measuring machine showed no GPU"
        return figure.no_chart(chart_id, title, reason)
    samples = {
        (block, arm.label, device): of_device
        for block, runs in blocks.items()
        for arm, run in runs
        for device, of_device in _by_device(_inside(run.run.gpu, run)).items()
    }
    quantities = [quantity for quantity in _GPU if any(_points(s, quantity.of) for s in samples.values())]
    if not quantities:
        return figure.no_chart(chart_id, title, "the GPU reported neither power, clock, memory nor utilisation")
    devices = {device for _, _, device in samples}
    most = _points_of_each(len(samples) * len(quantities))
    lines = [
        (
            arm,
            block,
            _line(
                arm,
                _points(samples[block, arm.label, device], quantity.of),
                _first_send_ns(run),
                panel=panel,
                device=device if len(devices) > 1 else None,
                at_most=most,
            ),
        )
        for panel, quantity in enumerate(quantities)
        for block, runs in blocks.items()
        for arm, run in runs
        for device in sorted(devices)
        if (block, arm.label, device) in samples
    ]
    return _chart(
        chart_id,
        title,
        [quantity.title for quantity in quantities],
        lines,
        caption="Reports of the GPU between first send and last output",
        definition="Readings of NVML or nvidia-smi; utilisation is the share of time in which any kernel ran.",
    )


def draw_host(source: figure.ChartSource) -> figure.Chart:
    """Processor cores that the server, the client and the whole machine kept busy during the load."""
    chart_id, title = "host-cpu", "Processors over the run"
    arms = arm_styles(source.analysis)
    sampled = [
        run
        for arm in arms
        for run in arm.cell.runs
        if any(len(_points(_inside(run.run.host, run), quantity.of)) > 1 for quantity in _HOST)
    ]
    blocks = runs_by_block(arms, sampled)
    if not blocks:
        return figure.no_chart(
            chart_id, title, "no run lasted long enough for two samples of the host during the load"
        )
    samples = [
        (block, arm, _inside(run.run.host, run), _first_send_ns(run))
        for block, runs in blocks.items()
        for arm, run in runs
    ]
    quantities = [q for q in _HOST if any(_points(inside, q.of) for _, _, inside, _ in samples)]
    most = _points_of_each(len(samples) * len(quantities))
    lines = [
        (arm, block, _line(arm, _points(inside, quantity.of), origin_ns, panel=panel, at_most=most))
        for panel, quantity in enumerate(quantities)
        for block, arm, inside, origin_ns in samples
    ]
    return _chart(
        chart_id,
        title,
        [quantity.title for quantity in quantities],
        lines,
        caption="CPU cores that the server's processes and the load generator kept busy",
        definition="CPU time of the processes between two samples / time between them.",
    )


def _points_of_each(num_lines: int) -> int:
    """Points of a line, so that all lines of a chart together stay small."""
    return max(_LEAST_POINTS, min(MAX_POINTS, _MAX_POINTS_OF_ALL // max(1, num_lines)))


def thinned(points: Points, at_most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Means of time and value over at most ``at_most`` groups of neighbours of equal number."""
    groups = np.array_split(np.asarray(points, dtype=np.float64), min(len(points), at_most)) if points else []
    return [(float(at), float(value)) for at, value in (group.mean(axis=0) for group in groups)]


def _chart(
    chart_id: str,
    title: str,
    panel_names: Sequence[str],
    lines: Sequence[tuple[ArmStyle, int, figure.Trace]],
    *,
    caption: str,
    definition: str,
) -> figure.Chart:
    """``lines`` belong to an arm and a block; the first is of the block that is shown at first."""
    named: set[tuple[int, str]] = set()
    data = []
    for arm, block, trace in lines:
        entry = block, trace["name"]
        meta = {"block": str(block), "arm": arm.label}
        data.append({**trace, "showlegend": entry not in named, "meta": meta})
        named.add(entry)
    height = _REST_PX + _PANEL_PX * len(panel_names) + figure.legend_px(sorted({name for _, name in named}))
    chart = figure.drawn(
        chart_id,
        title,
        data,
        figure.layout(
            height,
            **figure.panels(
                figure.axis("time since the load began, s", rangemode="tozero"),
                [figure.axis(name.replace(", ", ",<br>"), rangemode="tozero", nticks=4) for name in panel_names],
                gap_frac=0.04,
            ),
        ),
        caption=f"{caption}; means of neighbours where a run has many samples.",
        definition=f"{definition} Time is that of the client's clock, never multiplied.",
        choices=(
            figure.block_choice((block for _, block, _ in lines), lines[0][1]),
            figure.arm_choice(list(dict.fromkeys(arm.label for arm, _, _ in lines))),
        ),
    )
    return replace(chart, is_of_machine=True)


def _inside(samples: Iterable[S], run: RunSummary) -> list[S]:
    """Samples between the first send and the last output."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None:
        return []
    return [sample for sample in samples if first_ns <= sample.t_ns <= last_ns]


def _points(samples: Iterable[S], of: Callable[[S], float | None]) -> list[tuple[int, float]]:
    return [(sample.t_ns, value) for sample in samples if (value := of(sample)) is not None]


def _by_device(samples: Iterable[GpuSample]) -> Mapping[int, list[GpuSample]]:
    devices: defaultdict[int, list[GpuSample]] = defaultdict(list)
    for sample in samples:
        devices[sample.index].append(sample)
    return dict(sorted(devices.items()))


def _line(
    arm: ArmStyle, points: Points, origin_ns: int, *, panel: int, at_most: int, device: int | None = None
) -> figure.Trace:
    """``device`` is the number of one of several GPUs."""
    means = thinned([(at_ns - origin_ns, value) for at_ns, value in points], at_most)
    name = arm.label if device is None else f"{arm.label}, GPU {device}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(means) < 30 else "lines",
        "name": name,
        "legendgroup": name,
        "x": figure.rounded(at_ns / NS_PER_S for at_ns, _ in means),
        "y": figure.rounded((value for _, value in means), 5),
        "yaxis": figure.panel_axis(panel),
        "line": {
            "color": arm.color,
            "dash": arm.dash if device is None else _DEVICE_DASHES[device % len(_DEVICE_DASHES)],
            "width": 1.6,
        },
        "marker": {"size": 5},
        "hovertemplate": "%{x:.4~g} s: %{y:.4~g}",
    }


def _first_send_ns(run: RunSummary) -> int:
    return run.record.times.first_send_ns or 0


MAX_REQUESTS: Final = 200
_LEAST_REQUESTS: Final = 50
_MAX_BARS: Final = 8_000
"""Of all runs; where they have more, each run shows fewer requests."""
_REQUESTS_PANEL_PX: Final = 150
_GAP_PX: Final = 36
_REQUESTS_REST_PX: Final = 90
_ID: Final = "request-timeline"
_TITLE: Final = "Requests over the run"


@dataclass(frozen=True, slots=True)
class Span:
    """One request, in seconds since the first send: sent, first output, end of its last output."""

    row: int
    """Position in the order of sending, from 1."""
    request_id: str
    sent_s: float
    first_s: float | None
    """None without any output."""
    last_s: float | None
    error: str | None


def spans_of(requests: Sequence[RequestRecord], time_scale: float = 1.0) -> tuple[Span, ...]:
    """All that were sent and are no warm-up, in the order of sending; times multiplied by ``time_scale``."""
    sends = [(request.sent_ns, request) for request in measured(requests) if request.sent_ns is not None]
    sent = sorted(sends, key=lambda pair: (pair[0], pair[1].index))
    origin_ns = sent[0][0] if sent else 0

    def seconds(t_ns: int | None) -> float | None:
        return None if t_ns is None else (t_ns - origin_ns) * time_scale / NS_PER_S

    return tuple(
        Span(
            row=i,
            request_id=request.request_id,
            sent_s=(sent_ns - origin_ns) * time_scale / NS_PER_S,
            first_s=seconds(first_token_ns(request)),
            last_s=seconds(last_token_ns(request)),
            error=None
            if is_completed(request)
            else "not answered to its end"
            if request.error is None
            else request.error.kind,
        )
        for i, (sent_ns, request) in enumerate(sent, start=1)
    )


def evenly(spans: Sequence[Span], at_most: int = MAX_REQUESTS) -> tuple[Span, ...]:
    """At most ``at_most`` of the spans at equal distances, first and last among them."""
    if len(spans) <= at_most:
        return tuple(spans)
    return tuple(spans[round(i * (len(spans) - 1) / (at_most - 1))] for i in range(at_most))


def draw_requests(source: figure.ChartSource) -> figure.Chart | None:
    """A panel for the first arm and one for another, from the runs of one block.

    Block and other arm can be chosen; at first the block is the one that most arms finished. None for forward
    passes, which have no requests.
    """
    if source.analysis.passes is not None:
        return None
    arms = arm_styles(source.analysis)
    sent = [run for arm in arms for run in arm.cell.runs if spans_of(run.run.requests)]
    blocks = runs_by_block(arms, sent)
    if not blocks:
        return figure.no_chart(_ID, _TITLE, "no finished run has a request that was sent")
    first_block, runs = next(iter(blocks.items()))
    labels = list(dict.fromkeys(arm.label for runs in blocks.values() for arm, _ in runs))
    is_virtual = any(run.record.clock == "virtual" for _, run in runs)
    num_drawn = max(_LEAST_REQUESTS, min(MAX_REQUESTS, _MAX_BARS // sum(map(len, blocks.values()))))
    return figure.drawn(
        _ID,
        _TITLE,
        [
            {**trace, "meta": _meta(block, arm.label, labels)}
            for block, runs in blocks.items()
            for arm, run in runs
            for trace in _traces(
                arm,
                evenly(spans_of(run.run.requests, run.record.clock_factor), num_drawn),
                panel=min(1, labels.index(arm.label)),
            )
        ],
        _layout(labels, is_virtual=is_virtual),
        caption=_caption([run for runs in blocks.values() for _, run in runs], num_drawn),
        definition=(
            "Grey: from send to the first output, which is queueing and prefill. Coloured: from the first to the "
            "last output, which is decoding. A cross marks a request that failed. As the client saw it"
            + (", multiplied by time_scale to match the simulator's virtual time." if is_virtual else ".")
        ),
        choices=(figure.block_choice(blocks, first_block), _other_arm(labels)),
    )


def _other_arm(labels: Sequence[str]) -> figure.Choice:
    """The selector of the arm in the lower panel; without an option where there is no other."""
    others = tuple((label, label) for label in labels[1:])
    return figure.Choice(name="arm", label=f"Below {labels[0]}", options=others, selected=labels[-1])


def _meta(block: int, label: str, labels: Sequence[str]) -> Mapping[str, str]:
    """The options that a trace is shown with: those of the first arm with any other arm."""
    return {"block": str(block)} if label == labels[0] else {"block": str(block), "arm": label}


def _layout(labels: Sequence[str], *, is_virtual: bool) -> Mapping[str, Any]:
    num_panels = min(2, len(labels))
    height = _REQUESTS_REST_PX + _REQUESTS_PANEL_PX * num_panels
    time = figure.axis("time since the first send, " + ("virtual s" if is_virtual else "s"))
    requests = figure.axis("request no.", autorange="reversed", tickformat="d", nticks=5)
    titles = [
        {**title, "meta": {"arm": label}}
        for label in labels[1:]
        for title in figure.panel_titles([labels[0], label])[1:]
    ]
    return figure.layout(
        height,
        margin={"l": 8, "r": 12, "t": _GAP_PX, "b": 8},
        barmode="overlay",
        **figure.panels(time, [requests] * num_panels, gap_frac=_GAP_PX / height),
        annotations=[*figure.panel_titles(labels[:1]), *titles],
    )


def _caption(runs: Sequence[RunSummary], num_drawn: int) -> str:
    most = max(len(spans_of(run.run.requests)) for run in runs)
    which = "Each bar is one request"
    if most > num_drawn:
        which = f"Each bar is one request, {num_drawn} of up to {most:,} at equal distances"
    return f"{which}, in s: grey until the first output, coloured while it decodes."


def _traces(arm: ArmStyle, spans: Sequence[Span], *, panel: int) -> list[figure.Trace]:
    waits = [(span, span.sent_s if span.first_s is None else span.first_s) for span in spans]
    decodes = [(span, span.first_s, span.last_s) for span in spans if span.first_s is not None]
    failed = [(span, end_s) for span, end_s in waits if span.error is not None]
    traces = [
        _bars(
            GREY,
            [span for span, _ in waits],
            [span.sent_s for span, _ in waits],
            [end_s - span.sent_s for span, end_s in waits],
            "%{text}, from %{base:.4~g} s: first output after %{x:.4~g} s",
        ),
        _bars(
            arm.color,
            [span for span, _, _ in decodes],
            [first_s for _, first_s, _ in decodes],
            [(first_s if last_s is None else last_s) - first_s for _, first_s, last_s in decodes],
            "request %{y}, from %{base:.4~g} s: decoded for %{x:.4~g} s",
        ),
    ]
    if failed:
        traces.append(_crosses(failed))
    return [{**trace, "yaxis": figure.panel_axis(panel)} for trace in traces]


def _bars(
    hex_color: str, spans: Sequence[Span], base: Sequence[float], width: Sequence[float], what: str
) -> figure.Trace:
    ids = {"text": [span.request_id for span in spans], "textposition": "none"} if "%{text}" in what else {}
    return {
        "type": "bar",
        "orientation": "h",
        "base": figure.rounded(base, 7),
        "x": figure.rounded(width, 7),
        "y": [span.row for span in spans],
        **ids,
        "width": 0.9 * (spans[-1].row - spans[0].row + 1) / len(spans) if spans else None,
        "marker": {"color": hex_color, "line": {"width": 0}},
        "hovertemplate": f"{what}<extra></extra>",
        "showlegend": False,
    }


def _crosses(failed: Sequence[tuple[Span, float]]) -> figure.Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": figure.rounded(end_s for _, end_s in failed),
        "y": [span.row for span, _ in failed],
        "text": [f"{span.request_id}: {span.error}" for span, _ in failed],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "size": 9, "color": VERMILION, "line": {"width": 1, "color": "#ffffff"}},
        "showlegend": False,
    }
