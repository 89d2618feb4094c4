"""The device whose peaks a measurement is compared with."""

from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.profile.model import Profile
from benchctl.records.manifest import Manifest
from benchctl.records.record import ResultWarning


def peaks_of(profile: Profile, manifest: Manifest) -> tuple[Hardware | None, tuple[ResultWarning, ...]]:
    """The device that FLOP/s are compared with, and warnings about it.

    A simulated server has the device of the profile. Any other ran on the machine's own GPU: without one, or with
    another than the profile's, nothing is compared. A GPU that is not in the table counts as the profile's.
    """
    named = hardware_or_none(profile.hardware)
    if manifest.engine == "sim":
        return named, ()
    devices = {gpu.name: hardware_or_none(gpu.name) for gpu in manifest.gpus}
    if not devices or named is None:
        return None, ()
    others = [
        f"{name} ({device.name})" for name, device in devices.items() if device is not None and device != named
    ]
    if others:
        message = (
            f"the profile says {named.name} and the machine has {', '.join(others)}: FLOP/s are compared with no "
            "peak; set hardware to the machine's own"
        )
        return None, (ResultWarning(code="hardware-differs", message=message, where="hardware"),)
    unknown = [name for name, device in devices.items() if device is None]
    if unknown:
        message = (
            f"{', '.join(unknown)}: not in the table of devices; FLOP/s are compared with the peaks of "
            f"{named.name}, as the profile says"
        )
        return named, (ResultWarning(code="hardware-unknown", message=message, where="hardware"),)
    return named, ()
