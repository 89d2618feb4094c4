"""GPU samples and settings through NVML. The binding is a parameter, so that tests need no GPU.

Power is the driver's own average (over a second on recent devices); energy is a counter and exact, so energy of
a load is a difference of two samples, never a sum of powers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, TypeVar

from benchctl.measure.telemetry.reading import (
    GpuReader,
    OpenedGpus,
    Reading,
    names_mig,
    opened_gpus,
    throttle_reasons,
)
from benchctl.records.schema import GpuSample, NodeGpu
from benchctl.units import HZ_PER_MHZ, MILLI_PER_UNIT
from benchctl.untrusted.text import visible_line

T = TypeVar("T")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_PCI_ADDRESS: Final = re.compile(r"(?:0000)?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")


class NvmlReader(GpuReader):
    """Reads devices; made by ``open_nvml``."""

    source = "NVML"

    def __init__(self, devices: "Sequence[_Device]") -> None:
        self._devices = devices

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(device.described() for device in self._devices)

    def readings(self) -> Iterator[Reading]:
        return (device.reading() for device in self._devices)

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        return {device.index: device.compute_processes() for device in self._devices}

    def power_settings(self) -> dict[int, tuple[float | None, bool | None]]:
        """The default power limit of each device in watts, and whether its driver stays loaded while it is idle."""
        return {device.index: device.power_settings() for device in self._devices}


@contextmanager
def open_nvml(nvml: Any, visible: str | None) -> Iterator[OpenedGpus]:
    """A reader while NVML is initialised; none where there is no driver or no visible device that answers."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield OpenedGpus(problem=_reason(error), has_driver=False)
        return
    try:
        yield _opened(nvml, visible)
    finally:
        with suppress(nvml.NVMLError):  # a lost device must not end the run
            nvml.nvmlShutdown()


def _opened(nvml: Any, visible: str | None) -> OpenedGpus:
    """The devices that ``visible`` names. One that cannot be opened hides no other: it is a warning."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return OpenedGpus(problem=f"it cannot count devices: {_reason(error)}")
    devices: dict[int, _Device] = {}
    unreadable: dict[int, str] = {}
    for index in range(count):
        try:
            devices[index] = _Device(nvml, index)
        except (nvml.NVMLError, UnicodeDecodeError) as error:
            unreadable[index] = _reason(error)
    uuids = [devices[index].uuid if index in devices else None for index in range(count)]
    parents = devices.values() if names_mig(visible) else ()
    mig = {uuid: device.index for device in parents for uuid in device.mig_uuids()}
    return opened_gpus(
        visible, uuids, unreadable, lambda chosen: NvmlReader([devices[index] for index in chosen]), mig
    )


class _Device:
    """One device and its handle in the binding ``nvml``. Raises the binding's error where it cannot be opened."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self.index = index
        self.name = str(nvml.nvmlDeviceGetName(self._handle))
        self._problem = ""
        """The driver's words when it did not answer last."""
        self.uuid: str | None = self._ask(nvml.nvmlDeviceGetUUID, self._handle)

    def _ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """The answer; None where this device or driver does not have it."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            self._problem = _reason(error)
            return None

    def _memory(self) -> Any:
        """Bytes of memory, total and used, where what the driver keeps for itself is not used.

        That is the second form of the answer, and what nvidia-smi says; drivers before 510 know only the first, in
        which it counts as used.
        """
        question = self._nvml.nvmlDeviceGetMemoryInfo
        memory = self._ask(question, self._handle, self._nvml.nvmlMemory_v2)
        return self._ask(question, self._handle) if memory is None else memory

    def mig_uuids(self) -> Iterator[str]:
        """Identities of the MIG devices that it is divided into."""
        nvml, handle = self._nvml, self._handle
        for number in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None and (uuid := self._ask(nvml.nvmlDeviceGetUUID, part)) is not None:
                yield str(uuid)

    def reading(self) -> Reading:
        nvml, ask, handle = self._nvml, self._ask, self._handle
        utilization = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # drivers before 535 know only the older name
            reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        sample = GpuSample(
            index=self.index,
            uuid=self.uuid,
            source="nvml",
            utilization_frac=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=getattr(self._memory(), "used", None),
            power_w=_per_mille(ask(nvml.nvmlDeviceGetPowerUsage, handle)),
            energy_j=_per_mille(ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)),
            sm_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            memory_clock_hz=_hz(ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=None if reasons is None else throttle_reasons(reasons),
            t_ns=monotonic_ns(),
        )
        return sample, self._problem

    def described(self) -> NodeGpu:
        nvml, ask, handle = self._nvml, self._ask, self._handle
        return NodeGpu(
            index=self.index,
            name=self.name,
            uuid=self.uuid,
            memory_bytes=getattr(self._memory(), "total", None),
            driver=ask(nvml.nvmlSystemGetDriverVersion),
            max_sm_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_limit_w=_per_mille(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            numa_node=numa_node(getattr(ask(nvml.nvmlDeviceGetPciInfo, handle), "busId", None)),
        )

    def compute_processes(self) -> tuple[int, ...]:
        users = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()
        return tuple(sorted({user.pid for user in users}))

    def power_settings(self) -> tuple[float | None, bool | None]:
        default_w = _per_mille(self._ask(self._nvml.nvmlDeviceGetPowerManagementDefaultLimit, self._handle))
        persistence = self._ask(self._nvml.nvmlDeviceGetPersistenceMode, self._handle)
        return default_w, None if persistence is None else bool(persistence)


def _reason(error: Exception) -> str:
    """The driver's words for a message."""
    return visible_line(str(error), 200) or type(error).__name__


def numa_node(pci_address: str | None, devices: Path = _PCI_DEVICES) -> int | None:
    """The NUMA node to which the device at ``pci_address``, as NVML writes it, is attached; None if unknown.

    NVML writes the domain with eight digits, Linux with four.
    """
    if pci_address is None or (parts := _PCI_ADDRESS.fullmatch(pci_address)) is None:
        return None
    try:
        node = int((devices / parts[1].lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the firmware does not say


def _hz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * HZ_PER_MHZ


def _per_mille(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / MILLI_PER_UNIT
