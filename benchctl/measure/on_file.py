"""Noise and peaks on file for this machine: read for an experiment, the noise written after an A/A experiment."""

import datetime as dt
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.planning import engine_sha256, is_repeated_baseline, noise_of_experiment
from benchctl.analysis.validity.machines import noise_warnings, other_server_warning
from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import BenchctlError, NotComparableError
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.load import hardware_names
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms
from benchctl.records.peaks import MeasuredPeaks, hardware_of, machine_peaks, newest_peaks
from benchctl.records.schema import GpuInfo, ResultWarning
from benchctl.records.stores import NOISE, NoiseFloor, NoiseKey, newest_of_each


def peaks_on_file(profile: Profile, gpus: Sequence[str]) -> MeasuredPeaks | None:
    """The peaks that apply to an experiment with ``profile`` on a machine with these GPUs; None without any.

    They are those that the profile states as measured, else the newest on file for the device of this machine. A
    profile that states other hardware is taken at its word; a simulated server has no device of this machine, and
    of a server elsewhere nothing is on file here.
    """
    stated = [name for name in hardware_names(profile) if _is_measured(name)]
    if stated:
        on_file = {hardware_of(peaks).name: peaks for peaks in newest_peaks()}
        return on_file.get(stated[0])
    engine = ENGINES[profile.engine.kind]
    if engine.is_virtual or engine.is_attached or "hardware" in profile.model_fields_set:
        return None
    return machine_peaks(gpus)


def _is_measured(name: str) -> bool:
    hardware = hardware_or_none(name) if name.count(":") > 1 else None
    return hardware is not None and hardware.measured_at is not None


@dataclass(frozen=True, slots=True)
class NoiseOnFile:
    """The noise that applies to an experiment, if any, and the warnings about it."""

    noise: NoiseFloor | None
    warnings: tuple[ResultWarning, ...]


def noise_on_file(
    profile: Profile,
    gpus: Sequence[GpuInfo] | None = None,
    *,
    request_set_sha256: str | None = None,
    begins_at: str | None = None,
) -> NoiseOnFile:
    """The noise that applies to an experiment with ``profile``, with the warnings about it.

    It is the newest on file for the baseline's server on this machine; none for an experiment that compares
    nothing, and for an A/A experiment, which measures it. ``gpus`` defaults to those of this machine, ``begins_at``
    to now; without ``request_set_sha256`` the workload is not compared.
    """
    if len(arms(profile)) == 1 or is_repeated_baseline(profile):
        return NoiseOnFile(None, ())
    key = NoiseKey(
        host=platform.node(),
        gpus=tuple(gpu.name for gpu in (gpu_inventory() if gpus is None else gpus)),
        engine=profile.engine.kind,
        engine_sha256=engine_sha256(profile),
        model=profile.model,
    )
    entries = NOISE.entries(key.name)
    newest = newest_of_each(entries)
    warnings = [ResultWarning(code="noise-unreadable", message=entry.problem) for entry in entries if entry.problem]
    if not newest or newest[0].content is None:
        others = [entry.content for entry in newest_of_each(NOISE.entries()) if entry.content]
        misfit = other_server_warning(key, others)
        return NoiseOnFile(None, (*warnings, *([misfit] if misfit is not None else [])))
    noise = newest[0].content
    now = dt.datetime.now(dt.UTC).isoformat() if begins_at is None else begins_at
    return NoiseOnFile(noise, (*warnings, *noise_warnings(noise, request_set_sha256, now)))


def keep_noise(path: Path, profile: Profile) -> Path | str | None:
    """Store the noise of a finished experiment; returns the file, or the reason why it is not stored.

    None if the experiment's variants are not all the baseline.
    """
    if not is_repeated_baseline(profile):
        return None
    try:
        return NOISE.add(sound_noise(load_experiment(path)))
    except BenchctlError as error:
        return str(error)


def sound_noise(experiment: Experiment) -> NoiseFloor:
    """The noise of an A/A experiment.

    Raises NotComparableError if one of its runs is not done, or if it is another experiment, and UsageError below
    six blocks.
    """
    results = experiment.results
    noise = noise_of_experiment(experiment)
    states = {run.record.run_id: run.record.state for run in results.runs}
    unsound = [run.run_id for run in results.plan.runs if states.get(run.run_id) != "done"]
    if unsound:
        raise NotComparableError(
            f"{len(unsound)} of {len(results.plan.runs)} runs of {results.path} are not done, {unsound[0]} first "
            f"({states.get(unsound[0], 'not begun')}): a floor from the other runs would be too low. "
            f"Measure them with 'benchctl run --resume {results.path}'"
        )
    return noise
