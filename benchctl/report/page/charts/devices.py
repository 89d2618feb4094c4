"""The machine during a run: its GPUs, and the processors that server and client kept busy."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from benchctl.analysis.summary.runs import RunSummary
from benchctl.analysis.validity.comparability.machines import gpu_names, machines_of
from benchctl.records.samples import GpuSample, HostSample
from benchctl.report.charts.arms import ArmStyle, arm_styles, runs_by_block
from benchctl.report.page.charts import figure
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
