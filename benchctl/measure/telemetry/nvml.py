"""GPU samples and settings through NVML. The binding is a parameter, so that tests need no GPU.

Power is the driver's own average (over a second on recent devices); energy is a counter and exact, so energy of
a load is a difference of two samples, never a sum of powers.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic_ns
from typing import Any, Final, TypeVar

from benchctl.measure.telemetry.gpu_reading import (
    NONE_VISIBLE,
    OpenedGpus,
    SilentDevices,
    Warn,
    is_answered,
    throttle_reasons,
    unreadable_device,
)
from benchctl.measure.telemetry.visible_devices import VisibleDevices, names_mig, visible_devices
from benchctl.records.schema import GpuInfo, GpuSample, NodeGpu, ResultWarning
from benchctl.units import HZ_PER_MHZ, MILLI_PER_UNIT
from benchctl.untrusted.text import visible_line

T = TypeVar("T")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_PCI_ADDRESS: Final = re.compile(r"(?:0000)?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")


class NvmlReader:
    """Reads devices; made by ``open_nvml``."""

    source: Final = "NVML"

    def __init__(self, nvml: Any, devices: "tuple[_Device, ...]") -> None:
        self._nvml = nvml
        self._devices = devices

    def inventory(self) -> tuple[GpuInfo, ...]:
        return tuple(
            GpuInfo(
                index=device.index,
                name=device.name,
                uuid=device.uuid,
                memory_bytes=getattr(device.memory(), "total", None),
                driver=_answer(self._nvml, self._nvml.nvmlSystemGetDriverVersion),
            )
            for device in self._devices
        )

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(device.described() for device in self._devices)

    def read(self) -> tuple[GpuSample, ...]:
        readings = (device.sample() for device in self._devices)
        return tuple(sample for sample in readings if sample is not None)

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        question = self._nvml.nvmlDeviceGetComputeRunningProcesses
        users = {device.index: device.ask(question) or () for device in self._devices}
        return {index: tuple(sorted({user.pid for user in users[index]})) for index in users}

    def samples(self, hz: float, stopped: Event, warn: Warn) -> Iterator[GpuSample]:
        silent = SilentDevices(warn)
        while not stopped.is_set() and not all(silent.is_gone(device.index) for device in self._devices):
            for device in self._devices:
                if silent.is_gone(device.index):
                    continue
                sample = device.sample()
                if sample is None:
                    silent.unanswered(device.index, device.last_problem)
                else:
                    silent.answered(device.index, sample.t_ns)
                    yield sample
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlStates:
    """The visible devices as NVML describes them."""

    states: tuple[GpuState, ...] = ()
    samples: tuple[GpuSample, ...] = ()
    """A reading of each, as a sampler takes it."""
    warnings: tuple[ResultWarning, ...] = ()
    """Devices that cannot be read, and entries of the variable that name none."""
    problem: str = ""
    """The reason why there is no device; empty where there is one."""
    has_driver: bool = True
    """False where NVML finds no driver."""


@contextmanager
def open_nvml(nvml: Any, visible: str | None) -> Iterator[OpenedGpus]:
    """A reader while NVML is initialised; none where there is no driver or no visible device that answers."""
    with _initialised(nvml) as problem:
        if problem:
            yield OpenedGpus(problem=problem, has_driver=False)
            return
        devices = _find_devices(nvml, visible)
        reader = NvmlReader(nvml, devices.readable) if devices.readable else None
        yield OpenedGpus(reader=reader, problem=devices.problem, warnings=devices.warnings)


def nvml_states(nvml: Any, visible: str | None) -> NvmlStates:
    """The state of each device that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names and NVML can read."""
    with _initialised(nvml) as problem:
        if problem:
            return NvmlStates(problem=problem, has_driver=False)
        devices = _find_devices(nvml, visible)
        states = tuple(device.state() for device in devices.readable)
        samples = NvmlReader(nvml, devices.readable).read()
        return NvmlStates(states=states, samples=samples, warnings=devices.warnings, problem=devices.problem)


@contextmanager
def _initialised(nvml: Any) -> Iterator[str]:
    """NVML inside the context; the value is the reason why it is not there, empty where it is."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield _reason(error)
        return
    try:
        yield ""
    finally:
        with suppress(nvml.NVMLError):  # a lost device must not end the run
            nvml.nvmlShutdown()


class _Device:
    """One device and its handle in the binding ``nvml``. Raises the binding's error where it cannot be opened."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self.index = index
        self.name = str(nvml.nvmlDeviceGetName(self._handle))
        self.last_problem = ""
        """The driver's words when it did not answer last."""
        self.uuid: str | None = self.ask(nvml.nvmlDeviceGetUUID)

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            self.last_problem = _reason(error)
            return None

    def memory(self) -> Any:
        """Bytes of memory: total, used and free, where what the driver keeps for itself is neither of the last two.

        That is the second form of the answer, and what nvidia-smi says; drivers before 510 know only the first, in
        which it counts as used.
        """
        question = self._nvml.nvmlDeviceGetMemoryInfo
        memory = self.ask(question, self._nvml.nvmlMemory_v2)
        return self.ask(question) if memory is None else memory

    def mig_uuids(self) -> Iterator[str]:
        """Identities of the MIG devices that it is divided into."""
        for number in range(self.ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            part = self.ask(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, number)
            uuid = None if part is None else _answer(self._nvml, self._nvml.nvmlDeviceGetUUID, part)
            if uuid is not None:
                yield str(uuid)

    def sample(self) -> GpuSample | None:
        """A reading; None where the device answers no question."""
        sample = self._reading()
        return sample if is_answered(sample) else None

    def _reading(self) -> GpuSample:
        nvml, ask = self._nvml, self.ask
        utilization = ask(nvml.nvmlDeviceGetUtilizationRates)
        return GpuSample(
            index=self.index,
            uuid=self.uuid,
            source="nvml",
            utilization_frac=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=getattr(self.memory(), "used", None),
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
        memory = self.memory()
        users = [
            *(ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
            *(ask(nvml.nvmlDeviceGetGraphicsRunningProcesses) or ()),
        ]
        persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
        return GpuState(
            index=self.index,
            name=self.name,
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

    def described(self) -> NodeGpu:
        nvml, ask = self._nvml, self.ask
        return NodeGpu(
            index=self.index,
            name=self.name,
            uuid=self.uuid,
            memory_bytes=getattr(self.memory(), "total", None),
            driver=_answer(nvml, nvml.nvmlSystemGetDriverVersion),
            max_sm_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            power_limit_w=_per_mille(ask(nvml.nvmlDeviceGetEnforcedPowerLimit)),
            numa_node=numa_node(getattr(ask(nvml.nvmlDeviceGetPciInfo), "busId", None)),
        )

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        mask = self.ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if mask is None:  # drivers before 535 know only the older name
            mask = self.ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if mask is None else throttle_reasons(mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """The devices that can be read, and what is to be said of others."""

    readable: tuple[_Device, ...] = ()
    warnings: tuple[ResultWarning, ...] = ()
    problem: str = ""


def _find_devices(nvml: Any, visible: str | None) -> _Devices:
    """The devices that ``visible`` names. One that cannot be opened hides no other: it is a warning."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return _Devices(problem=f"it cannot count devices: {_reason(error)}")
    opened = [_open(nvml, index) for index in range(count)]
    devices = {device.index: device for device in opened if isinstance(device, _Device)}
    chosen = _choose(visible, count, devices)
    unreadable = {i: reason for i, reason in enumerate(opened) if isinstance(reason, str) and i in chosen.positions}
    warnings = (*chosen.warnings, *(unreadable_device(index, reason) for index, reason in unreadable.items()))
    selected = tuple(devices[position] for position in chosen.positions if position in devices)
    if selected:
        return _Devices(readable=selected, warnings=warnings)
    reasons = "; ".join(f"GPU {index}: {reason}" for index, reason in unreadable.items())
    return _Devices(warnings=warnings, problem=reasons or (NONE_VISIBLE if count else "it lists no device"))


def _open(nvml: Any, index: int) -> _Device | str:
    """A device, or the reason why it cannot be opened."""
    try:
        return _Device(nvml, index)
    except (nvml.NVMLError, UnicodeDecodeError) as error:
        return _reason(error)


def _choose(visible: str | None, count: int, devices: dict[int, _Device]) -> VisibleDevices:
    uuids = [devices[index].uuid if index in devices else None for index in range(count)]
    parts = devices.values() if names_mig(visible) else ()
    return visible_devices(visible, uuids, {uuid: device.index for device in parts for uuid in device.mig_uuids()})


def _reason(error: Exception) -> str:
    """The driver's words for a message."""
    return visible_line(str(error), 200) or type(error).__name__


def _answer(nvml: Any, question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, or None if this device or driver does not support the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


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
