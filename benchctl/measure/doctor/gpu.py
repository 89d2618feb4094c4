"""Checks of the GPUs: a driver that answers, devices that are idle and run at full clock."""

import os
from functools import partial
from typing import Any, Final

import pynvml

from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.gpu_readers import reader_checks, reading_warnings
from benchctl.measure.telemetry.gpu_reading import NONE_VISIBLE, OpenedGpus, process_text
from benchctl.measure.telemetry.nvidia_smi import open_smi
from benchctl.measure.telemetry.nvml import GpuState, NvmlStates, nvml_states
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.records.schema import GpuInfo
from benchctl.units import GIB, HZ_PER_MHZ, MIB

_check = partial(Check, topic="gpu")
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
