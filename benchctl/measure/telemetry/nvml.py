"""GPU samples and settings through NVML. The binding is a parameter, so that tests need no GPU.

Power is the driver's own average (over a second on recent devices); energy is a counter and exact, so energy of
a load is a difference of two samples, never a sum of powers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from time import monotonic_ns
from typing import Any, TypeVar

from benchctl.measure.telemetry.gpu_reading import throttle_reasons, visible_positions
from benchctl.records.manifest import GpuInfo
from benchctl.records.samples import GpuSample
from benchctl.units import HZ_PER_MHZ, MILLI_PER_UNIT

T = TypeVar("T")


class NvmlReader:
    """Reads the visible devices; made by ``open_nvml``."""

    def __init__(self, nvml: Any, visible: str | None) -> None:
        self._nvml = nvml
        self._devices = [_Device(nvml, *device) for device in _visible_devices(nvml, visible)]

    def inventory(self) -> tuple[GpuInfo, ...]:
        return tuple(
            GpuInfo(
                index=device.index,
                name=device.name(),
                uuid=device.uuid,
                memory_bytes=getattr(device.ask(self._nvml.nvmlDeviceGetMemoryInfo), "total", None),
                driver=_answer(self._nvml, self._nvml.nvmlSystemGetDriverVersion),
            )
            for device in self._devices
        )

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(device.sample() for device in self._devices)

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        question = self._nvml.nvmlDeviceGetComputeRunningProcesses
        users = {device.index: device.ask(question) or () for device in self._devices}
        return {index: tuple(sorted({user.pid for user in users[index]})) for index in users}

    def samples(self, hz: float, stopped: Event) -> Iterator[GpuSample]:
        while not stopped.is_set():
            yield from self.read()
            stopped.wait(1 / hz)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Settings and users of one device. Some devices, drivers and containers do not report everything: None."""

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


@contextmanager
def open_nvml(nvml: Any, visible: str | None) -> Iterator[NvmlReader | None]:
    """A reader while NVML is initialised; None where there is no driver or no visible device."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        reader = NvmlReader(nvml, visible)
        yield reader if reader.read() else None
    finally:
        nvml.nvmlShutdown()


def gpu_states(nvml: Any, visible: str | None) -> tuple[GpuState, ...] | None:
    """The devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names; None where NVML finds no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return tuple(_Device(nvml, *device).state() for device in _visible_devices(nvml, visible))
    finally:
        nvml.nvmlShutdown()


class _Device:
    """One device and its handle in the binding ``nvml``."""

    def __init__(self, nvml: Any, index: int, uuid: str | None, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.index, self.uuid = index, uuid

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        return _answer(self._nvml, question, self._handle, *arguments)

    def name(self) -> str:
        return str(self._nvml.nvmlDeviceGetName(self._handle))

    def sample(self) -> GpuSample:
        nvml, ask = self._nvml, self.ask
        utilization = ask(nvml.nvmlDeviceGetUtilizationRates)
        return GpuSample(
            index=self.index,
            uuid=self.uuid,
            source="nvml",
            utilization_frac=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=getattr(ask(nvml.nvmlDeviceGetMemoryInfo), "used", None),
            power_w=_per_mille(ask(nvml.nvmlDeviceGetPowerUsage)),
            energy_j=_per_mille(ask(nvml.nvmlDeviceGetTotalEnergyConsumption)),
            sm_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)),
            memory_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)),
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=self._throttle_reasons(),
            t_ns=monotonic_ns(),
        )

    def state(self) -> GpuState:
        nvml, ask = self._nvml, self.ask
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        users = [
            *(ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
            *(ask(nvml.nvmlDeviceGetGraphicsRunningProcesses) or ()),
        ]
        persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
        return GpuState(
            index=self.index,
            name=self.name(),
            uuid=self.uuid,
            driver=_answer(nvml, nvml.nvmlSystemGetDriverVersion),
            memory_total_bytes=getattr(memory, "total", None),
            memory_free_bytes=getattr(memory, "free", None),
            processes=tuple(sorted({user.pid for user in users})),
            sm_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)),
            sm_clock_max_hz=_hz(ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)),
            is_persistent=None if persistence is None else bool(persistence),
            power_limit_w=_per_mille(ask(nvml.nvmlDeviceGetEnforcedPowerLimit)),
            power_default_w=_per_mille(ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)),
            throttle_reasons=self._throttle_reasons(),
        )

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        mask = self.ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if mask is None:  # drivers before 535 know only the older name
            mask = self.ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if mask is None else throttle_reasons(mask)


def _visible_devices(nvml: Any, visible: str | None) -> list[tuple[int, str | None, Any]]:
    """Index, UUID and handle of each device that ``visible`` names."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [_answer(nvml, nvml.nvmlDeviceGetUUID, handle) for handle in handles]
    return [(i, uuids[i], handles[i]) for i in visible_positions(visible, uuids)]


def _answer(nvml: Any, question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, or None if this device or driver does not support the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _hz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * HZ_PER_MHZ


def _per_mille(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / MILLI_PER_UNIT
