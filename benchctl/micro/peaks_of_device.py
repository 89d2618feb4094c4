"""The peaks that the passes of a device are held against: those of its data sheet."""

from benchctl.costs.hardware import hardware_or_none
from benchctl.micro.floor import Peaks
from benchctl.micro.worker import WorkerInfo


def peaks_of_device(info: WorkerInfo) -> Peaks | None:
    """The peaks of the device that a worker describes; None where nobody knows them."""
    hardware = hardware_or_none(info.device_name)
    return None if hardware is None else Peaks(hardware=hardware, cache_bytes=info.cache_bytes or 0)
