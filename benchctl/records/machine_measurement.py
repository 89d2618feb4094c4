"""A measurement of one machine that later experiments take along: when, where, and for which server and load."""

from benchctl.records.record import Record


class MachineMeasurement(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A measurement that later experiments of the same host, engine and model take along."""

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
