"""``benchctl run``: measure an experiment, or resume one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.experiment import (
    A_RUN_FAILED,
    A_RUN_IS_SUSPECT,
    check_experiment,
    create,
    measure,
    measure_lengths,
    prepare_experiment,
)
from benchctl.cli.experiment_options import (
    RESULTS,
    Blocks,
    EnginePreset,
    Label,
    OutputDir,
    Overrides,
    ProfileName,
    Quiet,
    Seed,
)
from benchctl.cli.outcome import print_outcome, store_noise, warn
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest
    from benchctl.workload.prepare import PreparedSet

QUICK_BLOCKS = 2


_UntilPrecision = Annotated[
    str | None,
    typer.Option(
        "--until-precision",
        metavar="1%",
        help="End when every primary metric in every cell is known this precisely, at looks that are fixed in "
        "advance; --blocks is then the maximum.",
    ),
]
_Quick = Annotated[bool, typer.Option("--quick", help=f"Screening with {QUICK_BLOCKS} blocks.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the ordered runs and an estimate; measure nothing.")
]
_StepTimeModel = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="With --dry-run: predict with this model of 'benchctl steptime fit' instead of the profile's.",
    ),
]
_ResumeDir = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Continue DIR: measure the runs that are not done.")
]
_NoStoreNoise = Annotated[
    bool, typer.Option("--no-store-noise", help="Do not store the noise of an A/A experiment.")
]


def run(  # the parameters are the command line
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    until_precision: _UntilPrecision = None,
    quick: _Quick = False,
    seed: Seed = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    dry_run: _DryRun = False,
    step_time_model: _StepTimeModel = None,
    resume: _ResumeDir = None,
    no_store_noise: _NoStoreNoise = False,
    quiet: Quiet = False,
) -> None:
    """Measure an experiment: every variant in every cell, in blocks, each run on a fresh server."""
    if quick and blocks is not None:
        raise UsageError(f"--quick means --blocks {QUICK_BLOCKS}; give one of the two")
    changes = [*(overrides or []), *_stopping(until_precision)]
    chosen = _load(profile, engine, changes, QUICK_BLOCKS if quick else blocks, seed)
    if resume is not None:
        if dry_run or label is not None or output_dir != RESULTS:
            raise UsageError(
                f"--resume continues {resume} as it was begun: leave out --dry-run, --label and --output-dir"
            )
        _resume(resume, chosen, is_quiet=quiet, stores_noise=not no_store_noise)
        return
    if chosen is None:
        raise UsageError("name a profile with --profile; 'benchctl profiles list' lists them")
    check_experiment(chosen, is_plan=dry_run)
    if dry_run:
        _print_plan(chosen, step_time_model)
        return
    if step_time_model is not None:
        raise UsageError("--step-time-model predicts a plan: add --dry-run; 'compare' has the same option")
    lengths_from = measure_lengths(chosen, output_dir, label, is_quiet=quiet)
    prepared = prepare_experiment(chosen, lengths_from)
    _measure_new(chosen, prepared, output_dir, label, is_quiet=quiet, stores_noise=not no_store_noise)


def _stopping(until_precision: str | None) -> list[str]:
    """The override that ``--until-precision`` means; the number of looks is the profile's, or four."""
    if until_precision is None:
        return []
    from benchctl.cli.commands.compare import parse_threshold

    return [f"stopping.precision={parse_threshold(until_precision, '--until-precision')!r}"]


def _load(
    name: str | None, engine: str | None, overrides: list[str], blocks: int | None, seed: int | None
) -> "Profile | None":
    if name is None:
        if engine or overrides or blocks or seed is not None:
            raise UsageError(
                "--engine, --set, --blocks, --until-precision, --quick and --seed change a profile: name it with "
                "--profile"
            )
        return None
    from benchctl.profile.load import load_profile

    return load_profile(name, engine=engine, overrides=overrides, blocks=blocks, seed=seed)


def _print_plan(profile: "Profile", step_time_model: Path | None) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed."""
    from benchctl.cli.plan_view import print_plan
    from benchctl.measure.noise_on_file import noise_on_file
    from benchctl.workload.natural_lengths import lengths_profile, needs_lengths

    prepared = None if needs_lengths(profile) else prepare_experiment(profile)
    on_file = noise_on_file(profile, request_set_sha256=None if prepared is None else prepared.sha256)
    for warning in on_file.warnings:
        warn(warning.message)
    if prepared is not None:
        print_plan(profile, prepared.requests, on_file.noise, step_time_model)
        return
    pilot = lengths_profile(profile)
    requests = prepare_experiment(pilot).requests
    print(f"first the natural lengths of {len(requests)} answers, in a result directory of {pilot.name!r}:")
    print_plan(pilot, requests, None, step_time_model)
    print(f"then {profile.name!r}, every answer forced to its natural length:")
    print_plan(profile, requests, on_file.noise, step_time_model)


def _measure_new(
    profile: "Profile",
    prepared: "PreparedSet",
    output_dir: Path,
    label: str | None,
    *,
    is_quiet: bool,
    stores_noise: bool,
) -> None:
    from benchctl.cli.plan_view import print_duration

    results = create(profile, prepared, output_dir, label)
    print(f"results in {results.path}", flush=True)
    _print_expectations(results, profile)
    print_duration(profile, prepared.requests)
    _measure_and_report(results, profile, prepared.requests, is_quiet=is_quiet, stores_noise=stores_noise)


def _print_expectations(results: "ResultDirectory", profile: "Profile") -> None:
    """Print the power of the experiment with the noise on file, and the warnings about that noise."""
    from benchctl.cli.plan_view import print_power
    from benchctl.records.noise import load_noise

    print_power(profile, load_noise(results.path))
    for warning in results.manifest().warnings:
        if warning.code.startswith("noise-"):
            warn(warning.message)


def _resume(path: Path, profile: "Profile | None", *, is_quiet: bool, stores_noise: bool) -> None:
    from benchctl.measure.result_directory import reopen_experiment

    reopened = reopen_experiment(path, profile)
    print(f"continuing {path}", flush=True)
    results, requests = reopened.results, reopened.requests
    _measure_and_report(results, reopened.profile, requests, is_quiet=is_quiet, stores_noise=stores_noise)


def _measure_and_report(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    *,
    is_quiet: bool,
    stores_noise: bool,
) -> None:
    next_step = f"Continue with: {shlex.join(['benchctl', 'run', '--resume', str(results.path)])}"
    outcome = measure(results, profile, requests, next_step, is_quiet=is_quiet)
    print_outcome(results.path, outcome)
    if stores_noise:
        store_noise(results.path, profile)
    if outcome.num_failed:
        raise typer.Exit(A_RUN_FAILED)
    if outcome.num_suspect:
        raise typer.Exit(A_RUN_IS_SUSPECT)
