"""The machine during a run: its GPUs, and the processors that server and client kept busy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchctl.analysis.summary.summary import RunSummary
from benchctl.analysis.validity.machines import gpu_names, machines_of
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of, runs_by_block
from benchctl.units import GIB, HZ_PER_MHZ, NS_PER_S

MAX_POINTS: Final = 300
_LEAST_POINTS: Final = 60
_MAX_POINTS_OF_ALL: Final = 15_000
_PANEL_PX: Final = 90

Points = Sequence[tuple[float, float]]
"""Time in ns and value of each sample."""
Quantities = Mapping[str, Callable[[Any], float | None]]
"""The value in a sample, by the title of its panel; None where the device does not report it."""


def _per(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


_GPU: Final[Quantities] = {
    "power, W": lambda sample: sample.power_w,
    "SM clock, MHz": lambda sample: _per(sample.sm_clock_hz, HZ_PER_MHZ),
    "memory used, GiB": lambda sample: _per(sample.memory_used_bytes, GIB),
    "utilisation, %": lambda sample: _per(sample.utilization_frac, 0.01),
}
_HOST: Final[Quantities] = {
    "server CPU, cores": lambda sample: sample.server_cpu_cores,
    "client CPU, cores": lambda sample: sample.client_cpu_cores,
    "whole host CPU, %": lambda sample: _per(sample.host_cpu_frac, 0.01),
}


def draw_gpu(source: figure.ChartSource) -> figure.Chart:
    """Readings of each GPU during the load, a line for each arm and device."""
    analysis = source.analysis
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
    }
    return _chart(source, _GPU, lambda run: run.run.gpu, words, reason)


def draw_host(source: figure.ChartSource) -> figure.Chart:
    """Processor cores that the server, the client and the whole machine kept busy during the load."""
    words = {
        "id": "host-cpu",
        "title": "Processors over the run",
        "caption": "CPU cores that the server's processes and the load generator kept busy",
        "definition": "CPU time of the processes between two samples / time between them.",
    }
    reason = "no run lasted long enough for two samples of the host during the load"
    return _chart(source, _HOST, lambda run: run.run.host, words, reason, least=2)


def _chart(
    source: figure.ChartSource,
    quantities: Quantities,
    samples_of: Callable[[RunSummary], Sequence[Any]],
    words: Mapping[str, str],
    reason: str,
    least: int = 1,
) -> figure.Chart:
    """A panel for each quantity that a run has ``least`` values of; ``reason`` is why there is none."""
    arms = arms_of(source.analysis)
    lines = {
        run.record.run_id: each
        for arm in arms
        for run in arm.runs
        if (each := _lines_of(_inside(samples_of(run), run), quantities, least))
    }
    sampled = [run for arm in arms for run in arm.runs if run.record.run_id in lines]
    blocks = runs_by_block(arms, sampled)
    if not blocks:
        return figure.Chart(id=words["id"], title=words["title"], skipped=reason, is_of_machine=True)
    runs = [run for runs in blocks.values() for run in runs]
    num_lines = sum(len(lines[run.record.run_id]) for run in runs)
    most = max(_LEAST_POINTS, min(MAX_POINTS, _MAX_POINTS_OF_ALL // num_lines))
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
    labels = [arm.label for arm in arms]
    drawn = [label for label in labels if any(run.label == label for run in runs)]
    devices = sorted({row["device"] for row in rows})
    encoding = {**figure.by_series(labels, drawn), "detail": {"field": "device"}}
    if len(devices) > 1:
        dashes = [figure.DASHES[i % len(figure.DASHES)] for i in range(len(devices))]
        scale = {"domain": devices, "range": dashes}
        encoding["strokeDash"] = {"field": "device", "type": "nominal", "title": None, "scale": scale}
    choices = (figure.block_choice(blocks, next(iter(blocks))), figure.arm_choice(drawn))
    titles = [title for title in quantities if any(row["quantity"] == title for row in rows)]
    tip = [("arm", "arm"), ("device", "device"), ("time", "at, s", ".4~g"), ("value", "value", ".4~g")]
    panels = [
        figure.panel(
            _PANEL_PX,
            {**figure.axis(title, zero=True), "axis": {"tickCount": 4}},
            [figure.layer("line", y_by="value", strokeWidth=1.6, tip=tip)],
            where=(figure.OF_BLOCK, figure.OF_ARM, f"datum.quantity === '{title}'"),
            encoding=encoding,
        )
        for title in titles
    ]
    return figure.Chart(
        id=words["id"],
        title=words["title"],
        caption=f"{words['caption']}; means of neighbours where a run has many samples.",
        definition=f"{words['definition']} Time is that of the client's clock, never multiplied.",
        spec=figure.picture(
            panels,
            rows,
            figure.axis("time since the load began, s", "time", zero=True),
            choices=choices,
            legend=[*drawn, *devices],
        ),
        choices=choices,
        is_of_machine=True,
    )


def _inside(samples: Sequence[Any], run: RunSummary) -> list[Any]:
    """Samples between the first send and the last output."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None:
        return []
    return [sample for sample in samples if first_ns <= sample.t_ns <= last_ns]


def _lines_of(samples: Sequence[Any], quantities: Quantities, least: int) -> dict[tuple[str, str], Points]:
    """The points by title of the panel and name of the device; those of the host have none."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in samples:
        device = f"GPU {sample.index}" if hasattr(sample, "index") else ""
        for title, of in quantities.items():
            if (value := of(sample)) is not None:
                lines.setdefault((title, device), []).append((sample.t_ns, value))
    has_enough = any(len(points) >= least for points in lines.values())
    return dict(sorted(lines.items())) if has_enough else {}


def thinned(points: Points, at_most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Means of time and value over at most ``at_most`` groups of neighbours of equal number."""
    groups = np.array_split(np.asarray(points, dtype=np.float64), min(len(points), at_most)) if points else []
    return [(float(at), float(value)) for at, value in (group.mean(axis=0) for group in groups)]
