"""The common interface of GPU readers, the choice of visible devices, and the names of throttle reasons."""

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Final, Protocol

import psutil

from benchctl.records.manifest import GpuInfo
from benchctl.records.samples import GpuSample

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

    def inventory(self) -> tuple[GpuInfo, ...]:
        """The visible devices."""

    def read(self) -> tuple[GpuSample, ...]:
        """One reading of each."""

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        """Programs that compute on each device, by index; ids as the driver knows them, outside of containers."""

    def samples(self, hz: float, stopped: Event) -> Iterator[GpuSample]:
        """Readings at ``hz`` until ``stopped`` is set."""


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


def visible_positions(visible: str | None, uuids: Sequence[str | None]) -> tuple[int, ...]:
    """Positions of the devices that CUDA_VISIBLE_DEVICES names, in its order; all when it is not set.

    As CUDA does, an entry is an index or the beginning of a UUID, and the first that names no device ends the
    list. Indices are taken in PCI order, which is CUDA's own on machines with equal devices.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            named = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = [i for i, uuid in enumerate(uuids) if entry and uuid is not None and uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)
