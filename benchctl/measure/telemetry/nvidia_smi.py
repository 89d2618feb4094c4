"""GPU readings through the program ``nvidia-smi``, for machines on which the NVML binding finds no library."""

import re
from collections.abc import Iterator, Sequence
from threading import Event
from time import monotonic_ns
from typing import Final

from msgspec.structs import asdict

from benchctl.measure.telemetry.gpu_reading import (
    NONE_VISIBLE,
    READ_QUANTITIES,
    OpenedGpus,
    SilentDevices,
    Warn,
    is_answered,
    throttle_reasons,
    unreadable_device,
)
from benchctl.measure.telemetry.smi_program import (
    NAMES,
    PROGRAM,
    Row,
    Rows,
    Stream,
    amount,
    ask,
    ask_rows,
    bit_mask,
    number,
)
from benchctl.measure.telemetry.visible_devices import names_mig, visible_devices
from benchctl.records.schema import GPU_UNREADABLE, GpuInfo, GpuSample, NodeGpu, ResultWarning
from benchctl.units import HZ_PER_MHZ, MIB
from benchctl.untrusted.text import visible_line

_INFO: Final = ("index", "uuid", "memory_total", "driver", "name")
"""Quantities of the inventory; the name is the last, because it may contain a comma."""
_SAMPLE: Final = ("index", "uuid", *(name for name in READ_QUANTITIES if name in NAMES))
_PID: Final = re.compile(r"[0-9]{1,10}")
_LISTED_GPU: Final = re.compile(r"GPU (\d{1,4}):")
_LISTED_PART: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


class SmiReader:
    """Reads the visible devices; made by ``open_smi``."""

    source: Final = PROGRAM

    def __init__(self, devices: tuple[GpuInfo, ...]) -> None:
        self._devices = devices
        self._selection = _selection(devices)
        first = ask_rows(_SAMPLE, self._selection)
        self._query = first.query
        self.unknown = first.unknown
        """Quantities for which this driver has no field."""

    def inventory(self) -> tuple[GpuInfo, ...]:
        return self._devices

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(NodeGpu(**asdict(device)) for device in self._devices)

    def read(self) -> tuple[GpuSample, ...]:
        lines = ask((*self._query.argv, *self._selection)).lines
        rows = (row for line in lines if (row := self._query.row(line)) is not None)
        return tuple(sample for row in rows if is_answered(sample := _sample(row)))

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        argv = (PROGRAM, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader", *self._selection)
        users = [re.split(r"\s*,\s*", line.strip()) for line in ask(argv).lines]
        pids = [(user[0], int(user[1])) for user in users if len(user) == 2 and _PID.fullmatch(user[1])]
        return {
            device.index: tuple(sorted(pid for uuid, pid in pids if uuid == device.uuid))
            for device in self._devices
        }

    def samples(self, hz: float, stopped: Event, warn: Warn) -> Iterator[GpuSample]:
        """Readings at ``hz`` until ``stopped`` is set.

        Where the program ends by itself, it is started again without the devices that it lists no more. Raises
        OSError where it still lists all.
        """
        silent, devices = SilentDevices(warn), self._devices
        while devices and not stopped.is_set():
            stream = Stream(self._query, _selection(devices), hz)
            yield from _answered_samples(stream, stopped, silent)
            if stopped.is_set():
                return
            listed = ask_rows(("index", "uuid"))
            left = _still_listed(devices, listed)
            if left == devices:
                raise OSError(stream.end)
            for device in devices:
                if device not in left:
                    silent.lost(device.index, listed.problem or stream.complaint or stream.end)
            devices = left


def open_smi(visible: str | None) -> OpenedGpus:
    """A reader of the devices that ``visible`` names; none where the program is absent, fails, or sees none."""
    listed = ask_rows(_INFO)
    if not listed.rows:
        return OpenedGpus(problem=listed.problem or "it lists no device", has_driver=False)
    devices = {device.index: device for device in map(_info, listed.rows)}
    count = max(devices) + 1
    uuids = [devices[index].uuid if index in devices else None for index in range(count)]
    chosen = visible_devices(visible, uuids, _parts() if names_mig(visible) else {})
    absent = [index for index in chosen.positions if index not in devices]
    reason = listed.problem or "it is missing in the list of nvidia-smi"
    warnings = (*chosen.warnings, *(unreadable_device(index, reason) for index in absent))
    selected = tuple(devices[index] for index in chosen.positions if index in devices)
    if not selected:
        return OpenedGpus(warnings=warnings, problem=NONE_VISIBLE)
    reader = SmiReader(selected)
    if listed.problem and not absent and (visible is None or chosen.problem):
        message = f"nvidia-smi says {listed.problem!r}: a device may be missing among those that are sampled"
        warnings = (*warnings, ResultWarning(code=GPU_UNREADABLE, message=message))
    return OpenedGpus(reader=reader, warnings=(*warnings, *_unknown_fields(reader)))


def _unknown_fields(reader: SmiReader) -> tuple[ResultWarning, ...]:
    """The warning that this driver has no field for some quantities."""
    if not reader.unknown:
        return ()
    driver = next((device.driver for device in reader.inventory() if device.driver), "of unknown version")
    names = ", ".join(name for quantity in reader.unknown for name in NAMES[quantity])
    message = f"nvidia-smi of driver {driver} has no field {names}: {', '.join(reader.unknown)} is unknown"
    return (ResultWarning(code="gpu-field-unknown", message=message),)


def _parts() -> dict[str, int]:
    """The index of the device that each MIG device is part of, by its identity."""
    parts: dict[str, int] = {}
    index: int | None = None
    for line in ask((PROGRAM, "-L")).lines:
        if (gpu := _LISTED_GPU.match(line)) is not None:
            index = int(gpu[1])
        elif index is not None and (part := _LISTED_PART.match(line)) is not None:
            parts[part[1]] = index
    return parts


def _selection(devices: Sequence[GpuInfo]) -> tuple[str, ...]:
    return ("-i", ",".join(device.uuid or str(device.index) for device in devices))


def _still_listed(devices: tuple[GpuInfo, ...], listed: Rows) -> tuple[GpuInfo, ...]:
    indices = {int(row["index"]) for row in listed.rows}
    return tuple(device for device in devices if device.index in indices)


def _answered_samples(stream: Stream, stopped: Event, silent: SilentDevices) -> Iterator[GpuSample]:
    """The readings of devices that answer; ``silent`` is told of the others."""
    for row in stream.rows(stopped):
        sample = _sample(row)
        if silent.is_gone(sample.index):
            continue
        if is_answered(sample):
            silent.answered(sample.index, sample.t_ns)
            yield sample
        else:
            silent.unanswered(sample.index, _refusal(row))


def _info(row: Row) -> GpuInfo:
    memory_mib = amount(row.get("memory_total"))
    return GpuInfo(
        index=int(row["index"]),
        name=_text(row.get("name")) or "unknown GPU",
        uuid=_text(row.get("uuid")),
        memory_bytes=None if memory_mib is None else round(memory_mib * MIB),
        driver=_text(row.get("driver")),
    )


def _sample(row: Row) -> GpuSample:
    percent, memory_mib = amount(row.get("utilization_frac")), amount(row.get("memory_used_bytes"))
    sm_mhz, memory_mhz = amount(row.get("sm_clock_hz")), amount(row.get("memory_clock_hz"))
    mask = bit_mask(row.get("throttle_reasons"))
    return GpuSample(
        t_ns=monotonic_ns(),
        index=int(row["index"]),
        uuid=_text(row.get("uuid")),
        source="nvidia-smi",
        utilization_frac=None if percent is None else percent / 100,
        memory_used_bytes=None if memory_mib is None else round(memory_mib * MIB),
        power_w=amount(row.get("power_w")),
        sm_clock_hz=None if sm_mhz is None else round(sm_mhz * HZ_PER_MHZ),
        memory_clock_hz=None if memory_mhz is None else round(memory_mhz * HZ_PER_MHZ),
        temperature_c=number(row.get("temperature_c")),
        throttle_reasons=None if mask is None else throttle_reasons(mask),
    )


def _text(value: str | None) -> str | None:
    """A text that the device told; None for ``[Unknown Error]`` and its like."""
    return None if not value or value.startswith("[") or value == "ERR!" else value


def _refusal(row: Row) -> str:
    """The words of a device that answers no question."""
    return next(
        (visible_line(value.strip("[]"), 200) for value in row.values() if value.startswith("[")), "no value"
    )
