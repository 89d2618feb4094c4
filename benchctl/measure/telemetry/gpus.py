"""The GPUs of this machine, read through the library NVML, or the program ``nvidia-smi`` where there is no library.

The binding of NVML is a parameter, so that tests need no GPU. Power is the driver's own average (over a second on
recent devices); energy is a counter and exact, so energy of a load is a difference of two samples, never a sum of
powers. In the lines of the program, what a device cannot tell stands in brackets (``[N/A]``) and is unknown.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, TypeVar

import pynvml

from benchctl.measure.telemetry.reading import (
    VARIABLE,
    GpuReader,
    OpenedGpus,
    Reading,
    Warn,
    hides_all,
    names_mig,
    opened_gpus,
    throttle_reasons,
)
from benchctl.records.schema import GpuInfo, GpuSample, NodeGpu, ResultWarning
from benchctl.units import HZ_PER_MHZ, MIB, MILLI_PER_UNIT
from benchctl.untrusted.text import visible_line

T = TypeVar("T")
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
    parents = devices.values() if names_mig(visible) else ()
    mig = {uuid: device.index for device in parents for uuid in device.mig_uuids()}
    return opened_gpus(visible, devices, unreadable, NvmlReader, mig)


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


def numa_node(pci_address: str | None, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
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


_PROGRAM: Final = "nvidia-smi"
_LIMIT_S: Final = 20.0
_MOST: Final = 1e12
"""Most of any quantity in the units of the program, far above watts, MiB and MHz of devices; NaN is not below."""
_FIELDS: Final = (
    "index", "uuid", "memory.total", "driver_version", "utilization.gpu", "memory.used", "power.draw", "clocks.sm",
    "clocks.mem", "temperature.gpu",
)  # fmt: skip
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same, of drivers since and before 535: one that does not know a field refuses the whole query."""


class SmiReader(GpuReader):
    """Reads devices, each time by a start of the program; made by ``open_smi``."""

    source = _PROGRAM
    least_pause_s = 1.0

    def __init__(self, gpus: Sequence[NodeGpu]) -> None:
        self._gpus = gpus
        self._selection = ("-i", ",".join(gpu.uuid or str(gpu.index) for gpu in gpus))

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(self._gpus)

    def readings(self) -> Iterator[Reading]:
        rows, problem = _rows(*self._selection)
        return (_reading(gpu, rows.get(gpu.index, {}), problem) for gpu in self._gpus)

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        lines, _ = _ask("--query-compute-apps=gpu_uuid,pid", *self._selection)
        users = [line.strip().split(", ") for line in lines]
        pids = [(user[0], int(user[1])) for user in users if len(user) == 2 and user[1].isdecimal()]
        return {gpu.index: tuple(sorted(pid for uuid, pid in pids if uuid == gpu.uuid)) for gpu in self._gpus}


def open_smi(visible: str | None) -> OpenedGpus:
    """A reader of the devices that ``visible`` names; none where the program is absent, fails, or sees none."""
    rows, problem = _rows()
    if not rows:
        return OpenedGpus(problem=problem or "it lists no device", has_driver=False)
    gpus = {
        index: NodeGpu(
            index=index,
            name=_text(row, "name") or "unknown GPU",
            uuid=_text(row, "uuid"),
            memory_bytes=_amount(row, "memory.total", MIB),
            driver=_text(row, "driver_version"),
        )
        for index, row in rows.items()
    }
    missing = set(range(max(gpus))) - gpus.keys()
    reason = problem or f"it is missing in the list of {_PROGRAM}"
    return opened_gpus(visible, gpus, dict.fromkeys(sorted(missing), reason), SmiReader)


def _rows(*selection: str) -> tuple[dict[int, dict[str, str]], str]:
    """The fields of each selected device by its index, and the reason of a failure.

    Lines that are no whole row, such as an error, are passed over.
    """
    names, whole = (*_FIELDS, "reasons", "name"), list[list[str]]()  # a device's name may contain a comma
    for reasons in _REASONS:
        lines, problem = _ask(f"--query-gpu={','.join((*_FIELDS, reasons, 'name'))}", *selection)
        split = (line.strip().split(", ", len(names) - 1) for line in lines)
        if whole := [row for row in split if len(row) == len(names) and row[0].isdecimal()]:
            break
    return {int(row[0]): dict(zip(names, row, strict=True)) for row in whole}, problem


def _ask(*options: str) -> tuple[list[str], str]:
    """The lines that the program prints, and the reason of a failure in its words or the system's."""
    try:
        done = subprocess.run(
            (_PROGRAM, *options, "--format=csv,noheader,nounits"),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_LIMIT_S,
        )
    except FileNotFoundError:
        return [], f"no program {_PROGRAM} is on the PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], visible_line(str(error), 200)
    complaint = done.stderr.strip() or done.stdout.strip() if done.returncode else ""
    return done.stdout.splitlines(), visible_line(complaint, 200)


def _reading(gpu: NodeGpu, row: Mapping[str, str], problem: str) -> Reading:
    """The reading of a device from its row, which is empty where the program does not list it for a ``problem``."""
    mask, percent = row.get("reasons", ""), _number(row, "utilization.gpu")
    sample = GpuSample(
        t_ns=monotonic_ns(),
        index=gpu.index,
        uuid=gpu.uuid,
        source="nvidia-smi",
        utilization_frac=None if percent is None else percent / 100,
        memory_used_bytes=_amount(row, "memory.used", MIB),
        power_w=_number(row, "power.draw"),
        sm_clock_hz=_amount(row, "clocks.sm", HZ_PER_MHZ),
        memory_clock_hz=_amount(row, "clocks.mem", HZ_PER_MHZ),
        temperature_c=_number(row, "temperature.gpu"),
        throttle_reasons=throttle_reasons(int(mask, 16)) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", mask) else None,
    )
    untold = (visible_line(value.strip("[]"), 200) for value in row.values() if value[:1] == "[")
    return sample, next(untold, problem or f"it is missing in the list of {_PROGRAM}")


def _text(row: Mapping[str, str], field: str) -> str | None:
    """A text that the device told; None for ``[Unknown Error]`` and its like."""
    value = row.get(field, "")
    return None if not value or value[0] == "[" or value == "ERR!" else value


def _number(row: Mapping[str, str], field: str) -> float | None:
    """A quantity, which is never negative; None for every other text."""
    try:
        value = float(row.get(field, ""))
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _amount(row: Mapping[str, str], field: str, unit: int) -> int | None:
    number = _number(row, field)
    return None if number is None else round(number * unit)


_MISSING: Final = "neither NVML nor nvidia-smi shows a visible GPU: use, power, clocks and throttling are unknown"


@contextmanager
def opened(visible: str | None, nvml: Any = pynvml) -> Iterator[OpenedGpus]:
    """The devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names, through NVML or else nvidia-smi.

    The problem is that of NVML, and of both without a reader.
    """
    with open_nvml(nvml, visible) as by_nvml:
        if by_nvml.reader is not None:
            yield by_nvml
            return
        by_smi = open_smi(visible)
        yield OpenedGpus(
            reader=by_smi.reader,
            problem=by_nvml.problem if by_smi.reader else f"NVML: {by_nvml.problem}; nvidia-smi: {by_smi.problem}",
            has_driver=by_nvml.has_driver or by_smi.has_driver,
            warnings=by_smi.warnings or by_nvml.warnings,
        )


_DEVICE_FILES: Final = ("nvidia[0-9]*", "dxg", "kfd")
"""Files of devices that a server may use although neither way of reading sees them: NVIDIA's, WSL's, AMD's."""


def has_device_files(system: Path) -> bool:
    """True where the system has files of GPUs, whether or not they can be read."""
    return any(True for pattern in _DEVICE_FILES for _ in system.glob(pattern))


@contextmanager
def open_gpu(
    visible: str | None, nvml: Any = pynvml, warn: Warn = lambda _warning: None, system: Path = Path("/dev")
) -> Iterator[GpuReader | None]:
    """A reader of the devices that ``visible`` names, or None.

    ``warn`` is told of devices that cannot be read beside others, of names that mean none, and of the reason why
    there is no reader where a device may be.
    """
    with opened(visible, nvml) as gpus:
        for warning in gpus.warnings:
            warn(warning)
        if gpus.reader is None and not hides_all(visible) and (gpus.has_driver or has_device_files(system)):
            warn(ResultWarning(code="gpu-sampler-missing", message=f"{_MISSING} ({gpus.problem})"))
        yield gpus.reader


def gpu_inventory(visible: str | None = None) -> tuple[GpuInfo, ...]:
    """The devices that ``visible`` names, by default those that CUDA_VISIBLE_DEVICES names."""
    with open_gpu(os.environ.get(VARIABLE) if visible is None else visible) as reader:
        gpus = reader.described() if reader is not None else ()
    return tuple(GpuInfo(**{name: getattr(gpu, name) for name in GpuInfo.__struct_fields__}) for gpu in gpus)
