"""Which clock a duration is of: the client's, or the virtual one of a simulator."""

from benchctl.records.run import RunRecord


def clock_factor(record: RunRecord) -> float:
    """Seconds of the engine's clock in one second of the client's: ``time_scale`` on a virtual clock, else 1."""
    return record.time_scale if record.clock == "virtual" else 1.0
