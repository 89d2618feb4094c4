"""``peaks.json``: the rates that kernels reached on a device, in place of those of its data sheet.

A store of measurements: one file for each, in a folder for each key.
Durations of runs on this machine, from which plans estimate their own.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
import platformdirs

from benchctl.costs.hardware import Hardware, device_or_none, hardware_for
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.records.files import encode, read_document, record_of, write_json_atomic
from benchctl.records.schema import Amount, Count, Record, ResultWarning, Size
from benchctl.units import GIGA, TERA
from benchctl.untrusted.files import is_there
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, read_lines

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


RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile(Generic[RecordT]):
    """One file of a store. ``content`` is None if it cannot be read; ``problem`` then says why."""

    path: Path
    content: RecordT | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Name of its key."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """``key/when-hash``, which differs from those of its history."""
        return f"{self.key}/{self.path.stem}"


def store_directory(variable: str, name: str) -> Path:
    """The directory that an environment variable names, or ``name`` below the data directory of the user."""
    directory = os.environ.get(variable)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_data_dir("benchctl")) / name


def key_name(words: Iterable[str], identity: object) -> str:
    """``word-word-hash8``: readable, and unique by the hash of ``identity``."""
    readable = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word)[:40] for word in words)
    return f"{readable}-{hashlib.sha256(encode(identity)).hexdigest()[:8]}"


def path_of(store: Path, key: str, content: Record, measured_at: str) -> Path:
    """The file of a measurement; the same one again is the same file."""
    when = re.sub(r"[^0-9TZ]", "", measured_at)
    return store / key / f"{when}-{hashlib.sha256(encode(content)).hexdigest()[:8]}.json"


def file_measurement(path: Path, write: Callable[[Path], None], *, what: str, variable: str) -> Path:
    """Write a file of a store. Raises UsageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UsageError(
            f"{path}: the {what} cannot be stored ({error.strerror}); correct its permissions, or set {variable} "
            "to a directory that can be written"
        ) from error
    return path


def stored_files(
    store: Path, read: Callable[[Path], RecordT], key: str | None = None
) -> tuple[StoredFile[RecordT], ...]:
    """Everything on file, or all of one key: keys by name, the newest measurement of each first."""
    names = sorted(path.name for path in store.glob("*") if path.is_dir()) if key is None else [key]
    paths = [path for name in names for path in sorted((store / name).glob("*.json"), reverse=True)]
    return tuple(_stored_file(path, read) for path in paths)


def _stored_file(path: Path, read: Callable[[Path], RecordT]) -> StoredFile[RecordT]:
    try:
        return StoredFile(path=path, content=read(path))
    except InvalidDataError as error:
        return StoredFile(path=path, content=None, problem=str(error))


def newest_of_each(entries: Iterable[StoredFile[RecordT]]) -> tuple[StoredFile[RecordT], ...]:
    """The measurements that count: the first of each key in the order of ``stored_files`` that can be read."""
    newest: dict[str, StoredFile[RecordT]] = {}
    for entry in entries:
        if entry.content is not None:
            newest.setdefault(entry.key, entry)
    return tuple(newest.values())


def find_files(
    entries: tuple[StoredFile[RecordT], ...], name: str, missing: str
) -> tuple[StoredFile[RecordT], ...]:
    """The measurements of ``name``: a key, one measurement of it, or the beginning of a single key.

    Raises UsageError when there is none, which ``missing`` says behind a "no", or when several keys begin so.
    """
    exact = tuple(entry for entry in entries if name in {entry.key, entry.name})
    matches = exact or tuple(entry for entry in entries if entry.name.startswith(name))
    keys = sorted({entry.key for entry in matches})
    if not matches:
        stored_keys = ", ".join(sorted({entry.key for entry in entries})) or "nothing is on file"
        raise UsageError(f"no {missing}; known keys: {stored_keys}")
    if len(keys) > 1:
        raise UsageError(f"{name!r} begins several keys: {', '.join(keys)}; write one of them out")
    return matches


def remove_files(entries: Iterable[StoredFile[RecordT]]) -> int:
    """Delete files of the store, and keys that hold no more; returns how many files."""
    removed = 0
    for entry in entries:
        entry.path.unlink(missing_ok=True)
        removed += 1
        if not any(entry.path.parent.glob("*.json")):
            shutil.rmtree(entry.path.parent, ignore_errors=True)
    return removed


STORE_VARIABLE: Final = "BENCHCTL_DURATIONS_DIR"
_MOST_LINES: Final = 2000
"""Limit of a file, which is then cut to the newest half."""


class RunDuration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The duration of one run, and its conditions. Times are in seconds."""

    measured_at: str
    host: str
    gpus: tuple[str, ...] = ()
    engine: str
    model: str
    server_sha256: str
    """SHA-256 of the options of the run's server."""
    settings_sha256: str
    """SHA-256 of all settings of the run's requests and server."""
    overhead_s: Amount
    """Everything but the load: the server's start, warm-up and end, and reading its records."""
    token_s: Amount
    """Time from one token of a sequence to the next, prompts included, from the duration of the load."""
    num_sequences: Count
    """Largest number of answers in progress at once."""


def durations_directory() -> Path:
    """``BENCHCTL_DURATIONS_DIR``, or ``durations`` below the user's directory for state."""
    directory = os.environ.get(STORE_VARIABLE)
    return (
        Path(directory).expanduser() if directory else Path(platformdirs.user_state_dir("benchctl")) / "durations"
    )


def store_duration(store: Path, duration: RunDuration) -> None:
    """Append a duration; a store that cannot be written only makes later estimates worse."""
    path = store / f"{duration.engine}.jsonl"
    with suppress(OSError):
        store.mkdir(parents=True, exist_ok=True)
        if path.is_file() and len(lines := path.read_bytes().splitlines(keepends=True)) > _MOST_LINES:
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_bytes(b"".join(lines[-_MOST_LINES // 2 :]))
            partial.replace(path)
        with path.open("ab") as file:
            file.write(encode(duration) + b"\n")


def stored_durations(store: Path, engine: str) -> tuple[RunDuration, ...]:
    """The durations of one engine in the order of measurement; damaged lines are left out."""
    durations: list[RunDuration] = []
    with suppress(UnreadableError):
        for _, line in read_lines(store / f"{engine}.jsonl"):
            with suppress(*DECODING_ERRORS):
                durations.append(msgspec.json.decode(line, type=RunDuration))
    return tuple(durations)
