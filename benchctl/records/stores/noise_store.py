"""The noise on file: results of A/A experiments on this machine, by server and model.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. A new result directory gets a copy of the noise that applies to it (``noise.json``),
and readers of results never use the store. The newest measurement of a key counts; older ones stay as history.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.records.stores.peaks_store import NoiseFloor, read_noise, write_noise
from benchctl.records.stores.stores import (
    StoredFile,
    file_measurement,
    find_files,
    key_name,
    path_of,
    store_directory,
    stored_files,
)

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
