"""Limits on the use of measured peaks: what no device can reach, what is a cache's, what is not steady."""

from collections.abc import Iterator
from typing import Final

from benchctl.costs.hardware import Hardware
from benchctl.records.peaks import (
    QUANTITIES,
    MeasuredPeaks,
    PeakSeries,
    bandwidth_bytes_per_s,
    best_series,
    data_sheet,
    product_flops_per_s,
)
from benchctl.records.schema import ResultWarning
from benchctl.units import GIGA, MIB, TERA, US_PER_S, four_digits, percentage

ABOVE_SHEET_FRAC: Final = 0.03
"""A measured peak may be so much above the data sheet's, which rounds clocks."""
UNSTEADY_FRAC: Final = 0.10
"""Range of the middle half of the rounds, over their median."""
BUSY_FRAC: Final = 0.10
LEAST_CACHES: Final = 4


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
    sheet = data_sheet(peaks)
    for (quantity, dtype), figure in data_sheet_peaks(peaks).items():
        measured = _measured(peaks, quantity, dtype)
        if sheet is None or measured is None or measured <= figure * (1 + ABOVE_SHEET_FRAC):
            continue
        unit, scale = ("TFLOP/s", TERA) if quantity == "matmul" else ("GB/s", GIGA)
        message = (
            f"{_name(quantity, dtype)} of {four_digits(measured / scale)} {unit} is "
            f"{percentage(measured / figure - 1)} above the {four_digits(figure / scale)} of {_source(sheet)}: the "
            "device is another one, or the kernel did less than it should; do not use these peaks"
        )
        yield ResultWarning(code="peak-above-data-sheet", message=message, where=_name(quantity, dtype))


def _source(sheet: Hardware) -> str:
    return f"{sheet.name}'s data sheet ({sheet.source})"


def _measured(peaks: MeasuredPeaks, quantity: str, dtype: str | None) -> float | None:
    if dtype is not None:
        return product_flops_per_s(peaks, dtype)
    series = [each for each in peaks.series if each.quantity == quantity]
    return max((each.median for each in series), default=None)


def _of_cache(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    if peaks.cache_bytes is not None and peaks.buffer_bytes < LEAST_CACHES * peaks.cache_bytes:
        message = (
            f"the buffers of {four_digits(peaks.buffer_bytes / MIB)} MiB are less than {LEAST_CACHES} times the "
            f"last-level cache of {four_digits(peaks.cache_bytes / MIB)} MiB: part of the "
            f"{four_digits(bandwidth_bytes_per_s(peaks) / GIGA)} GB/s are the cache's; measure with larger buffers "
            "(--buffer-mb)"
        )
        yield ResultWarning(code="peak-of-cache", message=message, where="bandwidth")


def _unsteady(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    for series in best_of_each(peaks):
        if series.spread_frac > UNSTEADY_FRAC:
            name = _name(series.quantity, series.dtype)
            message = (
                f"the middle half of the {len(series.values)} rounds of {name} covers "
                f"{percentage(series.spread_frac)} of their median: other programs, clocks or the place of the "
                "memory changed between them; measure again, on an idle machine if this one was not"
            )
            yield ResultWarning(code="peak-unsteady", message=message, where=name)


def _busy(peaks: MeasuredPeaks) -> Iterator[ResultWarning]:
    if peaks.busy_frac is not None and peaks.busy_frac > BUSY_FRAC:
        message = (
            f"other programs used {percentage(peaks.busy_frac)} of the cores at the start: peaks of a CPU and "
            "launches of a GPU are too low; end them, and measure again"
        )
        yield ResultWarning(code="peak-on-busy-machine", message=message)


def best_of_each(peaks: MeasuredPeaks) -> tuple[PeakSeries, ...]:
    """The series that each peak is taken from, in the order of measurement; every way of launching is one."""
    keys = dict.fromkeys((each.quantity, each.dtype) for each in peaks.series if each.quantity != "launch")
    best = [best_series(peaks, quantity, dtype) for quantity, dtype in keys]
    launches = [each for each in peaks.series if each.quantity == "launch"]
    return (*(each for each in best if each is not None), *launches)


def _name(quantity: str, dtype: str | None) -> str:
    return f"{quantity} {dtype}" if dtype else quantity


def unit_of(series: PeakSeries) -> tuple[str, float]:
    """The unit that people read a value in, and its size."""
    if series.quantity == "matmul":
        return ("TFLOP/s", TERA) if series.median >= TERA else ("GFLOP/s", GIGA)
    return ("us", 1 / US_PER_S) if QUANTITIES[series.quantity] == "s" else ("GB/s", GIGA)
