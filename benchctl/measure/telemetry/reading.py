"""Readings of GPUs, however they are taken: which devices a server sees, and devices that fall silent."""

import datetime as dt
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, TypeAlias

import psutil

from benchctl.records.schema import FOREIGN_GPU_PROCESS, GPU_LOST, GPU_UNREADABLE, GpuSample, NodeGpu, ResultWarning
from benchctl.units import MIB, s_from_ns
from benchctl.untrusted.text import visible_value

Warn: TypeAlias = Callable[[ResultWarning], object]
"""Takes a warning that travels with the result."""
Reading: TypeAlias = tuple[GpuSample, str]
"""A sample, and the reason in the driver's words where the device answered no question."""

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_NONE: Final = frozenset({"", "-1", "NoDevFiles"})
"""Values that hide all devices on purpose; the last one is Slurm's."""
_MIG: Final = "MIG-"

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


class GpuReader(ABC):
    """A source of samples of the visible devices; one class for each way of reading them."""

    source: str
    """Its name for readers."""
    least_pause_s = 0.0
    """Between two readings, whatever rate is wanted: what a reading costs must not disturb the load."""

    @abstractmethod
    def described(self) -> tuple[NodeGpu, ...]:
        """The visible devices that can be read, with what may change the numbers of a run, as far as it is told."""

    @abstractmethod
    def readings(self) -> Iterator[Reading]:
        """One reading of each device."""

    @abstractmethod
    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        """Programs that compute on each device, by index; ids as the driver knows them, outside of containers."""

    def read(self) -> tuple[GpuSample, ...]:
        """A sample of each device that answers at least one question."""
        return tuple(sample for sample, _ in self.readings() if is_answered(sample))

    def samples(self, hz: float, stopped: Event, warn: Warn) -> Iterator[GpuSample]:
        """Samples, at ``hz`` at most, until ``stopped`` is set; ``warn`` is told once of each that falls silent."""
        num_unanswered = {gpu.index: 0 for gpu in self.described()}
        answers: dict[int, tuple[int, dt.datetime]] = {}  # the last one of each device, by index
        first_ns: int | None = None
        while not stopped.is_set() and min(num_unanswered.values()) < SILENT_READINGS:
            for sample, reason in self.readings():
                index = sample.index
                if num_unanswered[index] < SILENT_READINGS and is_answered(sample):
                    first_ns = first_ns or sample.t_ns
                    num_unanswered[index], answers[index] = 0, (sample.t_ns, dt.datetime.now(dt.UTC))
                    yield sample
                    continue
                num_unanswered[index] += 1
                if num_unanswered[index] == SILENT_READINGS:
                    warn(
                        ResultWarning(code=GPU_LOST, message=_silence(index, reason, answers.get(index), first_ns))
                    )
            stopped.wait(max(1 / hz, self.least_pause_s))


def _silence(index: int, reason: str, answer: tuple[int, dt.datetime] | None, first_ns: int | None) -> str:
    if answer is None or first_ns is None:
        return f"GPU {index} answered no question during the load ({reason}): it has no samples"
    return (
        f"GPU {index} has not answered since {answer[1]:%Y-%m-%d %H:%M:%S} UTC, "
        f"{s_from_ns(answer[0] - first_ns):.1f} s after the first sample ({reason}): its samples end there"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGpus:
    """The outcome of opening the devices in one way."""

    reader: GpuReader | None = None
    """None where no visible device can be read."""
    problem: str = ""
    """The reason for that, or for reading them in another way."""
    has_driver: bool = True
    """False where this way finds no driver to ask."""
    warnings: tuple[ResultWarning, ...] = ()
    """Devices that are missing in the readings, and readings that are of more than a device."""


def opened_gpus(
    visible: str | None,
    devices: Mapping[int, Any],
    unreadable: Mapping[int, str],
    make_reader: Callable[[Sequence[Any]], GpuReader],
    mig: Mapping[str, int] | None = None,
) -> OpenedGpus:
    """A reader of those ``devices`` that ``visible`` names; each has a ``uuid``.

    They are by index, as are the reasons why others of the machine are ``unreadable``.
    """
    indices = range(len(devices) + len(unreadable))
    uuids = [devices[index].uuid if index in devices else None for index in indices]
    chosen, warnings = visible_devices(visible, uuids, mig)
    absent = {index: reason for index, reason in unreadable.items() if index in chosen}
    warnings += [
        ResultWarning(
            code=GPU_UNREADABLE,
            message=f"GPU {index} cannot be read ({reason}): its use, power, clocks and throttling are unknown",
        )
        for index, reason in absent.items()
    ]
    if readable := [index for index in chosen if index not in absent]:
        return OpenedGpus(reader=make_reader([devices[index] for index in readable]), warnings=tuple(warnings))
    reasons = "; ".join(f"GPU {index}: {reason}" for index, reason in absent.items())
    return OpenedGpus(
        warnings=tuple(warnings), problem=reasons or (NONE_VISIBLE if uuids else "it lists no device")
    )


def names_mig(visible: str | None) -> bool:
    """True for a value that names a MIG device, for which their identities are asked for."""
    return visible is not None and any(part.strip().startswith(_MIG) for part in visible.split(","))


def hides_all(visible: str | None) -> bool:
    """True for a value that hides all devices on purpose, such as an empty one."""
    return visible is not None and visible.strip() in _NONE


def visible_devices(
    visible: str | None, uuids: Sequence[str | None], mig: Mapping[str, int] | None = None
) -> tuple[tuple[int, ...], list[ResultWarning]]:
    """The positions of the devices that ``visible``, a value of CUDA_VISIBLE_DEVICES, names; all when it is None.

    With them warnings of an entry that names none, and of parts of devices. ``uuids`` are the identities of all
    devices in PCI order, which is CUDA's own on machines with equal devices; ``mig`` has the position of the device
    that each MIG device is part of. As CUDA does, an entry is an index or the beginning of an identity, and the
    first that names no device ends the list.
    """
    if visible is None:
        return tuple(range(len(uuids))), []
    is_part: dict[int, bool] = {}
    warnings: list[ResultWarning] = []
    for entry in [] if hides_all(visible) else [part.strip() for part in visible.split(",")]:
        named = _positions_of(entry, uuids, mig or {})
        if len(named) != 1:
            unknown = [str(i) for i, uuid in enumerate(uuids) if uuid is None]
            hint = f" (the identity of GPU {', '.join(unknown)} is unknown)" if unknown else ""
            says = f"names {len(named)} devices" if named else f"names none of the {len(uuids)} devices here"
            warnings.append(
                ResultWarning(
                    code="gpu-unknown-name",
                    message=f"{VARIABLE} is {visible_value(visible)}, whose entry {visible_value(entry)} "
                    f"{says}{hint}; what it and later entries mean is not sampled",
                )
            )
            break
        is_part[named[0]] = entry.startswith(_MIG)
    if whole := [str(position) for position in is_part if is_part[position]]:
        message = f"the server has a part of GPU {', '.join(whole)}, a MIG device, and samples are of the whole GPU"
        warnings.append(ResultWarning(code="gpu-partitioned", message=message))
    return tuple(is_part), warnings


def _positions_of(entry: str, uuids: Sequence[str | None], mig: Mapping[str, int]) -> list[int]:
    """Positions of the devices that one entry may mean; one for an entry that is right."""
    if re.fullmatch(r"[0-9]{1,9}", entry):
        return [int(entry)] if int(entry) < len(uuids) else []
    if entry.startswith(_MIG):
        return sorted({position for uuid, position in mig.items() if uuid.startswith(entry)})
    return [i for i, uuid in enumerate(uuids) if entry and uuid is not None and uuid.startswith(entry)]


def is_answered(sample: GpuSample) -> bool:
    """True for a reading in which the device answered at least one question."""
    return any(getattr(sample, name) is not None for name in READ_QUANTITIES)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits of ``mask``; unknown bits keep their number."""
    bits = (1 << position for position in range(mask.bit_length()))
    return tuple(_REASONS.get(bit, f"bit-{bit:#x}") for bit in bits if mask & bit)


_SLACK_BYTES: Final = 256 * MIB
"""Memory that a driver may keep without a warning: contexts of other programs come and go."""
_POLL_S: Final = 0.2
FORGOTTEN_LIMIT_S: Final = 5.0
"""Time in which the driver forgets a program that has ended."""


def memory_used_bytes(reader: GpuReader) -> dict[int, int]:
    """The memory in use of each device, by its index."""
    return {
        sample.index: sample.memory_used_bytes for sample in reader.read() if sample.memory_used_bytes is not None
    }


def wait_memory_returned(
    reader: GpuReader, before_bytes: Mapping[int, int], limit_s: float = 30.0
) -> tuple[ResultWarning, ...]:
    """Wait until no device holds more than before the run, so that the next one finds the same machine.

    Each device is checked by itself: memory that one frees must not hide memory that another still holds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        more = {i: used - before_bytes.get(i, used) for i, used in memory_used_bytes(reader).items()}
        held = {index: num_bytes for index, num_bytes in more.items() if num_bytes > _SLACK_BYTES}
        if not held:
            return ()
        if time.monotonic() >= deadline:
            text = ", ".join(f"{num_bytes // MIB} MiB of GPU {index}" for index, num_bytes in sorted(held.items()))
            return (
                ResultWarning(
                    code="gpu-memory-held",
                    message=f"{text} are still held {limit_s:g} s after the server was stopped",
                ),
            )
        time.sleep(_POLL_S)


def foreign_processes(reader: GpuReader, when: str, limit_s: float = 0.0) -> tuple[ResultWarning, ...]:
    """Warn of programs that compute on the devices while no server of ours runs, waiting until ended ones are
    forgotten.

    ``when`` continues the message after "computed on GPU 0". Only the time tells them from ours: in a container the
    process ids of the driver differ from those inside.
    """
    deadline = time.monotonic() + limit_s
    users = reader.compute_processes()
    while any(users.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        users = reader.compute_processes()
    return tuple(
        ResultWarning(
            code=FOREIGN_GPU_PROCESS,
            message=f"process {', '.join(map(process_text, pids))} computed on GPU {index} {when}",
        )
        for index, pids in users.items()
        if pids
    )


def process_text(pid: int) -> str:
    """A process by its id, and its name if it is visible from here."""
    with suppress(psutil.Error, ValueError):
        return f"{pid} ({psutil.Process(pid).name()})"
    return f"{pid}"
