"""Measured peaks of the devices of this machine: ``peaks.json``, and the peaks on file."""

import platform
import re
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from benchctl.costs.hardware import Hardware, device_or_none, hardware_for
from benchctl.errors import UsageError
from benchctl.records.schema import Amount, Count, Record, ResultWarning, Size
from benchctl.records.stores import Measurement, Store, key_name, newest_of_each
from benchctl.units import GIGA, TERA

PeakQuantity: TypeAlias = Literal["matmul", "copy", "read", "launch", "all-reduce", "all-reduce-time"]
QUANTITIES: Final[dict[PeakQuantity, str]] = {
    "matmul": "FLOP/s",
    "copy": "B/s",
    "read": "B/s",
    "launch": "s",
    "all-reduce": "B/s",
    "all-reduce-time": "s",
}
"""Units of the values of each quantity."""
ON_BUSY_MACHINE: Final = "peak-on-busy-machine"
"""Code of the warning that other programs used the cores while peaks were measured."""
_ARITHMETIC: Final = ("bfloat16", "float16", "float32")
"""Arithmetic whose peak counts as that of the device, the first that was measured."""
_FASTER: Final = ("fp8", "int8")


class PeakSeries(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One kernel at one size."""

    quantity: PeakQuantity
    """``matmul``: FLOP/s of square products. ``copy`` and ``read``: bytes/s of the device's memory, of a copy both
    those read and those written. ``launch``: seconds for the smallest kernel. ``all-reduce``: bytes/s that each
    device sends in one direction; ``all-reduce-time``: seconds of a small one."""
    dtype: str | None = None
    """Arithmetic of a product."""
    setting: str
    """Side of the matrices, bytes of a buffer, or the way of launching."""
    values: Annotated[tuple[Annotated[float, Meta(gt=0, le=1e18)], ...], Meta(min_length=1)]
    """One for each round, in their order."""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread_frac(self) -> float:
        """The range of the middle half of the rounds over their median."""
        ordered = sorted(self.values)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / self.median


class MeasuredPeaks(Measurement, frozen=True, kw_only=True, omit_defaults=True):
    """The rates that one device of a machine was measured to reach."""

    host: str
    """Name of the machine."""
    kind: Literal["cpu", "cuda"]
    """Kind of the device."""
    device: str
    """Name of the device, as its driver or the kernel has it."""
    num_devices: Count = 1
    """Devices of this name in the machine."""
    threads: Count | None = None
    """Threads that computed on a CPU."""
    memory_bytes: Size | None = None
    """Memory of the device."""
    cache_bytes: Size | None = None
    """Last-level cache of the device."""
    buffer_bytes: Size
    """Size of the buffer that was read, and of each of the two of a copy."""
    torch_version: str
    """Version of torch whose kernels ran."""
    cuda_version: str | None = None
    """Version of CUDA that this torch was built for."""
    float32_precision: str | None = None
    """Torch's precision of float32 products: ``highest`` computes in 32 bits, others in fewer on some GPUs."""
    busy_frac: Amount | None = None
    """Share of the machine's cores that other programs used at the start."""
    series: tuple[PeakSeries, ...]
    """Every value that was measured."""
    unmeasured: dict[str, str] = {}
    """Arithmetic that was left out, and the reason."""
    warnings: tuple[ResultWarning, ...] = ()
    """Limits on the use of these peaks."""

    def __post_init__(self) -> None:
        """Raise ValueError where the measured values describe no device."""
        if all(best_series(self, "matmul", dtype) is None for dtype in _ARITHMETIC):
            raise ValueError(f"no product of {', '.join(_ARITHMETIC)} was measured")
        if best_series(self, "copy") is None and best_series(self, "read") is None:
            raise ValueError("neither a copy nor a read was measured")

    @property
    def key(self) -> str:
        identity = (self.host, self.kind, self.device, self.threads)
        return key_name((self.host, device_word(self)), identity)

    @property
    def was_busy(self) -> bool:
        """Other programs used the cores, so that these peaks are too low."""
        return any(warning.code == ON_BUSY_MACHINE for warning in self.warnings)


def best_series(peaks: MeasuredPeaks, quantity: PeakQuantity, dtype: str | None = None) -> PeakSeries | None:
    """The size with the best median, which is the least where a quantity is a time; None where it was not measured.

    Ways of launching are no sizes: of those, the first that was measured.
    """
    series = [each for each in peaks.series if each.quantity == quantity and each.dtype == dtype]
    if quantity == "launch":
        return series[0] if series else None
    is_time = QUANTITIES[quantity] == "s"
    return max(series, key=lambda each: -each.median if is_time else each.median, default=None)


def product_flops_per_s(peaks: MeasuredPeaks, dtype: str) -> float | None:
    """Peak FLOP/s of products in one arithmetic; None where it was not measured."""
    series = best_series(peaks, "matmul", dtype)
    return None if series is None else series.median


def bandwidth_bytes_per_s(peaks: MeasuredPeaks) -> float:
    """Bytes/s of the device's memory: of a copy and of a read, the faster one."""
    series = [best_series(peaks, "copy"), best_series(peaks, "read")]
    return max(each.median for each in series if each is not None)


def hardware_of(peaks: MeasuredPeaks) -> Hardware:
    """The device with its measured peaks in place of the data sheet's.

    Peak FLOP/s are those of bfloat16, or of the first arithmetic that was measured where that was not; slower
    arithmetic is left out. Its name states the peaks, to five digits, and looking it up gives the same
    device again, on any machine.
    """
    rates = {dtype: product_flops_per_s(peaks, dtype) for dtype in (*_ARITHMETIC, *_FASTER)}
    flops_per_s = next(rate for dtype in _ARITHMETIC if (rate := rates[dtype]) is not None)
    numbers = [flops_per_s / TERA, bandwidth_bytes_per_s(peaks) / GIGA]
    numbers += [] if peaks.memory_bytes is None else [peaks.memory_bytes / GIGA]
    parts = [device_word(peaks), *(f"{number:.5g}" for number in numbers)]
    parts += [f"{dtype}={rate / TERA:.5g}" for dtype in _FASTER if (rate := rates[dtype] or 0.0) > flops_per_s]
    if (link := best_series(peaks, "all-reduce")) is not None:
        parts.append(f"link={link.median / GIGA:.5g}")
    when = re.sub(r"[^0-9TZ]", "", peaks.measured_at)
    return hardware_for(":".join((*parts, f"measured={when}")))


def device_word(peaks: MeasuredPeaks) -> str:
    """A device's name in the hardware table, or else its own in one word; a CPU's with the number of threads."""
    sheet = data_sheet(peaks)
    if sheet is not None:
        return sheet.name
    word = re.sub(r"[^a-z0-9.]+", "-", peaks.device.lower()).strip("-") or peaks.kind
    return word if peaks.threads is None else f"{word}-{peaks.threads}-threads"


def data_sheet(peaks: MeasuredPeaks) -> Hardware | None:
    """The device as its data sheet has it; None for one that the hardware table does not have."""
    return None if peaks.kind == "cpu" else device_or_none(peaks.device)


PEAKS: Final = Store(
    "peaks", "BENCHCTL_PEAKS_DIR", MeasuredPeaks, "remove the file, or measure with 'benchctl micro roofline'"
)
MEASURED: Final = "measured"


def newest_peaks() -> list[MeasuredPeaks]:
    """The peaks on file that count: the newest of each key, of a busy machine only where a key has no other."""
    quiet_first = sorted(PEAKS.entries(), key=lambda entry: entry.content is not None and entry.content.was_busy)
    newest = sorted(newest_of_each(quiet_first), key=lambda entry: entry.key)
    return [entry.content for entry in newest if entry.content is not None]


def machine_peaks(gpus: Sequence[str]) -> MeasuredPeaks | None:
    """The newest peaks of these GPUs, if they are of one kind, or of the CPU of a machine without any.

    Of a CPU with several numbers of threads, the newest measurement counts.
    """
    if len(set(gpus)) > 1:
        return None
    here = [peaks for peaks in newest_peaks() if peaks.host == platform.node()]
    of_device = [peaks for peaks in here if (peaks.device == gpus[0] if gpus else peaks.kind == "cpu")]
    return max(of_device, key=lambda peaks: peaks.measured_at, default=None)


def named_peaks(name: str | None) -> MeasuredPeaks:
    """The peaks of ``name``: a key or its beginning, a name of a device; without one, those of this machine.

    A machine with peaks of a GPU and of its CPU is meant to be its GPU. Raises UsageError when there are none, or
    those of several devices.
    """
    newest, machine = newest_peaks(), platform.node()
    if name is None:
        matches = [peaks for peaks in newest if peaks.host == machine]
        matches = [peaks for peaks in matches if peaks.kind != "cpu"] or matches
        which = f"of {machine}"
    else:
        matches = [peaks for peaks in newest if name in {peaks.key, device_word(peaks), peaks.device}]
        matches = matches or [peaks for peaks in newest if peaks.key.startswith(name)]
        which = f"named {name!r}"
    if not matches:
        keys = ", ".join(peaks.key for peaks in newest) or "nothing"
        raise UsageError(
            f"no measured peaks {which} are on file in {PEAKS.directory} ({keys} is there); "
            "'benchctl micro roofline' measures them"
        )
    if len(matches) > 1:
        keys = ", ".join(peaks.key for peaks in matches)
        raise UsageError(f"measured peaks {which} are those of several devices: {keys}; write {MEASURED}:KEY")
    return matches[0]


def resolved_hardware(text: str) -> str:
    """A name of hardware, in which ``measured`` or ``measured:NAME`` is replaced by the name that states the peaks.

    Commands and profiles resolve it once, where they read it: what they pass on and write means the same on any
    machine, and for ever. Raises UsageError when there are no such peaks on file.
    """
    word, _, name = text.strip().partition(":")
    if word != MEASURED or ":" in name:
        return text
    return hardware_of(named_peaks(name or None)).name
