"""The measured peaks that a new result directory gets a copy of."""

from collections.abc import Sequence

from benchctl.costs.hardware import hardware_or_none
from benchctl.profile.load import hardware_names
from benchctl.profile.model import Profile
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks, newest_peaks


def peaks_on_file(profile: Profile, gpus: Sequence[str]) -> MeasuredPeaks | None:
    """The peaks that apply to an experiment with ``profile`` on a machine with these GPUs; None without any.

    They are those that the profile states as measured, else the newest on file for the device of this machine. A
    profile that states other hardware is taken at its word; a simulated server has no device of this machine, and
    of a server elsewhere nothing is on file here.
    """
    stated = [name for name in hardware_names(profile) if _is_measured(name)]
    if stated:
        on_file = {hardware_of(peaks).name: peaks for peaks in newest_peaks()}
        return on_file.get(stated[0])
    if profile.engine.kind in {"sim", "attach"} or "hardware" in profile.model_fields_set:
        return None
    return machine_peaks(gpus)


def _is_measured(name: str) -> bool:
    hardware = hardware_or_none(name) if name.count(":") > 1 else None
    return hardware is not None and hardware.measured_at is not None
