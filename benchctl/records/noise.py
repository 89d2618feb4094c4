"""``noise.json``: the change that a machine shows when nothing changed, from an A/A experiment.

``benchctl run`` copies the noise on file for this host, engine and model into the result directory, so that a
comparison is a pure function of the directories it reads.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import RecordError
from benchctl.records.files import read_document
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.record import Record
from benchctl.records.schema import upgrade
from benchctl.untrusted.files import is_there

NOISE_FILE: Final = "noise.json"


class MetricNoise(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of an A/A experiment."""

    log_sd: float
    """Standard deviation of the block log-ratios."""
    num_blocks: int
    """Blocks of the experiment."""
    floor_frac: float
    """The change that identical servers could not rule out: exp(the end of their interval farther from 0) - 1."""


class NoiseFloor(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The noise of one host, engine and model, by metric."""

    schema_version: int
    """Version of the result format."""
    measured_at: str
    """UTC, ISO 8601."""
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


def load_noise(results_path: Path) -> NoiseFloor | None:
    """The noise in a result directory; None without one. Raises RecordError when it is damaged."""
    path = results_path / NOISE_FILE
    return read_noise(path, within=results_path) if is_there(path, within=results_path) else None


def read_noise(path: Path, *, within: Path | None = None) -> NoiseFloor:
    """Read one file of noise, to which no link leads from ``within``, by default its folder.

    Raises RecordError when it is damaged, SchemaVersionError when it is newer.
    """
    content = read_document(path, within=within or path.parent)
    try:
        document = {"schema_version": 1} | msgspec.json.decode(content, type=dict[str, Any])
        return msgspec.convert(upgrade(document, path), NoiseFloor)
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: {error}; remove the file, or measure an A/A experiment again") from error


def write_noise(path: Path, noise: NoiseFloor) -> None:
    write_json_atomic(path, noise)
