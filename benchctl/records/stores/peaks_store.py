"""The peaks on file: what the devices of this machine were measured to reach.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. A new result directory gets a copy of the peaks of its device (``peaks.json``), and
readers of results never use the store. The newest measurement of a key counts, of a quiet machine if there is one;
all others stay as history.
"""

import platform
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.errors import UsageError
from benchctl.records.peaks import MeasuredPeaks, device_word, hardware_of, read_peaks, write_peaks
from benchctl.records.stores.file_store import (
    StoredFile,
    file_measurement,
    key_name,
    path_of,
    store_directory,
    stored_files,
)

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
