"""The change that a machine shows when nothing changed: ``noise.json`` of A/A experiments, and the noise on file.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. A new result directory gets a copy of the noise that applies to it (``noise.json``),
and readers of results never use the store. The newest measurement of a key counts; older ones stay as history.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.records.files import read_document, record_of, write_json_atomic
from benchctl.records.schema import Amount, Count, MachineMeasurement, Record
from benchctl.records.stores import (
    StoredFile,
    file_measurement,
    find_files,
    key_name,
    path_of,
    store_directory,
    stored_files,
)
from benchctl.untrusted.files import is_there

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


STORE_VARIABLE: Final = "BENCHCTL_NOISE_DIR"
StoredNoise: TypeAlias = StoredFile[NoiseFloor]


def noise_directory() -> Path:
    """``BENCHCTL_NOISE_DIR``, or ``noise`` below the data directory of the user."""
    return store_directory(STORE_VARIABLE, "noise")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKey:
    """The source of noise: a server with its options and model, on a machine with its devices."""

    host: str
    gpus: tuple[str, ...]
    engine: str
    engine_sha256: str
    model: str

    @property
    def name(self) -> str:
        """``host-engine-model-hash8``: readable, and by its hash unique."""
        identity = (self.host, self.gpus, self.engine, self.engine_sha256, self.model)
        return key_name((self.host, self.engine, Path(self.model).name), identity)


def key_of(noise: NoiseFloor) -> NoiseKey:
    """The key under which a measurement is filed."""
    return NoiseKey(
        host=noise.host, gpus=noise.gpus, engine=noise.engine, engine_sha256=noise.engine_sha256, model=noise.model
    )


def store_noise(store: Path, noise: NoiseFloor) -> Path:
    """File a measurement. Raises UsageError when it cannot be written."""
    path = path_of(store, key_of(noise).name, noise, noise.measured_at)
    return file_measurement(path, partial(write_noise, noise=noise), what="noise", variable=STORE_VARIABLE)


def stored_noise(store: Path, key: NoiseKey | None = None) -> tuple[StoredNoise, ...]:
    """Everything on file, or all of one key; see ``stored_files``."""
    return stored_files(store, read_noise, None if key is None else key.name)


def find_noise(store: Path, name: str) -> tuple[StoredNoise, ...]:
    """The measurements of ``name``: a key, one measurement of it, or the beginning of a single key.

    Raises UsageError when there is none, or when several keys begin so.
    """
    return find_files(stored_noise(store), name, f"noise is filed under {name!r} in {store}")
