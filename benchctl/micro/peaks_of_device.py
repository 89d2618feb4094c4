"""The peaks that the passes of a device are held against: its data sheet's, or else those on file."""

from dataclasses import replace

from benchctl.costs.hardware import hardware_or_none
from benchctl.micro.floor import Peaks
from benchctl.micro.worker import WorkerInfo
from benchctl.records.peaks import MeasuredPeaks, hardware_of


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
