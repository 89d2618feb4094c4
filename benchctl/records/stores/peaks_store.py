"""The peaks on file: what the devices of this machine were measured to reach.

``noise.json``: the change that a machine shows when nothing changed, from an A/A experiment.
"""

import platform
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.errors import UsageError
from benchctl.records.files import read_document, record_of, write_json_atomic
from benchctl.records.schema import Amount, Count, MachineMeasurement, Record
from benchctl.records.stores.stores import (
    MeasuredPeaks,
    StoredFile,
    device_word,
    file_measurement,
    hardware_of,
    key_name,
    path_of,
    read_peaks,
    store_directory,
    stored_files,
    write_peaks,
)
from benchctl.untrusted.files import is_there

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


NOISE_FILE: Final = "noise.json"
_REMEDY: Final = "remove the file, or measure an A/A experiment again"


class MetricNoise(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of an A/A experiment."""

    log_sd: Amount
    """Standard deviation of the block log-ratios."""
    num_blocks: Count
    """Blocks of the experiment."""
    floor_frac: float
    """The change that identical servers could not rule out: exp(the end of their interval farther from 0) - 1."""


class NoiseFloor(MachineMeasurement, frozen=True, kw_only=True, omit_defaults=True):
    """The noise of one host, engine and model, by metric."""

    metrics: dict[str, MetricNoise]
    """Noise of each metric."""


def load_noise(results_path: Path) -> NoiseFloor | None:
    """The noise in a result directory; None without one. Raises RecordError when it is damaged."""
    path = results_path / NOISE_FILE
    return read_noise(path, within=results_path) if is_there(path, within=results_path) else None


def read_noise(path: Path, *, within: Path | None = None) -> NoiseFloor:
    """Read one file of noise, to which no link leads from ``within``, by default its folder.

    Raises RecordError when it is damaged, SchemaVersionError when it is newer.
    """
    content = read_document(path, within=within or path.parent)
    return record_of(content, path, NoiseFloor, remedy=_REMEDY)


def write_noise(path: Path, noise: NoiseFloor) -> None:
    write_json_atomic(path, noise)
