"""Peaks of accelerators, as their data sheets state them.

FLOP/s are those of dense bfloat16 matrix products with 32-bit accumulation: if a data sheet only states the
number with structured sparsity, half of it is used. Bandwidth is that of the device memory. An unknown device
is an error or None, never a guess: a utilisation of an assumed peak would look like a measurement.
"""

import re
from dataclasses import dataclass
from typing import Final

from benchctl.errors import UsageError
from benchctl.units import GIGA, TERA


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of accelerator; ``source`` is the origin of its numbers."""

    name: str
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    source: str


def _device(name: str, tflops_per_s: float, gb_per_s: float, memory_gb: int, source: str) -> Hardware:
    return Hardware(
        name=name,
        peak_flops_per_s=tflops_per_s * TERA,
        bandwidth_bytes_per_s=gb_per_s * GIGA,
        memory_bytes=round(memory_gb * GIGA),
        source=source,
    )


_H100 = "NVIDIA H100 data sheet and architecture white paper"
_H200 = "NVIDIA H200 data sheet, half of the sparse figure"
_A100 = "NVIDIA A100 data sheet"

HARDWARE: Final[dict[str, Hardware]] = {
    device.name: device
    for device in (
        _device("h100-sxm", 989.4, 3350, 80, _H100),
        _device("h100-pcie", 756, 2000, 80, _H100),
        _device("h100-nvl", 835.5, 3900, 94, "NVIDIA H100 NVL data sheet, half of the sparse figure"),
        _device("h200-sxm", 989.4, 4800, 141, _H200),
        _device("h200-nvl", 835.5, 4800, 141, _H200),
        _device("a100-sxm", 312, 2039, 80, _A100),
        _device("a100-sxm-40gb", 312, 1555, 40, _A100),
        _device("a100-pcie", 312, 1935, 80, _A100),
        _device("a100-pcie-40gb", 312, 1555, 40, _A100),
        _device("l40s", 362.05, 864, 48, "NVIDIA L40S data sheet"),
        _device("l4", 121, 300, 24, "NVIDIA L4 data sheet, half of the sparse figure"),
        _device("rtx-4090", 165.2, 1008, 24, "NVIDIA Ada architecture white paper, FP32 accumulation"),
        _device("b200", 2250, 8000, 180, "NVIDIA DGX B200 data sheet, an eighth, half of the sparse figure"),
        _device("mi300x", 1307.4, 5300, 192, "AMD Instinct MI300X data sheet"),
    )
}

_VENDOR: Final = re.compile(r"^(nvidia|amd|geforce|instinct|tesla)[ -]+")
_DEVICE_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"h100[ -]nvl", "h100-nvl"),
        (r"h100([ -]80gb)?[ -]pcie", "h100-pcie"),
        (r"h100([ -]sxm5?)?([ -]80gb)?( hbm3)?", "h100-sxm"),
        (r"h200[ -]nvl", "h200-nvl"),
        (r"h200([ -]sxm)?([ -]141gb)?( hbm3e)?", "h200-sxm"),
        (r"a100[ -]sxm4?[ -]40gb", "a100-sxm-40gb"),
        (r"a100[ -]pcie[ -]40gb|a100[ -]40gb[ -]pcie", "a100-pcie-40gb"),
        (r"a100([ -]sxm4?)?([ -]80gb)?", "a100-sxm"),
        (r"a100[ -]80gb[ -]pcie|a100[ -]pcie([ -]80gb)?", "a100-pcie"),
        (r"rtx[ -]?4090", "rtx-4090"),
        (r"mi300x( oam)?", "mi300x"),
    )
)
"""Drivers' names of devices. Whole names, specific before general: a slice of a device (MIG), a laptop part or a
relative (GH200, L40) has other peaks and must not match."""


def hardware_or_none(name: str) -> Hardware | None:
    """The device of a table name or a driver's name; None for an unknown one."""
    short = name.strip().lower()
    while (cut := _VENDOR.sub("", short)) != short:
        short = cut
    if short in HARDWARE:
        return HARDWARE[short]
    return next((HARDWARE[device] for pattern, device in _DEVICE_NAMES if pattern.fullmatch(short)), None)


def hardware_for(name: str) -> Hardware:
    """As ``hardware_or_none``; raises UsageError with the list of known devices instead of returning None."""
    if (device := hardware_or_none(name)) is None:
        raise UsageError(
            f"unknown hardware {name!r}: name one of {', '.join(HARDWARE)}, or a whole device by its "
            "driver's name, such as 'NVIDIA H200'"
        )
    return device
