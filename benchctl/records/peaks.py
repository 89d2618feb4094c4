"""Measured peaks of the devices of this machine: ``peaks.json``, and the peaks on file."""

import platform
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeAlias

from benchctl.costs.hardware import Hardware, device_or_none, hardware_for
from benchctl.errors import RecordError, UsageError
from benchctl.records.files import read_document, record_of, write_json_atomic
from benchctl.records.schema import Amount, Count, Record, ResultWarning, Size
from benchctl.records.stores import StoredFile, file_measurement, key_name, path_of, store_directory, stored_files
from benchctl.units import GIGA, TERA
from benchctl.untrusted.files import is_there

PEAKS_FILE: Final = "peaks.json"
_REMEDY: Final = "remove the file, or measure with 'benchctl micro roofline'"
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
    values: tuple[Amount, ...]
    """One for each round, in their order."""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def spread_frac(self) -> float:
        """The range of the middle half of the rounds over their median."""
        ordered = sorted(self.values)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / self.median


class MeasuredPeaks(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The rates that one device of a machine was measured to reach."""

    schema_version: int
    """Version of the result format."""
    measured_at: str
    """UTC, ISO 8601."""
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

    @property
    def was_busy(self) -> bool:
        """Other programs used the cores, so that these peaks are too low."""
        return any(warning.code == ON_BUSY_MACHINE for warning in self.warnings)

    @property
    def incomplete(self) -> str | None:
        """The reason why these peaks describe no device, if so."""
        if not all(each.values and min(each.values) > 0 for each in self.series):
            return "a kernel has no values, or one that is not positive"
        if all(best_series(self, "matmul", dtype) is None for dtype in _ARITHMETIC):
            return f"no product of {', '.join(_ARITHMETIC)} was measured"
        if best_series(self, "copy") is None and best_series(self, "read") is None:
            return "neither a copy nor a read was measured"
        return None


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


def load_peaks(results_path: Path) -> MeasuredPeaks | None:
    """The peaks in a result directory; None without any. Raises RecordError when they are damaged."""
    path = results_path / PEAKS_FILE
    return read_peaks(path, within=results_path) if is_there(path, within=results_path) else None


def read_peaks(path: Path, *, within: Path | None = None) -> MeasuredPeaks:
    """Read one file of peaks, to which no link leads from ``within``, by default its folder.

    Raises RecordError when it is damaged, SchemaVersionError when it is newer.
    """
    content = read_document(path, within=within or path.parent)
    peaks = record_of(content, path, MeasuredPeaks, remedy=_REMEDY)
    if reason := peaks.incomplete:
        raise RecordError(f"{path}: {reason}; {_REMEDY}")
    return peaks


def write_peaks(path: Path, peaks: MeasuredPeaks) -> None:
    write_json_atomic(path, peaks)


STORE_VARIABLE: Final = "BENCHCTL_PEAKS_DIR"
MEASURED: Final = "measured"
_MEASURE: Final = "'benchctl micro roofline' measures them"
StoredPeaks: TypeAlias = StoredFile[MeasuredPeaks]


def peaks_directory() -> Path:
    """``BENCHCTL_PEAKS_DIR``, or ``peaks`` below the data directory of the user."""
    return store_directory(STORE_VARIABLE, "peaks")


def key_of(peaks: MeasuredPeaks) -> str:
    """``host-device-hash8``: readable, and by its hash unique to a machine, a device and its threads."""
    return key_name((peaks.host, device_word(peaks)), (peaks.host, peaks.kind, peaks.device, peaks.threads))


def store_peaks(store: Path, peaks: MeasuredPeaks) -> Path:
    """File a measurement. Raises UsageError when it cannot be written."""
    path = path_of(store, key_of(peaks), peaks, peaks.measured_at)
    return file_measurement(path, partial(write_peaks, peaks=peaks), what="peaks", variable=STORE_VARIABLE)


def stored_peaks(store: Path) -> tuple[StoredPeaks, ...]:
    """Everything on file; see ``stored_files``."""
    return stored_files(store, read_peaks)


def newest_of_each(entries: Iterable[StoredPeaks]) -> tuple[MeasuredPeaks, ...]:
    """The measurements that count: of each key the first that can be read, in the order of ``stored_peaks``.

    One of a busy machine counts only where a key has no other.
    """
    newest: dict[str, MeasuredPeaks] = {}
    for entry in entries:
        if entry.content is None:
            continue
        best = newest.setdefault(entry.key, entry.content)
        if best.was_busy and not entry.content.was_busy:
            newest[entry.key] = entry.content
    return tuple(newest.values())


def machine_peaks(store: Path, gpus: Sequence[str], host: str | None = None) -> MeasuredPeaks | None:
    """The newest peaks of these GPUs, if they are of one kind, or of the CPU of a machine without any.

    Of a CPU with several numbers of threads, the newest measurement counts.
    """
    if len(set(gpus)) > 1:
        return None
    machine = platform.node() if host is None else host
    newest = [
        peaks
        for peaks in newest_of_each(stored_peaks(store))
        if peaks.host == machine and (peaks.device == gpus[0] if gpus else peaks.kind == "cpu")
    ]
    return max(newest, key=lambda peaks: peaks.measured_at, default=None)


def named_peaks(store: Path, name: str | None, host: str | None = None) -> MeasuredPeaks:
    """The peaks of ``name``: a key or its beginning, a name of a device; without one, those of this machine.

    A machine with peaks of a GPU and of its CPU is meant to be its GPU. Raises UsageError when there are none, or
    those of several devices.
    """
    entries, machine = stored_peaks(store), platform.node() if host is None else host
    newest = newest_of_each(entries)
    if name is None:
        matches = [peaks for peaks in newest if peaks.host == machine]
        matches = [peaks for peaks in matches if peaks.kind != "cpu"] or matches
        which = f"of {machine}"
    else:
        matches = [peaks for peaks in newest if name in {key_of(peaks), device_word(peaks), peaks.device}]
        matches = matches or [peaks for peaks in newest if key_of(peaks).startswith(name)]
        which = f"named {name!r}"
    if not matches:
        keys = ", ".join(key_of(peaks) for peaks in newest) or "nothing"
        raise UsageError(f"no measured peaks {which} are on file in {store} ({keys} is there); {_MEASURE}")
    if len(matches) > 1:
        keys = ", ".join(key_of(peaks) for peaks in matches)
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
    return hardware_of(named_peaks(peaks_directory(), name or None)).name
