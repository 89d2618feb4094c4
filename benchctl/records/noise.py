"""The change that a machine shows when nothing changed: measured by A/A experiments, and on file."""

from pathlib import Path
from typing import Final, NamedTuple

from benchctl.records.schema import Amount, Count, Record
from benchctl.records.stores import Measurement, Store, key_name


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
    """One metric of an A/A experiment."""

    log_sd: Amount
    """Standard deviation of the block log-ratios."""
    num_blocks: Count
    """Blocks of the experiment."""
    floor_frac: float
    """The change that identical servers could not rule out: exp(the end of their interval farther from 0) - 1."""


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

    @property
    def key(self) -> str:
        return NoiseKey(self.host, self.gpus, self.engine, self.engine_sha256, self.model).name


NOISE: Final = Store(
    "noise", "BENCHCTL_NOISE_DIR", NoiseFloor, "remove the file, or measure an A/A experiment again"
)
