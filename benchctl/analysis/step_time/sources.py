"""Steps by name: result directories, and tables of steps as CSV or JSON Lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.step_time.observed import observed_steps, run_label
from benchctl.analysis.step_time.saturation import saturation
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.errors import UsageError
from benchctl.interop.readers.files import MANIFEST
from benchctl.interop.readers.step_table import TableDefaults, is_step_table, read_step_table
from benchctl.records.archive.opening import is_archive
from benchctl.records.loaded import LoadedRun
from benchctl.steptime.work import ObservedSteps
from benchctl.untrusted.files import is_there

NO_DEFAULTS: Final = TableDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSources:
    """Steps of every run that could be used, and the reason for each that could not."""

    observed: tuple[ObservedSteps, ...]
    skipped: tuple[str, ...] = ()


def read_sources(
    paths: Sequence[Path], defaults: TableDefaults = NO_DEFAULTS, *, allow_suspect: bool = False
) -> StepSources:
    """The steps that ``paths`` name. Raises UsageError when a path is neither, or no run can be used."""
    observed: list[ObservedSteps] = []
    skipped: list[str] = []
    for path in paths:
        if is_step_table(path):
            observed += read_step_table(path, defaults)
        elif is_archive(path) or is_there(path / MANIFEST, within=path):
            _read_directory(path, defaults, observed, skipped, allow_suspect=allow_suspect)
        else:
            raise UsageError(
                f"{path}: neither a result directory nor a table of steps; name a directory that 'benchctl run' "
                "wrote, or a .csv or .jsonl file with one row a step (from a Parquet file, write a CSV file first)"
            )
    if not observed:
        raise UsageError("no run has steps that a model can use: " + "; ".join(skipped))
    return StepSources(observed=tuple(observed), skipped=tuple(skipped))


def _read_directory(
    path: Path, defaults: TableDefaults, observed: list[ObservedSteps], skipped: list[str], *, allow_suspect: bool
) -> None:
    hardware: Hardware | None = None if defaults.hardware is None else hardware_for(defaults.hardware)
    experiment = load_experiment(path, allow_suspect=allow_suspect)
    for run in experiment.results.runs:
        steps = _steps_of(experiment, run, hardware)
        if isinstance(steps, str):
            skipped.append(f"{run_label(experiment, run)}: {steps}")
        else:
            observed.append(steps)


def _steps_of(experiment: Experiment, run: LoadedRun, hardware: Hardware | None) -> ObservedSteps | str:
    """The steps of a run that counts and is not saturated, or the reason why a model cannot use them."""
    usability = experiment.usability(run)
    if not usability.is_usable:
        return f"{usability.excluded}"
    return saturation(run) or observed_steps(experiment, run, hardware)
