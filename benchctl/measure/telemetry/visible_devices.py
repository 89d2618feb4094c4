"""The choice of devices that the variable CUDA_VISIBLE_DEVICES makes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.records.schema import ResultWarning
from benchctl.untrusted.text import visible_value

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_NONE: Final = frozenset({"", "-1", "NoDevFiles"})
"""Values that hide all devices on purpose; the last one is Slurm's."""
_MIG: Final = "MIG-"
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[^/]+)(/\d+){2}")
"""A MIG device as drivers before 470 name it: the GPU that it is part of, its GPU and its compute instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """The devices that a value of the variable names."""

    positions: tuple[int, ...]
    """Their places in the list of all devices, in the order of the value."""
    problem: str = ""
    """The reason why some or all of what the value names is left out; empty where nothing is."""
    mig_positions: tuple[int, ...] = ()
    """Those of which the value names only a part, a MIG device."""

    @property
    def warnings(self) -> tuple[ResultWarning, ...]:
        """The warnings for a value of which something is left out, or that names parts of devices."""
        warnings = []
        if self.problem:
            message = f"{self.problem}; what it and later entries mean is not sampled"
            warnings.append(ResultWarning(code="gpu-unknown-name", message=message))
        if self.mig_positions:
            whole = ", ".join(map(str, self.mig_positions))
            message = f"the server has a part of GPU {whole}, a MIG device, and samples are of the whole GPU"
            warnings.append(ResultWarning(code="gpu-partitioned", message=message))
        return tuple(warnings)


def names_mig(visible: str | None) -> bool:
    """True for a value that names a MIG device, for which their identities are asked for."""
    return visible is not None and any(part.strip().startswith(_MIG) for part in visible.split(","))


def hides_all(visible: str | None) -> bool:
    """True for a value that hides all devices on purpose, such as an empty one."""
    return visible is not None and visible.strip() in _NONE


def visible_devices(
    visible: str | None, uuids: Sequence[str | None], mig: Mapping[str, int] | None = None
) -> VisibleDevices:
    """The devices that ``visible``, a value of CUDA_VISIBLE_DEVICES, names; all when it is None.

    ``uuids`` are the identities of all devices in PCI order, which is CUDA's own on machines with equal devices;
    ``mig`` has the position of the device that each MIG device is part of. As CUDA does, an entry is an index or
    the beginning of an identity, and the first that names no device ends the list.
    """
    if visible is None:
        return VisibleDevices(positions=tuple(range(len(uuids))))
    if hides_all(visible):
        return VisibleDevices(positions=())
    chosen: dict[int, bool] = {}
    for entry in (part.strip() for part in visible.split(",")):
        named = _positions_of(entry, uuids, mig or {})
        if len(named) != 1:
            problem = _problem(visible, entry, len(named), uuids)
            return VisibleDevices(positions=tuple(chosen), problem=problem, mig_positions=_parts(chosen))
        chosen[named[0]] = entry.startswith(_MIG)
    return VisibleDevices(positions=tuple(chosen), mig_positions=_parts(chosen))


def _parts(chosen: Mapping[int, bool]) -> tuple[int, ...]:
    return tuple(position for position, is_part in chosen.items() if is_part)


def _positions_of(entry: str, uuids: Sequence[str | None], mig: Mapping[str, int]) -> list[int]:
    """Positions of the devices that one entry may mean; one for an entry that is right."""
    if _INDEX.fullmatch(entry):
        return [int(entry)] if int(entry) < len(uuids) else []
    if entry.startswith(_MIG) and (old := _OLD_MIG.fullmatch(entry)) is None:
        return sorted({position for uuid, position in mig.items() if uuid.startswith(entry)})
    identity = old[1] if entry.startswith(_MIG) and old is not None else entry
    return [i for i, uuid in enumerate(uuids) if identity and uuid is not None and uuid.startswith(identity)]


def _problem(visible: str, entry: str, num_named: int, uuids: Sequence[str | None]) -> str:
    unknown = [str(i) for i, uuid in enumerate(uuids) if uuid is None]
    hint = f" (the identity of GPU {', '.join(unknown)} is unknown)" if unknown else ""
    says = f"names {num_named} devices" if num_named else f"names none of the {len(uuids)} devices here"
    return f"{VARIABLE} is {visible_value(visible)}, whose entry {visible_value(entry)} {says}{hint}"
