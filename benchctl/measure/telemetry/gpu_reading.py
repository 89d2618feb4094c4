"""The common interface of GPU readers, the names of throttle reasons, and devices that fall silent."""

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Final, Protocol, TypeAlias

import psutil

from benchctl.records.schema import GPU_LOST, GPU_UNREADABLE, GpuInfo, GpuSample, NodeGpu, ResultWarning
from benchctl.units import s_from_ns

Warn: TypeAlias = Callable[[ResultWarning], None]
"""Takes a warning that travels with the result."""
NONE_VISIBLE: Final = "none of its devices is visible"
"""The reason why there is no reader where CUDA_VISIBLE_DEVICES names none of the devices."""
SILENT_READINGS: Final = 3
"""Readings in a row without any answer after which a device is asked no more: one may fail by chance."""
READ_QUANTITIES: Final = (
    "utilization_frac", "memory_used_bytes", "power_w", "energy_j", "sm_clock_hz", "memory_clock_hz",
    "temperature_c", "throttle_reasons",
)  # fmt: skip
"""Fields of a sample that are read from the device."""
_REASONS: Final = {
    0x001: "gpu-idle",
    0x002: "application-clocks",
    0x004: "sw-power-cap",
    0x008: "hw-slowdown",
    0x010: "sync-boost",
    0x020: "sw-thermal",
    0x040: "hw-thermal",
    0x080: "hw-power-brake",
    0x100: "display-clocks",
    0x200: "board-limit",
    0x400: "reliability",
}
"""Bits of the clock event reasons, as ``nvml.h`` numbers them."""


class GpuReader(Protocol):
    """A source of samples of the visible devices."""

    @property
    def source(self) -> str:
        """Its name for readers: ``NVML`` or ``nvidia-smi``."""

    def inventory(self) -> tuple[GpuInfo, ...]:
        """The visible devices that can be read."""

    def described(self) -> tuple[NodeGpu, ...]:
        """The same devices with what may change the numbers of a run, as far as this way of reading tells it."""

    def read(self) -> tuple[GpuSample, ...]:
        """One reading of each; none of a device that answers no question."""

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        """Programs that compute on each device, by index; ids as the driver knows them, outside of containers."""

    def samples(self, hz: float, stopped: Event, warn: Warn) -> Iterator[GpuSample]:
        """Readings at ``hz`` until ``stopped`` is set; ``warn`` is told of devices that stop answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGpus:
    """The outcome of opening the devices in one way."""

    reader: GpuReader | None = None
    """None where no visible device can be read."""
    problem: str = ""
    """The reason for that."""
    has_driver: bool = True
    """False where this way finds no driver to ask."""
    warnings: tuple[ResultWarning, ...] = ()
    """Devices that are missing in the readings, and readings that are of more than a device."""


@dataclass(slots=True)
class SilentDevices:
    """The devices that stopped answering while they were sampled.

    ``warn`` is told once of each, after ``SILENT_READINGS`` readings without an answer.
    """

    warn: Warn
    _unanswered: dict[int, int] = field(default_factory=dict)
    _first_ns: int | None = None
    _last: dict[int, tuple[int, dt.datetime]] = field(default_factory=dict)

    def is_gone(self, index: int) -> bool:
        """True for a device of which the warning was given."""
        return self._unanswered.get(index, 0) >= SILENT_READINGS

    def answered(self, index: int, t_ns: int) -> None:
        """Note a reading that device ``index`` answered at ``t_ns``."""
        if self._first_ns is None:
            self._first_ns = t_ns
        self._unanswered[index] = 0
        self._last[index] = (t_ns, dt.datetime.now(dt.UTC))

    def unanswered(self, index: int, reason: str) -> None:
        """Note a reading that device ``index`` did not answer; ``reason`` is what the driver says."""
        self._unanswered[index] = self._unanswered.get(index, 0) + 1
        if self._unanswered[index] == SILENT_READINGS:
            self.warn(ResultWarning(code=GPU_LOST, message=self._message(index, reason)))

    def lost(self, index: int, reason: str) -> None:
        """Note that device ``index`` is not there any more."""
        if not self.is_gone(index):
            self._unanswered[index] = SILENT_READINGS - 1
            self.unanswered(index, reason)

    def _message(self, index: int, reason: str) -> str:
        if index not in self._last or self._first_ns is None:
            return f"GPU {index} answered no question during the load ({reason}): it has no samples"
        last_ns, at = self._last[index]
        return (
            f"GPU {index} has not answered since {at:%Y-%m-%d %H:%M:%S} UTC, "
            f"{s_from_ns(last_ns - self._first_ns):.1f} s after the first sample ({reason}): its samples end there"
        )


def unheard(_warning: ResultWarning) -> None:
    """Take a warning for a caller who has no result to attach it to."""


def unreadable_device(index: int, reason: str) -> ResultWarning:
    """The warning that a visible device cannot be read, while others can."""
    message = f"GPU {index} cannot be read ({reason}): its use, power, clocks and throttling are unknown"
    return ResultWarning(code=GPU_UNREADABLE, message=message)


def is_answered(sample: GpuSample) -> bool:
    """True for a reading in which the device answered at least one question."""
    return any(getattr(sample, name) is not None for name in READ_QUANTITIES)


def process_text(pid: int) -> str:
    """A process by its id, and its name if it is visible from here."""
    try:
        return f"{pid} ({psutil.Process(pid).name()})"
    except (psutil.Error, ValueError):
        return f"{pid}"


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits of ``mask``; unknown bits keep their number."""
    bits = (1 << position for position in range(mask.bit_length()))
    return tuple(_REASONS.get(bit, f"bit-{bit:#x}") for bit in bits if mask & bit)
