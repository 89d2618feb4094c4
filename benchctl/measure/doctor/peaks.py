"""The check of measured peaks: what is on file for the devices of this machine, and how old it is."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from benchctl.measure.doctor.check import Check
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks

_check = partial(Check, topic="peaks")
_MEASURE: Final = "benchctl micro roofline"
_OLD_DAYS: Final = 90


def peak_checks(gpus: Sequence[str]) -> tuple[Check, ...]:
    """One check for each kind of GPU, or one for the CPU of a machine without any.

    Peaks that are absent are needed by nothing: the data sheet's stand for those of a known GPU.
    """
    kinds = [(name, [name]) for name in dict.fromkeys(gpus)] or [("cpu", [])]
    return tuple(_of_device(name, machine_peaks(devices)) for name, devices in kinds)


def _of_device(name: str, peaks: MeasuredPeaks | None) -> Check:
    if peaks is None:
        return _check(name=name, finding="none on file", remedy=_MEASURE, is_missing=True)
    age_days = (datetime.now(UTC) - datetime.fromisoformat(peaks.measured_at)).days
    codes = tuple(warning.code for warning in peaks.warnings)
    limits = list(dict.fromkeys(codes)) + ([f"{age_days} days old"] if age_days > _OLD_DAYS else [])
    hardware = hardware_of(peaks)
    return _check(
        name=name,
        finding=hardware.title + (f": {', '.join(limits)}" if limits else ""),
        remedy=_MEASURE if limits else None,
        facts={
            "hardware": hardware.name,
            "measured_at": peaks.measured_at,
            "peak_flops_per_s": hardware.peak_flops_per_s,
            "bandwidth_bytes_per_s": hardware.bandwidth_bytes_per_s,
            "warnings": codes,
        },
    )
