"""Warnings about a noise floor that was measured at another time, with another workload or version."""

import datetime as dt
from typing import Final

from benchctl.records.noise import NoiseFloor
from benchctl.records.record import ResultWarning

FRESH_DAYS: Final = 30
"""Older noise gets a warning: drivers, clocks, neighbours and temperatures change."""
_REMEDY: Final = "measure it again: benchctl run --profile aa"


def noise_warnings(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> tuple[ResultWarning, ...]:
    """Warnings about the stored noise for an experiment; none about its workload without a request set."""
    warnings = []
    if request_set_sha256 not in {None, noise.request_set_sha256}:
        message = (
            f"the noise floor is that of the A/A experiment {noise.source}, which had another request set; larger "
            "or smaller loads scatter differently: run this workload as an A/A experiment"
        )
        warnings.append(ResultWarning(code="noise-of-another-workload", message=message))
    days = (_time(begins_at) - _time(noise.measured_at)).days
    if days > FRESH_DAYS:
        message = f"the noise floor is {days} days older than this experiment; {_REMEDY}"
        warnings.append(ResultWarning(code="noise-old", message=message))
    return tuple(warnings)


def version_warning(noise: NoiseFloor, engine_version: str | None) -> ResultWarning | None:
    """The warning that the noise is that of another engine version; None if both are equal or one is unknown."""
    if noise.engine_version is None or engine_version is None or noise.engine_version == engine_version:
        return None
    message = f"the noise floor is that of {noise.engine} {noise.engine_version}, and this is {engine_version}; "
    return ResultWarning(code="noise-of-another-version", message=message + _REMEDY)


def age_days(noise: NoiseFloor, now: dt.datetime) -> int:
    """Whole days since the noise was measured."""
    return (now - _time(noise.measured_at)).days


def _time(iso: str) -> dt.datetime:
    return dt.datetime.fromisoformat(iso)
