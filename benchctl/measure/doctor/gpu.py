"""Checks of the GPUs: a driver that answers, idle devices at full clock, how they are sampled, and their peaks."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import pynvml

from benchctl.measure.doctor.check import Check
from benchctl.measure.telemetry.gpu_reading import (
    NONE_VISIBLE,
    READ_QUANTITIES,
    GpuReader,
    OpenedGpus,
    process_text,
)
from benchctl.measure.telemetry.nvidia_smi import open_smi
from benchctl.measure.telemetry.nvml import GpuState, NvmlStates, nvml_states
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks
from benchctl.records.schema import GpuInfo, GpuSample, ResultWarning
from benchctl.records.warning_codes import WARNING_CODES
from benchctl.units import GIB, HZ_PER_MHZ, MIB, count_of

_check = partial(Check, topic="gpu")
_TO_READ_BY_NVML: Final = "put libnvidia-ml.so.1, which comes with the driver, on the path of the loader"


def reader_checks(by_nvml: NvmlStates, by_smi: OpenedGpus) -> Iterator[Check]:
    """One check of the samples of a run, and one of nvidia-smi beside NVML; there is at least one reader."""
    smi = by_smi.reader
    if by_nvml.states:
        yield _sampling("NVML", by_nvml.samples, None)
        yield _no_second_reader(by_smi.problem) if smi is None else _agreement(by_nvml, smi)
    elif smi is not None:
        yield _sampling("nvidia-smi", smi.read(), by_nvml.problem)


def reading_warnings(warnings: Sequence[ResultWarning]) -> Iterator[Check]:
    """A check for each warning that a run on these devices would carry."""
    for warning in warnings:
        code = WARNING_CODES[warning.code]
        remedy = None if code.severity == "note" else code.remedy
        yield _check(name=warning.code, finding=warning.message, remedy=remedy)


def unknown_quantities(samples: Sequence[GpuSample]) -> dict[int, tuple[str, ...]]:
    """The quantities that each device does not tell, by its index; none for a device that tells all."""
    unknown = {
        sample.index: tuple(name for name in READ_QUANTITIES if getattr(sample, name) is None) for sample in samples
    }
    return {index: names for index, names in unknown.items() if names}


def _sampling(source: str, samples: Sequence[GpuSample], nvml_problem: str | None) -> Check:
    """The check of the way in use; ``nvml_problem`` is the reason why it is not NVML."""
    instead = "" if nvml_problem is None else f", because NVML cannot be used: {nvml_problem}"
    unknown = unknown_quantities(samples)
    return _check(
        name="sampling",
        finding=f"through {source}{instead}; {_in_words(unknown)}",
        remedy=None if nvml_problem is None else _TO_READ_BY_NVML,
        facts={"source": source, "unknown": _as_fact(unknown), "nvml_problem": nvml_problem},
    )


def _no_second_reader(problem: str) -> Check:
    finding = f"cannot be asked ({problem}); NVML is enough"
    return _check(name="nvidia-smi", finding=finding, facts={"problem": problem, "agrees": None})


def _agreement(by_nvml: NvmlStates, smi: GpuReader) -> Check:
    """The check that both ways see the same devices."""
    ours = {state.index: state.name for state in by_nvml.states}
    theirs = {device.index: device.name for device in smi.inventory()}
    unknown, agrees = unknown_quantities(smi.read()), ours == theirs
    view = f"sees the same {count_of(len(ours), 'device')}"
    if not agrees:
        view = f"sees {_devices(theirs)}, and NVML {_devices(ours)}"
    return _check(
        name="nvidia-smi",
        finding=f"{view}; {_in_words(unknown)}",
        remedy=None
        if agrees
        else "use the nvidia-smi and the libnvidia-ml of one driver; 'nvidia-smi -L' lists both",
        facts={"agrees": agrees, "unknown": _as_fact(unknown), "problem": None},
    )


def _devices(names: dict[int, str]) -> str:
    return ", ".join(f"{index} {name}" for index, name in names.items())


def _in_words(unknown: dict[int, tuple[str, ...]]) -> str:
    if not unknown:
        return "every quantity is told"
    return "; ".join(f"GPU {index} does not tell {', '.join(names)}" for index, names in unknown.items())


def _as_fact(unknown: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(f"{index} {name}" for index, names in unknown.items() for name in names)


_check_peaks = partial(Check, topic="peaks")
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
        return _check_peaks(name=name, finding="none on file", remedy=_MEASURE, is_missing=True)
    age_days = (datetime.now(UTC) - datetime.fromisoformat(peaks.measured_at)).days
    codes = tuple(warning.code for warning in peaks.warnings)
    limits = list(dict.fromkeys(codes)) + ([f"{age_days} days old"] if age_days > _OLD_DAYS else [])
    hardware = hardware_of(peaks)
    return _check_peaks(
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


_IDLE_BYTES: Final = GIB
"""Memory that the driver and a display may hold of an idle device."""
_SLOWING: Final = frozenset(
    {"sw-power-cap", "hw-slowdown", "sw-thermal", "hw-thermal", "hw-power-brake", "reliability", "board-limit"}
)


def gpu_checks(*, is_needed: bool, nvml: Any = pynvml) -> tuple[Check, ...]:
    """Check the driver, how devices are sampled, and each visible device.

    ``nvml`` is the binding, a parameter for tests without a GPU.
    """
    visible = os.environ.get(VARIABLE)
    by_nvml, by_smi = nvml_states(nvml, visible), open_smi(visible)
    readers = (*reader_checks(by_nvml, by_smi), *reading_warnings(by_nvml.warnings or by_smi.warnings))
    if states := by_nvml.states:
        driver = _check(
            name="nvml",
            finding=f"driver {states[0].driver or 'of unknown version'}, {len(states)} visible",
            facts={"driver": states[0].driver, "num_visible": len(states)},
        )
        return (driver, *readers, *(check for state in states for check in device_checks(state)))
    if by_smi.reader is not None:
        return (*readers, *map(_listed_device, by_smi.reader.inventory()))
    return (_absent(by_nvml, by_smi, visible, is_needed=is_needed),)


def _listed_device(device: GpuInfo) -> Check:
    return _check(
        name=f"{device.index} device",
        finding=f"{device.name}, visible to nvidia-smi only: its use and settings are not checked",
        facts={"name": device.name, "uuid": device.uuid, "driver": device.driver},
    )


def _absent(by_nvml: NvmlStates, by_smi: OpenedGpus, visible: str | None, *, is_needed: bool) -> Check:
    reasons = f"NVML: {by_nvml.problem}; nvidia-smi: {by_smi.problem}"
    if NONE_VISIBLE in {by_nvml.problem, by_smi.problem}:
        detail, remedy = f"{VARIABLE} is {visible!r} and selects no device ({reasons})", f"unset {VARIABLE}"
    elif not by_nvml.has_driver:
        detail = f"neither NVML nor nvidia-smi finds a driver ({reasons})"
        remedy = "install the NVIDIA driver; start a container with --gpus all"
    else:
        detail = f"the driver answers but no device does ({reasons})"
        remedy = "check 'nvidia-smi -L' and 'dmesg'; start a container with --gpus all"
    facts = {"nvml_problem": by_nvml.problem, "smi_problem": by_smi.problem}
    return _check(name="device", finding=detail, remedy=remedy, is_missing=True, is_needed=is_needed, facts=facts)


def device_checks(state: GpuState) -> tuple[Check, ...]:
    """Check one device: its memory and the processes that use it, its clocks, its power."""
    return (_memory(state), _clocks(state), _power(state))


def _memory(state: GpuState) -> Check:
    total, free = state.memory_total_bytes, state.memory_free_bytes
    detail = state.name
    remedy = None
    if total is not None and free is not None:
        detail += f", {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if total - free > _IDLE_BYTES:
            detail += f", {(total - free) // MIB} MiB held"
            remedy = (
                "end the processes that hold it; 'sudo fuser -v /dev/nvidia*' also lists those of other containers"
            )
    if state.processes:
        detail += "; in use by " + ", ".join(process_text(pid) for pid in state.processes)
        remedy = "end these processes: they take time and memory from the measured server"
    return _check(
        name=f"{state.index} device",
        finding=detail,
        remedy=remedy,
        facts={
            "name": state.name,
            "uuid": state.uuid,
            "memory_free_bytes": free,
            "memory_total_bytes": total,
            "processes": tuple(str(pid) for pid in state.processes),
        },
    )


def _clocks(state: GpuState) -> Check:
    detail = "clocks unknown"
    if state.sm_clock_hz is not None and state.sm_clock_max_hz is not None:
        detail = f"SM clock {state.sm_clock_hz // HZ_PER_MHZ} of at most {state.sm_clock_max_hz // HZ_PER_MHZ} MHz"
    slowing = sorted(_SLOWING.intersection(state.throttle_reasons or ()))
    if slowing:
        detail += f", held down by {', '.join(slowing)}"
    return _check(
        name=f"{state.index} clocks",
        finding=detail,
        remedy="let it cool down, or raise its power limit, before measuring" if slowing else None,
        facts={
            "sm_clock_hz": state.sm_clock_hz,
            "sm_clock_max_hz": state.sm_clock_max_hz,
            "throttle_reasons": state.throttle_reasons,
        },
    )


def _power(state: GpuState) -> Check:
    limit_w, default_w = state.power_limit_w, state.power_default_w
    detail = "power limit unknown" if limit_w is None else f"power limit {limit_w:.0f} W"
    remedies = []
    if limit_w is not None and default_w is not None and limit_w < default_w:
        detail += f", below its default of {default_w:.0f} W"
        remedies.append(f"sudo nvidia-smi -i {state.index} -pl {default_w:.0f}")
    if state.is_persistent is not None:
        detail += f", persistence {'on' if state.is_persistent else 'off'}"
    if state.is_persistent is False:
        remedies.append(f"sudo nvidia-smi -i {state.index} -pm 1")
    return _check(
        name=f"{state.index} power",
        finding=detail,
        remedy="; ".join(remedies) or None,
        facts={"power_limit_w": limit_w, "power_default_w": default_w, "is_persistent": state.is_persistent},
    )
