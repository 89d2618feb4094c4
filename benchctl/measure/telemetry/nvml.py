"""GPU samples through NVML. The binding is a parameter, so that its behaviour can be tested without a GPU.

Power is the driver's own average (over a second on recent devices); energy is a counter and exact, so energy of
a load is a difference of two readings, never a sum of powers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [self._ask(lambda h=h: nvml.nvmlDeviceGetUUID(h)) for h in handles]  # type: ignore[misc]
        self._devices = [(i, uuids[i], handles[i]) for i in visible_positions(visible, uuids)]

    def inventory(self) -> tuple[GpuInfo, ...]:
        nvml, driver = self._nvml, self._ask(self._nvml.nvmlSystemGetDriverVersion)
        return tuple(
            GpuInfo(
                index=index,
                name=nvml.nvmlDeviceGetName(handle),
                uuid=uuid,
                memory_bytes=self._ask(lambda h=handle: nvml.nvmlDeviceGetMemoryInfo(h).total),  # type: ignore[misc]
                driver=driver,
            )
            for index, uuid, handle in self._devices
        )

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(self._sample(index, uuid, handle) for index, uuid, handle in self._devices)

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        pids_by_device: dict[int, tuple[int, ...]] = {}
        for index, _, handle in self._devices:
            users = self._ask(lambda h=handle: self._nvml.nvmlDeviceGetComputeRunningProcesses(h))  # type: ignore[misc]
            pids_by_device[index] = tuple(sorted({user.pid for user in users or ()}))
        return pids_by_device

    def samples(self, hz: float, stopped: Event) -> Iterator[GpuSample]:
        while not stopped.is_set():
            yield from self.read()
            stopped.wait(1 / hz)

    def _sample(self, index: int, uuid: str | None, handle: Any) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        utilization_percent = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        energy_mj = ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        sm_mhz = ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        memory_mhz = ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if reasons is None:  # drivers before 535 know only the older name
            reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuSample(
            t_ns=monotonic_ns(),
            index=index,
            uuid=uuid,
            source="nvml",
            utilization_frac=None if utilization_percent is None else utilization_percent / 100,
            memory_used_bytes=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_w=None if power_mw is None else power_mw / MILLI_PER_UNIT,
            energy_j=None if energy_mj is None else energy_mj / MILLI_PER_UNIT,
            sm_clock_hz=None if sm_mhz is None else sm_mhz * HZ_PER_MHZ,
            memory_clock_hz=None if memory_mhz is None else memory_mhz * HZ_PER_MHZ,
            temperature_c=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=None if reasons is None else throttle_reasons(reasons),
        )

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The answer, or None if this device or driver does not support the query."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None


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
