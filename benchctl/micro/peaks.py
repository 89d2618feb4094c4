"""The peaks of a device: measured and judged, and the least time of a forward pass that follows from them."""

import datetime as dt
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.model_shape import ModelShape
from benchctl.costs.roofline import forward_flops, roofline_ns, weight_read_bytes
from benchctl.errors import UsageError
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.micro.worker import ELEMENT_BYTES, WorkerInfo, WorkerSettings, find_torch_python, started_worker
from benchctl.profile.choices import DataType, ForwardPoint
from benchctl.records.peaks import (
    QUANTITIES,
    MeasuredPeaks,
    PeakSeries,
    bandwidth_bytes_per_s,
    best_series,
    data_sheet,
    hardware_of,
)
from benchctl.records.schema import SCHEMA_VERSION, ResultWarning
from benchctl.units import GIGA, MIB, TERA, US_PER_S, four_digits, percentage

MEASURED_SHARE: Final = 0.7
"""Measured peaks vary from day to day, on a virtual machine by a quarter."""
LEAST_CACHES: Final = 4
"""Buffers of so many last-level caches at least measure the memory."""
_CACHES: Final = 8
"""Buffers are as many times the last-level cache."""
_MOST_MEMORY: Final = 8
"""A buffer takes no more of the device's free memory than 1 / 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The device that passes are held against, and its last cache."""

    hardware: Hardware
    cache_bytes: int = 0
    """0 where it is unknown: every pass then reads from memory."""
    is_measured: bool = False
    """The peaks were reached by kernels, and are not those of a data sheet."""

    def floor_ns(self, shape: ModelShape, point: ForwardPoint, dtype: DataType) -> int:
        """Nanoseconds in which no such pass ends."""
        num_bytes = pass_bytes(shape, point, dtype)
        if num_bytes <= self.cache_bytes:
            num_bytes = 0
        least_ns = roofline_ns(pass_flops(shape, point), num_bytes, self.hardware)
        return round(least_ns * MEASURED_SHARE) if self.is_measured else least_ns


def pass_bytes(shape: ModelShape, point: ForwardPoint, dtype: DataType) -> int:
    """Weights of all projections and the head once, and keys and values of all tokens in the cache."""
    element_bytes = ELEMENT_BYTES[dtype]
    tokens = point.batch_size * (point.context_tokens + point.new_tokens)
    return weight_read_bytes(shape, element_bytes) + tokens * shape.kv_bytes_per_token(element_bytes)


def pass_flops(shape: ModelShape, point: ForwardPoint) -> float:
    """Two for each weight and token, attention over all that a token sees, and the head at one token a sequence."""
    new, context = point.new_tokens, point.context_tokens
    positions = point.batch_size * (new * context + new * (new + 1) // 2)
    is_decode = point.phase == "decode"
    return forward_flops(
        shape,
        float(point.total_new_tokens),
        0.0 if is_decode else float(positions),
        float(point.batch_size),
        decode_positions=float(positions) if is_decode else 0.0,
    )


def peaks_of_device(info: WorkerInfo, measured: MeasuredPeaks | None) -> Peaks | None:
    """The peaks of the device that a worker describes; None where no bound is known.

    A data sheet is a bound, and comes first. Of ``measured`` peaks the fastest round counts, in whatever arithmetic
    it was; those of a busy machine bound nothing.
    """
    hardware = hardware_or_none(info.device_name)
    if hardware is not None:
        return Peaks(hardware=hardware, cache_bytes=info.cache_bytes or 0)
    if measured is None or measured.was_busy:
        return None
    fastest = replace(
        hardware_of(measured),
        peak_flops_per_s=max(max(each.values) for each in measured.series if each.quantity == "matmul"),
        bandwidth_bytes_per_s=max(
            max(each.values) for each in measured.series if each.quantity in {"copy", "read"}
        ),
    )
    return Peaks(hardware=fastest, cache_bytes=measured.cache_bytes or info.cache_bytes or 0, is_measured=True)


def peak_warnings(peaks: MeasuredPeaks) -> tuple[ResultWarning, ...]:
    """Every limit of a measurement, the gravest first."""
    return (*_above_data_sheet(peaks), *_of_cache(peaks), *_unsteady(peaks), *_busy(peaks))


def data_sheet_peaks(peaks: MeasuredPeaks) -> dict[tuple[str, str | None], float]:
    """The data sheet's figure for each quantity and arithmetic that it states; nothing without a data sheet."""
    sheet = data_sheet(peaks)
    if sheet is None:
        return {}
    rates = {"bfloat16": sheet.peak_flops_per_s, "float16": sheet.peak_flops_per_s}
    faster = {"fp8": sheet.fp8_flops_per_s, "int8": sheet.int8_flops_per_s}
    rates |= {dtype: rate for dtype, rate in faster.items() if rate is not None}
    figures: dict[tuple[str, str | None], float] = {("matmul", dtype): rate for dtype, rate in rates.items()}
    return figures | {("copy", None): sheet.bandwidth_bytes_per_s, ("read", None): sheet.bandwidth_bytes_per_s}


def _above_data_sheet(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    sheet, figures = data_sheet(peaks), data_sheet_peaks(peaks)
    for series in best_of_each(peaks):
        figure = figures.get((series.quantity, series.dtype))
        # A measured peak may be so much above the data sheet's, which rounds clocks
        if sheet is None or figure is None or series.median <= figure * (1 + 0.03):
            continue
        name = name_of(series)
        unit, scale = ("TFLOP/s", TERA) if series.quantity == "matmul" else ("GB/s", GIGA)
        yield ResultWarning(
            code="peak-above-data-sheet",
            message=(
                f"{name} of {four_digits(series.median / scale)} {unit} is "
                f"{percentage(series.median / figure - 1)} above the {four_digits(figure / scale)} of "
                f"{sheet.name}'s data sheet ({sheet.source}): the device is another one, or the kernel did less "
                "than it should; do not use these peaks"
            ),
            where=name,
        )


def _of_cache(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    if peaks.cache_bytes is not None and peaks.buffer_bytes < LEAST_CACHES * peaks.cache_bytes:
        yield ResultWarning(
            code="peak-of-cache",
            message=(
                f"the buffers of {four_digits(peaks.buffer_bytes / MIB)} MiB are less than {LEAST_CACHES} times "
                f"the last-level cache of {four_digits(peaks.cache_bytes / MIB)} MiB: part of the "
                f"{four_digits(bandwidth_bytes_per_s(peaks) / GIGA)} GB/s are the cache's; measure with larger "
                "buffers (--buffer-mb)"
            ),
            where="bandwidth",
        )


def _unsteady(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    for series in best_of_each(peaks):
        # Range of the middle half of the rounds, over their median
        if series.spread_frac > 0.10:
            name = name_of(series)
            yield ResultWarning(
                code="peak-unsteady",
                message=(
                    f"the middle half of the {len(series.values)} rounds of {name} covers "
                    f"{percentage(series.spread_frac)} of their median: other programs, clocks or the place of the "
                    "memory changed between them; measure again, on an idle machine if this one was not"
                ),
                where=name,
            )


def _busy(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    if peaks.busy_frac is not None and peaks.busy_frac > 0.10:
        yield ResultWarning(
            code="peak-on-busy-machine",
            message=(
                f"other programs used {percentage(peaks.busy_frac)} of the cores at the start: peaks of a CPU and "
                "launches of a GPU are too low; end them, and measure again"
            ),
        )


def best_of_each(peaks: MeasuredPeaks) -> tuple[PeakSeries, ...]:
    """The series that each peak is taken from, in the order of measurement; every way of launching is one."""
    keys = dict.fromkeys((each.quantity, each.dtype) for each in peaks.series if each.quantity != "launch")
    best = [best_series(peaks, quantity, dtype) for quantity, dtype in keys]
    launches = [each for each in peaks.series if each.quantity == "launch"]
    return (*(each for each in best if each is not None), *launches)


def name_of(series: PeakSeries) -> str:
    """The quantity, with its arithmetic if it has one."""
    return series.quantity if series.dtype is None else f"{series.quantity} {series.dtype}"


def unit_of(series: PeakSeries) -> tuple[str, float]:
    """The unit that people read a value in, and its size."""
    if series.quantity == "matmul":
        return ("TFLOP/s", TERA) if series.median >= TERA else ("GFLOP/s", GIGA)
    return ("us", 1 / US_PER_S) if QUANTITIES[series.quantity] == "s" else ("GB/s", GIGA)


def measure_roofline(
    device: str | None = None, python: Path | None = None, threads: int | None = None, **effort: Any
) -> MeasuredPeaks:
    """Measure one device of this machine: ``cpu``, ``cuda:N``, or by default the first GPU or else the CPU.

    ``threads`` are those of a CPU, by default one on each core that may be used; ``effort`` is that of
    ``inside.peaks.measure_peaks``. Raises UsageError and EngineUnavailableError as ``started_worker`` does.
    """
    device = device or ("cuda:0" if gpu_inventory() else "cpu")
    # Time over which the use of the machine by others is observed
    busy_frac = psutil.cpu_percent(0.5) / 100
    settings = WorkerSettings(python=str(find_torch_python(python)), device=device, threads=threads)
    with started_worker(settings) as worker:
        effort["buffer_bytes"] = effort.get("buffer_bytes") or default_buffer_bytes(worker.info)
        return judged_peaks(worker.info, worker.ask(**effort), busy_frac=busy_frac)


def default_buffer_bytes(info: WorkerInfo) -> int:
    """Bytes of the buffers of copies and sums: well beyond the last-level cache, and a part of what is free."""
    least_bytes = {"cpu": 256 * MIB, "cuda": 2048 * MIB}[info.device.partition(":")[0]]
    return min(max(_CACHES * (info.cache_bytes or 0), least_bytes), info.free_bytes // _MOST_MEMORY)


def judged_peaks(info: WorkerInfo, answer: dict[str, object], *, busy_frac: float | None) -> MeasuredPeaks:
    """The answer of a worker as peaks of this machine, with the warnings about them.

    Raises UsageError where no product or neither copy nor read could be measured.
    """
    is_cpu = info.device == "cpu"
    about = {
        "schema_version": SCHEMA_VERSION,
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "host": platform.node(),
        "kind": "cpu" if is_cpu else "cuda",
        "device": info.device_name,
        "threads": info.num_threads if is_cpu else None,
        "memory_bytes": info.total_bytes,
        "cache_bytes": info.cache_bytes,
        "torch_version": info.torch_version,
        "cuda_version": info.cuda_version,
        "float32_precision": info.float32_precision,
        "busy_frac": busy_frac,
    }
    try:
        peaks = msgspec.convert(answer | about, MeasuredPeaks)
    except msgspec.ValidationError as error:
        unmeasured = msgspec.convert(answer["unmeasured"], dict[str, str])
        reasons = "; ".join(f"{dtype}: {reason}" for dtype, reason in unmeasured.items())
        raise UsageError(
            f"the peaks of {info.device_name} are incomplete: {error}; "
            f"{reasons or 'ask for more arithmetic with --dtype'}"
        ) from error
    return msgspec.structs.replace(peaks, warnings=peak_warnings(peaks))
