"""What the store of noise holds for this machine, and what an experiment adds to it."""

import datetime as dt
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.planning.noise_floor import engine_sha256, is_repeated_baseline, noise_of_experiment
from benchctl.analysis.validity.noise_floor_fit import noise_warnings
from benchctl.errors import BenchctlError, NotComparableError
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.model import Profile
from benchctl.profile.planning.plan import arms
from benchctl.records.manifest import GpuInfo, Manifest
from benchctl.records.noise import NoiseFloor
from benchctl.records.noise_store import NoiseKey, newest_of_each, noise_directory, store_noise, stored_noise
from benchctl.records.record import ResultWarning

UNREADABLE = "noise-unreadable"


@dataclass(frozen=True, slots=True)
class NoiseOnFile:
    """The noise that applies to an experiment, if any, and what could not be read on the way to it."""

    noise: NoiseFloor | None
    warnings: tuple[ResultWarning, ...]


def noise_on_file(
    profile: Profile,
    gpus: Sequence[GpuInfo] | None = None,
    *,
    request_set_sha256: str | None = None,
    begins_at: str | None = None,
) -> NoiseOnFile:
    """The noise that an experiment with ``profile`` takes along, and what to doubt of it.

    It is the newest on file for the baseline's server on this machine; none for an experiment that compares
    nothing, and for an A/A experiment, which is there to find it. ``gpus`` are looked for where they are not given,
    it begins now unless that is given, and without ``request_set_sha256`` nothing is said of the workload.
    """
    if len(arms(profile)) == 1 or is_repeated_baseline(profile):
        return NoiseOnFile(None, ())
    devices = gpu_inventory() if gpus is None else gpus
    key = NoiseKey(
        host=platform.node(),
        gpus=tuple(gpu.name for gpu in devices),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        model=profile.model,
    )
    entries = stored_noise(noise_directory(), key)
    newest = newest_of_each(entries)
    warnings = [ResultWarning(code=UNREADABLE, message=entry.problem) for entry in entries if entry.problem]
    if not newest or newest[0].noise is None:
        return NoiseOnFile(None, tuple(warnings))
    noise = newest[0].noise
    now = dt.datetime.now(dt.UTC).isoformat() if begins_at is None else begins_at
    return NoiseOnFile(noise, (*warnings, *noise_warnings(noise, request_set_sha256, now)))


def noise_for(profile: Profile, manifest: Manifest) -> NoiseOnFile:
    """The noise that a new experiment takes along."""
    return noise_on_file(
        profile,
        manifest.gpus,
        request_set_sha256=manifest.request_set_sha256,
        begins_at=manifest.created_at,
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the noise of an A/A experiment: the file it is in, or why it is in none."""

    path: Path | None
    reason: str = ""


def keep_noise(path: Path, profile: Profile) -> Kept | None:
    """Store the noise of a finished experiment; None where its variants are not all the baseline."""
    if not is_repeated_baseline(profile):
        return None
    try:
        return Kept(store_noise(noise_directory(), sound_noise(load_experiment(path))))
    except BenchctlError as error:
        return Kept(None, str(error))


def sound_noise(experiment: Experiment) -> NoiseFloor:
    """The noise of an A/A experiment all of whose runs are done.

    Raises NotComparableError where one is not, or where it is no A/A experiment, and UsageError below six blocks.
    """
    results, noise = experiment.results, noise_of_experiment(experiment)
    states = {run.record.run_id: run.record.state for run in results.runs}
    unsound = [run.run_id for run in results.plan.runs if states.get(run.run_id) != "done"]
    if unsound:
        raise NotComparableError(
            f"{len(unsound)} of {len(results.plan.runs)} runs of {results.path} are not done, {unsound[0]} first "
            f"({states.get(unsound[0], 'not begun')}): a floor from what is left would be too low. Do them with "
            f"'benchctl run --resume {results.path}'"
        )
    return noise
