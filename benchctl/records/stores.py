"""Measurements of this machine that are on file: a file for each, in a folder for each key.

    <store>/<key>/<when>-<hash>.json

A store belongs to the user. A new result directory gets a copy of the measurement that applies to it, and readers
of results never use the store. The newest measurement of a key counts; older ones stay as history.

On file are the noise of servers, here, the peaks of devices (``peaks.py``), and durations of runs, from which plans
estimate their own.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import platformdirs

from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.files import encode, read_record, write_bytes_atomic, write_json_atomic
from benchctl.records.schema import Amount, Count, Document, Record
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, is_there, read_lines


class Measurement(Document, frozen=True, kw_only=True, omit_defaults=True):
    """A measurement that later experiments of the same machine take along."""

    measured_at: str
    """UTC, ISO 8601."""

    @property
    def key(self) -> str:
        """Name of the folder for all measurements of the same."""
        raise NotImplementedError


MeasurementT = TypeVar("MeasurementT", bound=Measurement)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile(Generic[MeasurementT]):
    """One file of a store. ``content`` is None if it cannot be read; ``problem`` then says why."""

    path: Path
    content: MeasurementT | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Name of its key."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """``key/when-hash``, which differs from those of its history."""
        return f"{self.key}/{self.path.stem}"


@dataclass(frozen=True, slots=True)
class Store(Generic[MeasurementT]):
    """The measurements of one kind; ``name`` is that of the kind, and ``variable`` can name the directory."""

    name: str
    variable: str
    kind: type[MeasurementT]
    remedy: str
    """What to do about a file that cannot be read."""

    @property
    def file(self) -> str:
        """Name of the copy in a result directory."""
        return f"{self.name}.json"

    @property
    def directory(self) -> Path:
        """The directory that ``variable`` names, or ``name`` below the data directory of the user."""
        directory = os.environ.get(self.variable)
        return Path(directory).expanduser() if directory else platformdirs.user_data_path("benchctl") / self.name

    def read(self, path: Path, *, within: Path | None = None) -> MeasurementT:
        """Read one file, to which no link leads from ``within``, by default its folder.

        Raises RecordError when it is damaged, SchemaVersionError when it is of another schema.
        """
        return read_record(path, self.kind, within=within or path.parent, remedy=self.remedy)

    def in_results(self, directory: Path) -> MeasurementT | None:
        """The copy in a result directory; None without one. Raises as ``read`` does."""
        path = directory / self.file
        return self.read(path, within=directory) if is_there(path, within=directory) else None

    def add(self, content: MeasurementT) -> Path:
        """File a measurement; the same one again is the same file. Raises UsageError where it cannot be written."""
        when, digest = re.sub(r"[^0-9TZ]", "", content.measured_at), hashlib.sha256(encode(content)).hexdigest()
        path = self.directory / content.key / f"{when}-{digest[:8]}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, content)
        except OSError as error:
            raise UsageError(
                f"{path}: the {self.name} cannot be stored ({error.strerror}); correct its permissions, or set "
                f"{self.variable} to a directory that can be written"
            ) from error
        return path

    def entries(self, key: str = "*") -> tuple[StoredFile[MeasurementT], ...]:
        """Everything on file, or all of one key: keys by name, the newest measurement of each first."""
        newest_first = sorted(self.directory.glob(f"{key}/*.json"), reverse=True)
        return tuple(map(self._entry, sorted(newest_first, key=lambda path: path.parent)))

    def _entry(self, path: Path) -> StoredFile[MeasurementT]:
        try:
            return StoredFile(path=path, content=self.read(path))
        except InvalidDataError as error:
            return StoredFile(path=path, content=None, problem=str(error))

    def find(self, name: str) -> tuple[StoredFile[MeasurementT], ...]:
        """The measurements of ``name``: a key, one measurement of it, or the beginning of a single key.

        Raises UsageError when there is none, or when several keys begin so.
        """
        entries = self.entries()
        exact = tuple(entry for entry in entries if name in {entry.key, entry.name})
        matches = exact or tuple(entry for entry in entries if entry.name.startswith(name))
        keys = sorted({entry.key for entry in matches})
        if not matches:
            on_file = ", ".join(sorted({entry.key for entry in entries})) or "nothing is on file"
            raise UsageError(f"no {self.name} is filed under {name!r} in {self.directory}; known keys: {on_file}")
        if len(keys) > 1:
            raise UsageError(f"{name!r} begins several keys: {', '.join(keys)}; write one of them out")
        return matches


def key_name(words: Iterable[str], identity: object) -> str:
    """``word-word-hash8``: readable, and unique by the hash of ``identity``."""
    readable = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word)[:40] for word in words)
    return f"{readable}-{hashlib.sha256(encode(identity)).hexdigest()[:8]}"


def newest_of_each(entries: Iterable[StoredFile[MeasurementT]]) -> tuple[StoredFile[MeasurementT], ...]:
    """The measurements that count: the first of each key among ``entries`` that can be read."""
    newest: dict[str, StoredFile[MeasurementT]] = {}
    for entry in entries:
        if entry.content is not None:
            newest.setdefault(entry.key, entry)
    return tuple(newest.values())


def remove_files(entries: Iterable[StoredFile[MeasurementT]]) -> None:
    """Delete files of a store, and keys that hold no more."""
    for entry in entries:
        entry.path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds others
            entry.path.parent.rmdir()


class NoiseKey(NamedTuple):
    """The source of noise: a server with its options and model, on a machine with its devices."""

    host: str
    gpus: tuple[str, ...]
    engine: str
    engine_sha256: str
    model: str

    @property
    def name(self) -> str:
        """``host-engine-model-hash8``: readable, and by its hash unique."""
        return key_name((self.host, self.engine, Path(self.model).name), self)


class MetricNoise(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The change that one metric showed in an A/A experiment, where nothing changed."""

    log_sd: Amount
    """Standard deviation of the block log-ratios."""
    num_blocks: Count
    """Blocks of the experiment."""
    floor_frac: float
    """The change that identical servers could not rule out: exp(the end of their interval farther from 0) - 1."""
    between: tuple[Amount, Amount, Amount] | None = None
    """Scatter between servers, and its interval of 95 %; None where each server got one load."""
    within: tuple[Amount, Amount, Amount] | None = None
    """Scatter between the loads of one server."""
    drift: tuple[float, float, float] | None = None
    """Added by each load to the next one of the same server."""


class NoiseFloor(Measurement, frozen=True, kw_only=True, omit_defaults=True):
    """The noise of one host, engine and model, by metric."""

    source: str
    """Result directory that it was measured in."""
    host: str
    """Name of the machine."""
    gpus: tuple[str, ...] = ()
    """Names of its devices."""
    engine: str
    """Kind of server software."""
    engine_sha256: str
    """SHA-256 of the engine options that all variants share."""
    engine_version: str | None = None
    """Version that the server reported."""
    model: str
    """Model that was served."""
    request_set_sha256: str
    """SHA-256 of the request set."""
    metrics: dict[str, MetricNoise]
    """Noise of each metric."""
    num_loads: Count = 1
    """Loads of each server."""
    start_s: Amount | None = None
    """Seconds of all of a run but its loads; known where servers got several."""
    load_s: Amount | None = None
    """Seconds of one load."""

    @property
    def key(self) -> str:
        return NoiseKey(self.host, self.gpus, self.engine, self.engine_sha256, self.model).name


NOISE: Final = Store(
    "noise", "BENCHCTL_NOISE_DIR", NoiseFloor, "remove the file, or measure an A/A experiment again"
)


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


def _durations_path(engine: str) -> Path:
    """A file of ``BENCHCTL_DURATIONS_DIR``, or of ``durations`` below the user's directory for state."""
    directory = os.environ.get("BENCHCTL_DURATIONS_DIR")
    store = Path(directory).expanduser() if directory else platformdirs.user_state_path("benchctl") / "durations"
    return store / f"{engine}.jsonl"


def store_duration(duration: RunDuration) -> None:
    """Append a duration; a store that cannot be written only makes later estimates worse."""
    path = _durations_path(duration.engine)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and len(lines := path.read_bytes().splitlines(keepends=True)) > _MOST_LINES:
            write_bytes_atomic(path, b"".join(lines[-_MOST_LINES // 2 :]))
        with path.open("ab") as file:
            file.write(encode(duration) + b"\n")


def stored_durations(engine: str) -> tuple[RunDuration, ...]:
    """The durations of one engine in the order of measurement; damaged lines are left out."""
    durations: list[RunDuration] = []
    with suppress(UnreadableError):
        for _, line in read_lines(_durations_path(engine)):
            with suppress(*DECODING_ERRORS):
                durations.append(msgspec.json.decode(line, type=RunDuration))
    return tuple(durations)
