"""Peaks of accelerators, as their data sheets state them or as they were measured.

FLOP/s are those of dense bfloat16 matrix products with 32-bit accumulation: if a data sheet only states the
number with structured sparsity, half of it is used. Bandwidth is that of the device memory. An unknown device
is an error or None, never a guess: a utilisation of an assumed peak would look like a measurement. Peaks that the
user knows are written ``name:tflops:gb_per_s`` (``cpu:1.5:80``), with the GB of memory as a fourth part where they
matter: the way to describe a CPU, whose data sheet states no peaks. Peaks that ``benchctl micro roofline`` measured
are written in the same way, with their time as the last part (``...:measured=20260131T120000Z``): a name that
states all of them needs no file to mean something, in a profile or in a step-time model.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from benchctl.costs.model_shape import Precision
from benchctl.errors import UsageError
from benchctl.units import GIGA, TERA
from benchctl.untrusted.text import visible_value

_FASTER: Final = ("fp8", "int8", "fp4")
"""Arithmetic that some devices compute faster than bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of accelerator; ``source`` is the origin of its numbers.

    ``memory_bytes`` is None for a device that the user describes. ``fp8_flops_per_s``, ``int8_flops_per_s`` and
    ``fp4_flops_per_s`` are None where the device computes such numbers no faster than bfloat16.
    ``link_bytes_per_s`` is what one device sends to its peers at most, in one direction.
    """

    name: str
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int | None
    source: str
    fp8_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    link_bytes_per_s: float = 32 * GIGA
    """That of PCI Express 4 with 16 lanes, where nothing faster is known."""
    measured_at: str | None = None
    """Time of the measurement, as ``20260131T120000Z``; None for peaks that are not measured."""

    @property
    def device(self) -> str:
        """The kind of device: the name without its peaks where these were measured, else all of the name."""
        return self.name.partition(":")[0] if self.measured_at else self.name

    @property
    def title(self) -> str:
        """The device and the origin of its peaks: a data sheet's need no word, and a user's own are in the name."""
        if self.measured_at is None:
            return self.name
        day, time = self.measured_at[:8], self.measured_at[9:13]
        when = f"{day[:4]}-{day[4:6]}-{day[6:]} {time[:2]}:{time[2:]} UTC"
        return f"{self.device} (peaks measured {when})"

    def peak_of(self, precision: Precision) -> float:
        """FLOP/s of products in this arithmetic; those of bfloat16 if the device has no faster ones.

        A device without 4-bit products computes them in 8 bits.
        """
        rates = {
            "bfloat16": None,
            "fp8": self.fp8_flops_per_s,
            "int8": self.int8_flops_per_s,
            "fp4": self.fp4_flops_per_s or self.fp8_flops_per_s,
        }
        return rates[precision] or self.peak_flops_per_s

    def times(self, devices: int) -> "Hardware":
        """So many devices that share each layer, as one with the sum of their peaks."""
        names = (
            *("peak_flops_per_s", "bandwidth_bytes_per_s", "memory_bytes"),
            *(f"{precision}_flops_per_s" for precision in _FASTER),
        )
        sums = {name: devices * peak for name in names if (peak := getattr(self, name)) is not None}
        return replace(self, name=f"{devices} x {self.name}", **sums)


def _device(
    name: str,
    tflops_per_s: float,
    gb_per_s: float,
    memory_gb: float | None,
    source: str,
    measured_at: str | None = None,
    **further: float,
) -> Hardware:
    """A device of these TFLOP/s of bfloat16, GB/s and GB.

    ``further`` has TFLOP/s by the name of their arithmetic, and ``link`` in GB/s.
    """
    link = {"link_bytes_per_s": further.pop("link") * GIGA} if "link" in further else {}
    return Hardware(
        name=name,
        peak_flops_per_s=tflops_per_s * TERA,
        bandwidth_bytes_per_s=gb_per_s * GIGA,
        memory_bytes=None if memory_gb is None else round(memory_gb * GIGA),
        source=source,
        measured_at=measured_at,
        **link,
        **{f"{precision}_flops_per_s": rate * TERA for precision, rate in further.items()},
    )


_H100 = "NVIDIA H100 data sheet and architecture white paper"
_H200 = "NVIDIA H200 data sheet, half of the sparse figure"
_H100_NVL = "NVIDIA H100 NVL data sheet, half of the sparse figure"
_A100 = "NVIDIA A100 data sheet"
_ADA = "NVIDIA Ada architecture white paper, FP32 accumulation"
_BLACKWELL_PRO = "NVIDIA RTX Blackwell PRO architecture white paper, Workstation Edition, FP32 accumulation"
_B200 = "NVIDIA DGX B200 data sheet, an eighth, half of the sparse figure"

HARDWARE: Final[dict[str, Hardware]] = {
    device.name: device
    for device in (
        _device("h100-sxm", 989.4, 3350, 80, _H100, fp8=1978.9, int8=1978.9, link=450),
        _device("h100-pcie", 756, 2000, 80, _H100, fp8=1513, int8=1513, link=64),
        _device("h100-nvl", 835.5, 3900, 94, _H100_NVL, fp8=1670.5, int8=1670.5, link=300),
        _device("h200-sxm", 989.4, 4800, 141, _H200, fp8=1978.9, int8=1978.9, link=450),
        _device("h200-nvl", 835.5, 4800, 141, _H200, fp8=1670.5, int8=1670.5, link=450),
        _device("a100-sxm", 312, 2039, 80, _A100, int8=624, link=300),
        _device("a100-sxm-40gb", 312, 1555, 40, _A100, int8=624, link=300),
        _device("a100-pcie", 312, 1935, 80, _A100, int8=624),
        _device("a100-pcie-40gb", 312, 1555, 40, _A100, int8=624),
        _device("l40s", 362.05, 864, 48, "NVIDIA L40S data sheet", fp8=733, int8=733),
        _device("l4", 121, 300, 24, "NVIDIA L4 data sheet, half of the sparse figure", fp8=242.5, int8=242.5),
        _device("rtx-4090", 165.2, 1008, 24, _ADA, fp8=330.3, int8=660.6),
        _device("rtx-pro-6000", 503.8, 1792, 96, _BLACKWELL_PRO, fp8=1007.6, int8=1007.6, fp4=2015.2, link=64),
        _device("b200", 2250, 8000, 180, _B200, fp8=4500, int8=4500, fp4=9000, link=900),
        _device("mi300x", 1307.4, 5300, 192, "AMD Instinct MI300X data sheet", fp8=2614.9, int8=2614.9, link=448),
    )
}

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
        (r"rtx[ -]?pro[ -]?6000([ -]blackwell)?([ -](workstation|server)[ -]edition)?", "rtx-pro-6000"),
        (r"mi300x( oam)?", "mi300x"),
    )
)
"""Drivers' names of devices. Whole names, specific before general: a slice of a device (MIG), a laptop part or a
relative (GH200, L40) has other peaks and must not match."""


def hardware_or_none(name: str) -> Hardware | None:
    """The device of a table name, a driver's name or stated peaks; None for an unknown one.

    Raises UsageError for peaks (``name:tflops:gb_per_s``) that are not positive numbers.
    """
    return _stated_peaks(name) if name.count(":") >= 2 else device_or_none(name)


def device_or_none(name: str) -> Hardware | None:
    """The device of a table name or a driver's name; None for an unknown one."""
    short = name.strip().lower()
    while (cut := re.sub(r"^(nvidia|amd|geforce|instinct|tesla)[ -]+", "", short)) != short:
        short = cut
    if short in HARDWARE:
        return HARDWARE[short]
    return next((HARDWARE[device] for pattern, device in _DEVICE_NAMES if pattern.fullmatch(short)), None)


def hardware_for(name: str) -> Hardware:
    """As ``hardware_or_none``; raises UsageError with the list of known devices instead of returning None."""
    if (device := hardware_or_none(name)) is None:
        raise UsageError(
            f"unknown hardware {visible_value(name)}: name one of {', '.join(HARDWARE)}, or a whole device by its "
            "driver's name, such as 'NVIDIA H200'; any other with its peaks, as name:TFLOP/s:GB/s, or as "
            "'measured' once 'benchctl micro roofline' has measured them"
        )
    return device


def _stated_peaks(text: str) -> Hardware:
    """The device of ``name:tflops:gb_per_s[:gb][:fp8=tflops][:int8=tflops][:fp4=tflops][:link=gb_per_s]``.

    Dense bfloat16 TFLOP/s, GB/s of memory, GB of memory, TFLOP/s of other arithmetic and GB/s to peers; a last part
    ``measured=20260131T120000Z`` says when they were measured. Its name is the whole text, so that a step-time
    model of it names the peaks that its features belong to.
    """
    name, *parts = text.strip().split(":")
    further = dict(part.split("=", 1) for part in parts if "=" in part)
    measured_at = further.pop("measured", None)
    try:
        numbers = [float(part) for part in parts if "=" not in part]
        more = {key: float(value) for key, value in further.items()}
    except ValueError:
        numbers, more = [], {}
    is_positive = all(0 < number < math.inf for number in (*numbers, *more.values()))
    is_known = more.keys() <= {*_FASTER, "link"} and (
        measured_at is None or re.fullmatch(r"\d{8}T\d{6}Z", measured_at)
    )
    if not (name.strip() and len(numbers) in {2, 3} and is_positive and is_known):
        raise UsageError(
            f"hardware {visible_value(text)}: give a name and two positive numbers, TFLOP/s of bfloat16 and "
            "GB/s of memory, such as cpu:1.5:80"
        )
    memory_gb = numbers[2] if len(numbers) > 2 else None
    source = "stated by the user" if measured_at is None else f"measured at {measured_at}"
    return _device(text.strip(), numbers[0], numbers[1], memory_gb, source, measured_at, **more)
