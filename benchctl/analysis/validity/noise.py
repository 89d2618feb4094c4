"""Warnings about a noise floor that was measured at another time, with another workload or version."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchctl.analysis.validity.machines import machines_of, machines_text
from benchctl.formats import first_of
from benchctl.records.loaded import LoadedResults
from benchctl.records.noise import NoiseFloor, NoiseKey
from benchctl.records.schema import ResultWarning

_MOST_NAMED: Final = 3
FRESH_DAYS: Final = 30
"""Older noise gets a warning: drivers, clocks, neighbours and temperatures change."""
_REMEDY: Final = "measure it again: benchctl run NAME --aa"


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


def other_machine_warning(noise: NoiseFloor, results: LoadedResults) -> ResultWarning | None:
    """The warning that the noise in a result directory is that of a machine which measured none of its runs.

    None where it is that of one of them, for older runs, and for a simulator, whose noise depends on no machine.
    """
    machines = machines_of(results)
    are_recorded = any(machine.blocks for machine in machines)
    if (
        results.manifest.engine == "sim"
        or not are_recorded
        or any(noise.host == machine.hostname for machine in machines)
    ):
        return None
    message = (
        f"the noise floor is that of {noise.host}, and the runs were measured on {machines_text(machines)}: it is "
        f"left out; {_REMEDY}, on that machine"
    )
    return ResultWarning(code="noise-of-another-machine", message=message, where=str(results.path))


def other_server_warning(key: NoiseKey, on_file: Sequence[NoiseFloor], command: str | None) -> ResultWarning | None:
    """The note that noise is on file for this machine, but not for the server of ``key``; None without any.

    ``command`` measures the noise of that server.
    """
    here = [noise for noise in on_file if noise.host == key.host]
    if not here:
        return None
    described = [
        f"{noise.engine}{f' {noise.engine_version}' if noise.engine_version else ''} with {noise.model} "
        f"({_misfit(noise, key)}; {Path(noise.source).parent.name} of {noise.measured_at[:10]})"
        for noise in here
    ]
    message = (
        f"no A/A experiment of this server ({key.engine} with {key.model}) is on file; of this machine there is "
        f"{first_of(described, _MOST_NAMED)}; measure the right one: {command or 'benchctl run NAME --aa'}"
    )
    return ResultWarning(code="noise-of-another-server", message=message)


def _misfit(noise: NoiseFloor, key: NoiseKey) -> str:
    """The first part of the key in which the noise belongs to another server."""
    if noise.engine != key.engine:
        return "another engine"
    if noise.model != key.model:
        return "another model"
    return "other devices" if noise.gpus != key.gpus else "other options of the server"


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
