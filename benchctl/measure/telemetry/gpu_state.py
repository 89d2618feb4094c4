"""Settings and users of each visible GPU, read once through NVML before measuring."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from benchctl.measure.telemetry.gpu_reading import throttle_reasons, visible_positions
from benchctl.units import HZ_PER_MHZ, MILLI_PER_UNIT

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One device. None is unknown: some devices, drivers and containers do not report everything."""

    index: int
    name: str
    uuid: str | None = None
    driver: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[int, ...] = ()
    """Process ids of programs that hold memory of it; empty as well where the system hides them."""
    sm_clock_hz: int | None = None
    sm_clock_max_hz: int | None = None
    is_persistent: bool | None = None
    """True when the driver stays loaded while the device is unused."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


def gpu_states(nvml: Any, visible: str | None) -> tuple[GpuState, ...] | None:
    """The devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names; None where NVML finds no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_value_of(nvml, nvml.nvmlDeviceGetUUID, handle) for handle in handles]
        return tuple(_state(nvml, i, uuids[i], handles[i]) for i in visible_positions(visible, uuids))
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, index: int, uuid: str | None, handle: Any) -> GpuState:
    def ask(question: Callable[..., T], *arguments: Any) -> T | None:
        return _value_of(nvml, question, handle, *arguments)

    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    holders = [
        *(ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
        *(ask(nvml.nvmlDeviceGetGraphicsRunningProcesses) or ()),
    ]
    persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # drivers before 535 know only the older name
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return GpuState(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=uuid,
        driver=_value_of(nvml, nvml.nvmlSystemGetDriverVersion),
        memory_total_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.free,
        processes=tuple(sorted({holder.pid for holder in holders})),
        sm_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)),
        sm_clock_max_hz=_hz(ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)),
        is_persistent=None if persistence is None else bool(persistence),
        power_limit_w=_watt(ask(nvml.nvmlDeviceGetEnforcedPowerLimit)),
        power_default_w=_watt(ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)),
        throttle_reasons=None if reasons is None else throttle_reasons(reasons),
    )


def _value_of(nvml: Any, question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, or None if this device or driver does not support the query."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _hz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * HZ_PER_MHZ


def _watt(milliwatt: int | None) -> float | None:
    return None if milliwatt is None else milliwatt / MILLI_PER_UNIT
