"""The peaks on file: what the devices of this machine were measured to reach.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. A new result directory gets a copy of the peaks of its device (``peaks.json``), and
readers of results never use the store. The newest measurement of a key counts, of a quiet machine if there is one;
all others stay as history.
"""

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from benchctl.errors import RecordError, UsageError
from benchctl.records.jsonl import encode
from benchctl.records.peaks import MeasuredPeaks, device_word, hardware_of, read_peaks, write_peaks

STORE_VARIABLE: Final = "BENCHCTL_PEAKS_DIR"
MEASURED: Final = "measured"
_MEASURE: Final = "'benchctl micro roofline' measures them"


def peaks_directory() -> Path:
    """``BENCHCTL_PEAKS_DIR``, or ``peaks`` below the data directory of the user."""
    directory = os.environ.get(STORE_VARIABLE)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_data_dir("benchctl")) / "peaks"


def key_of(peaks: MeasuredPeaks) -> str:
    """``host-device-hash8``: readable, and by its hash unique to a machine, a device and its threads."""
    identity = encode((peaks.host, peaks.kind, peaks.device, peaks.threads))
    readable = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word)[:40] for word in (peaks.host, device_word(peaks)))
    return f"{readable}-{hashlib.sha256(identity).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPeaks:
    """One file of the store. ``peaks`` is None if it cannot be read; ``problem`` then says why."""

    path: Path
    peaks: MeasuredPeaks | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Name of its key."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """``key/when-hash``, which differs from those of its history."""
        return f"{self.key}/{self.path.stem}"


def store_peaks(store: Path, peaks: MeasuredPeaks) -> Path:
    """File a measurement; the same one again is the same file. Raises UsageError when it cannot be written."""
    when = re.sub(r"[^0-9TZ]", "", peaks.measured_at)
    path = store / key_of(peaks) / f"{when}-{hashlib.sha256(encode(peaks)).hexdigest()[:8]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_peaks(path, peaks)
    except OSError as error:
        raise UsageError(
            f"{path}: the peaks cannot be stored ({error.strerror}); correct its permissions, or set "
            f"{STORE_VARIABLE} to a directory that can be written"
        ) from error
    return path


def stored_peaks(store: Path) -> tuple[StoredPeaks, ...]:
    """Everything on file: keys by name, the newest measurement of each first."""
    names = sorted(path.name for path in store.glob("*") if path.is_dir())
    return tuple(_read(path) for name in names for path in sorted((store / name).glob("*.json"), reverse=True))


def newest_of_each(entries: Iterable[StoredPeaks]) -> tuple[MeasuredPeaks, ...]:
    """The measurements that count: of each key the first that can be read, in the order of ``stored_peaks``.

    One of a busy machine counts only where a key has no other.
    """
    newest: dict[str, MeasuredPeaks] = {}
    for entry in entries:
        if entry.peaks is None:
            continue
        best = newest.setdefault(entry.key, entry.peaks)
        if best.was_busy and not entry.peaks.was_busy:
            newest[entry.key] = entry.peaks
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


def _read(path: Path) -> StoredPeaks:
    try:
        return StoredPeaks(path=path, peaks=read_peaks(path))
    except RecordError as error:
        return StoredPeaks(path=path, peaks=None, problem=str(error))
