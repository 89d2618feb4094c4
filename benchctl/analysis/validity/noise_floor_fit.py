"""What to doubt of a noise floor that was measured at another time, with another workload or version."""

import datetime as dt
from collections.abc import Iterator
from typing import Final

from benchctl.records.noise import NoiseFloor
from benchctl.records.record import ResultWarning

FRESH_DAYS: Final = 30
"""Older noise is doubted: drivers, clocks, neighbours and rooms change."""


def noise_warnings(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> tuple[ResultWarning, ...]:
    """What an experiment should doubt of the noise that it takes from the file; nothing of its workload where the
    request set is not known yet.
    """
    return tuple(_doubts(noise, request_set_sha256, begins_at))


def _doubts(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> Iterator[ResultWarning]:
    if request_set_sha256 not in {None, noise.request_set_sha256}:
        yield ResultWarning(
            code="noise-of-another-workload",
            message=f"the noise floor is that of the A/A experiment {noise.source}, which had another request set; "
            "larger or smaller loads scatter differently: measure this workload against itself for its own",
        )
    days = (_time(begins_at) - _time(noise.measured_at)).days
    if days > FRESH_DAYS:
        yield ResultWarning(
            code="noise-old",
            message=f"the noise floor is {days} days older than this experiment; measure it again: "
            "benchctl run --profile aa",
        )


def version_warning(noise: NoiseFloor, engine_version: str | None) -> ResultWarning | None:
    """The doubt that noise is that of another version of the engine; None where both are known and equal."""
    if noise.engine_version is None or engine_version is None or noise.engine_version == engine_version:
        return None
    return ResultWarning(
        code="noise-of-another-version",
        message=f"the noise floor is that of {noise.engine} {noise.engine_version}, and this is {engine_version}; "
        "measure it again: benchctl run --profile aa",
    )


def age_days(noise: NoiseFloor, now: dt.datetime) -> int:
    """Whole days since it was measured."""
    return (now - _time(noise.measured_at)).days


def _time(iso: str) -> dt.datetime:
    return dt.datetime.fromisoformat(iso)
