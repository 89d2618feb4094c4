"""The peaks that the passes of a device are held against: those of its data sheet."""

from collections.abc import Mapping
from typing import Any

from benchctl.costs.hardware import hardware_or_none
from benchctl.micro.floor import Peaks


def peaks_of_device(info: Mapping[str, Any]) -> Peaks | None:
    """The peaks of the device that a worker describes; None where nobody knows them."""
    hardware = hardware_or_none(str(info["device_name"]))
    return None if hardware is None else Peaks(hardware=hardware, cache_bytes=info.get("cache_bytes") or 0)
