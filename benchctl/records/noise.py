"""``noise.json``: what a machine shows when nothing changed, from an A/A experiment.

``benchctl run`` copies the noise on file for this host, engine and model into the result directory, so that a
comparison is a pure function of the directories it reads.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import RecordError
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.record import Record
from benchctl.records.schema import upgrade

NOISE_FILE: Final = "noise.json"


class MetricNoise(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of an A/A experiment."""

    log_sd: float
    """Standard deviation of the block log-ratios."""
    num_blocks: int
    floor_frac: float
    """The change that identical servers could not rule out: exp(the end of their interval farther from 0) - 1."""


class NoiseFloor(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The noise of one host, engine and model, by metric; ``source`` is the directory it was measured in."""

    schema_version: int
    measured_at: str
    source: str
    host: str
    gpus: tuple[str, ...] = ()
    engine: str
    engine_sha256: str
    """Of the engine options that all variants share."""
    engine_version: str | None = None
    model: str
    request_set_sha256: str
    metrics: dict[str, MetricNoise]


def load_noise(results_path: Path) -> NoiseFloor | None:
    """The noise that lies in a result directory; None where none does. Raises RecordError when it is damaged."""
    path = results_path / NOISE_FILE
    return read_noise(path) if path.is_file() else None


def read_noise(path: Path) -> NoiseFloor:
    """Read one file of noise. Raises RecordError when it is damaged, SchemaVersionError when it is newer."""
    try:
        document = {"schema_version": 1} | msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(upgrade(document, path), NoiseFloor)
    except (msgspec.DecodeError, OSError) as error:
        raise RecordError(f"{path}: {error}; remove the file, or measure an A/A experiment again") from error


def write_noise(path: Path, noise: NoiseFloor) -> None:
    write_json_atomic(path, noise)
