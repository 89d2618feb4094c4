"""``noise.json``: the change that a machine shows when nothing changed, from an A/A experiment.

``benchctl run`` copies the noise on file for this host, engine and model into the result directory, so that a
comparison is a pure function of the directories it reads.
"""

from pathlib import Path
from typing import Final

from benchctl.records.documents import record_of
from benchctl.records.files import read_document
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.machine_measurement import MachineMeasurement
from benchctl.records.record import Amount, Count, Record
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
    return record_of(content, path, NoiseFloor, remedy=_REMEDY, first_version=1)


def write_noise(path: Path, noise: NoiseFloor) -> None:
    write_json_atomic(path, noise)
