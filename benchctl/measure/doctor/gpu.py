"""Checks of the GPUs: a driver that answers, idle devices at full clock, how they are sampled, and their peaks."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pynvml

from benchctl.measure.doctor.check import Check
from benchctl.measure.telemetry.gpus import NvmlReader, opened
from benchctl.measure.telemetry.reading import (
    NONE_VISIBLE,
    READ_QUANTITIES,
    VARIABLE,
    GpuReader,
    OpenedGpus,
    process_text,
)
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks
from benchctl.records.schema import GpuSample, NodeGpu, ResultWarning
from benchctl.records.warning_codes import WARNING_CODES
from benchctl.units import GIB, HZ_PER_MHZ, MIB

_TO_READ_BY_NVML: Final = "put libnvidia-ml.so.1, which comes with the driver, on the path of the loader"
_SLOWING: Final = frozenset(
    {"sw-power-cap", "hw-slowdown", "sw-thermal", "hw-thermal", "hw-power-brake", "reliability", "board-limit"}
)
_MEASURE_PEAKS: Final = "benchctl micro roofline"


def gpu_checks(*, is_needed: bool, nvml: Any = pynvml) -> tuple[Check, ...]:
    """Check the driver, how devices are sampled, and each visible device.

    ``nvml`` is the binding, a parameter for tests without a GPU.
    """
    visible = os.environ.get(VARIABLE)
    with opened(visible, nvml) as gpus:
        if gpus.reader is None:
            return (_absent(gpus, visible, is_needed=is_needed),)
        return (*_sampling(gpus.reader, gpus.problem), *map(_warning, gpus.warnings), *_devices(gpus.reader))


def _absent(gpus: OpenedGpus, visible: str | None, *, is_needed: bool) -> Check:
    if NONE_VISIBLE in gpus.problem:
        finding, remedy = f"{VARIABLE} is {visible!r} and selects no device ({gpus.problem})", f"unset {VARIABLE}"
    elif not gpus.has_driver:
        finding = f"neither NVML nor nvidia-smi finds a driver ({gpus.problem})"
        remedy = "install the NVIDIA driver; start a container with --gpus all"
    else:
        finding = f"the driver answers but no device does ({gpus.problem})"
        remedy = "check 'nvidia-smi -L' and 'dmesg'; start a container with --gpus all"
    return Check(
        "gpu",
        "device",
        finding,
        remedy=remedy,
        is_missing=True,
        is_needed=is_needed,
        facts={"problem": gpus.problem},
    )


def _sampling(reader: GpuReader, nvml_problem: str) -> Iterator[Check]:
    """The driver, and what a run will know of each device."""
    gpus = reader.described()
    unknown = {
        each.index: names
        for each in reader.read()
        if (names := [name for name in READ_QUANTITIES if getattr(each, name) is None])
    }
    yield Check(
        "gpu",
        "driver",
        f"driver {gpus[0].driver or 'of unknown version'}, {len(gpus)} visible",
        facts={"driver": gpus[0].driver, "num_visible": len(gpus)},
    )
    is_nvml = isinstance(reader, NvmlReader)
    instead = "" if is_nvml else f", because NVML cannot be used: {nvml_problem}"
    words = "; ".join(f"GPU {index} does not tell {', '.join(names)}" for index, names in unknown.items())
    yield Check(
        "gpu",
        "sampling",
        f"through {reader.source}{instead}; {words or 'every quantity is told'}",
        remedy=None if is_nvml else _TO_READ_BY_NVML,
        facts={
            "source": reader.source,
            "unknown": tuple(f"{index} {name}" for index, names in unknown.items() for name in names),
            "nvml_problem": None if is_nvml else nvml_problem,
        },
    )


def _warning(warning: ResultWarning) -> Check:
    """The check for a warning that a run on these devices would carry."""
    code = WARNING_CODES[warning.code]
    return Check("gpu", warning.code, warning.message, remedy=None if code.severity == "note" else code.remedy)


def _devices(reader: GpuReader) -> Iterator[Check]:
    samples = {sample.index: sample for sample in reader.read()}
    users = reader.compute_processes()
    power = reader.power_settings() if isinstance(reader, NvmlReader) else {}
    for gpu in reader.described():
        sample = samples.get(gpu.index) or GpuSample(t_ns=0, index=gpu.index, source="nvml")
        default_w, is_persistent = power.get(gpu.index, (None, None))
        yield from device_checks(gpu, sample, users.get(gpu.index, ()), default_w, is_persistent=is_persistent)


def device_checks(
    gpu: NodeGpu,
    sample: GpuSample,
    processes: Sequence[int] = (),
    default_w: float | None = None,
    *,
    is_persistent: bool | None = None,
) -> tuple[Check, ...]:
    """Check one device: its memory and the processes that compute on it, its clocks, its power."""
    return (
        _memory(gpu, sample, processes),
        _clocks(gpu, sample),
        _power(gpu, default_w, is_persistent=is_persistent),
    )


def _memory(gpu: NodeGpu, sample: GpuSample, processes: Sequence[int]) -> Check:
    total, used = gpu.memory_bytes, sample.memory_used_bytes
    finding, remedy = gpu.name if total is None else f"{gpu.name}, {total / GIB:.1f} GiB", None
    # Memory that the driver and a display may hold of an idle device
    if used is not None and used > GIB:
        finding += f", {used // MIB} MiB held"
        remedy = "end the processes that hold it; 'sudo fuser -v /dev/nvidia*' also lists those of other containers"
    if processes:
        finding += "; in use by " + ", ".join(process_text(pid) for pid in processes)
        remedy = "end these processes: they take time and memory from the measured server"
    return Check(
        "gpu",
        f"{gpu.index} device",
        finding,
        remedy=remedy,
        facts={
            "name": gpu.name,
            "uuid": gpu.uuid,
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "processes": tuple(str(pid) for pid in processes),
        },
    )


def _clocks(gpu: NodeGpu, sample: GpuSample) -> Check:
    clock_hz, most_mhz, finding = sample.sm_clock_hz, gpu.max_sm_clock_mhz, "clocks unknown"
    if clock_hz is not None and most_mhz is not None:
        finding = f"SM clock {clock_hz // HZ_PER_MHZ} of at most {most_mhz} MHz"
    slowing = sorted(_SLOWING.intersection(sample.throttle_reasons or ()))
    if slowing:
        finding += f", held down by {', '.join(slowing)}"
    return Check(
        "gpu",
        f"{gpu.index} clocks",
        finding,
        remedy="let it cool down, or raise its power limit, before measuring" if slowing else None,
        facts={
            "sm_clock_hz": clock_hz,
            "sm_clock_max_hz": None if most_mhz is None else most_mhz * HZ_PER_MHZ,
            "throttle_reasons": sample.throttle_reasons,
        },
    )


def _power(gpu: NodeGpu, default_w: float | None, *, is_persistent: bool | None) -> Check:
    limit_w, remedies = gpu.power_limit_w, []
    finding = "power limit unknown" if limit_w is None else f"power limit {limit_w:.0f} W"
    if limit_w is not None and default_w is not None and limit_w < default_w:
        finding += f", below its default of {default_w:.0f} W"
        remedies.append(f"sudo nvidia-smi -i {gpu.index} -pl {default_w:.0f}")
    if is_persistent is not None:
        finding += f", persistence {'on' if is_persistent else 'off'}"
    if is_persistent is False:
        remedies.append(f"sudo nvidia-smi -i {gpu.index} -pm 1")
    return Check(
        "gpu",
        f"{gpu.index} power",
        finding,
        remedy="; ".join(remedies) or None,
        facts={"power_limit_w": limit_w, "power_default_w": default_w, "is_persistent": is_persistent},
    )


def peak_checks(gpus: Sequence[str]) -> tuple[Check, ...]:
    """One check of measured peaks for each kind of GPU, or one for the CPU of a machine without any.

    Peaks that are absent are needed by nothing: the data sheet's stand for those of a known GPU.
    """
    kinds = [(name, [name]) for name in dict.fromkeys(gpus)] or [("cpu", [])]
    return tuple(_peaks_of(name, machine_peaks(devices)) for name, devices in kinds)


def _peaks_of(name: str, peaks: MeasuredPeaks | None) -> Check:
    if peaks is None:
        return Check("peaks", name, "none on file", remedy=_MEASURE_PEAKS, is_missing=True)
    age_days = (datetime.now(UTC) - datetime.fromisoformat(peaks.measured_at)).days
    codes = tuple(warning.code for warning in peaks.warnings)
    limits = list(dict.fromkeys(codes)) + ([f"{age_days} days old"] if age_days > 90 else [])
    hardware = hardware_of(peaks)
    return Check(
        "peaks",
        name,
        hardware.title + (f": {', '.join(limits)}" if limits else ""),
        remedy=_MEASURE_PEAKS if limits else None,
        facts={
            "hardware": hardware.name,
            "measured_at": peaks.measured_at,
            "peak_flops_per_s": hardware.peak_flops_per_s,
            "bandwidth_bytes_per_s": hardware.bandwidth_bytes_per_s,
            "warnings": codes,
        },
    )
