"""``benchctl run``: measure an experiment, or resume one."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.outcome import print_outcome, store_noise, warn
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest
    from benchctl.workload.prepare import PreparedSet

QUICK_BLOCKS = 2
A_RUN_FAILED = 5
A_RUN_IS_SUSPECT = 4
RESULTS = Path("results")


_ProfileName = Annotated[
    str | None,
    typer.Option("--profile", "-p", metavar="NAME|PATH", help="Profile of the experiment (not a torch profile)."),
]
_Engine = Annotated[str | None, typer.Option("--engine", help="Engine preset or kind instead of the profile's.")]
_Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting; repeat as needed.")
]
_Blocks = Annotated[int | None, typer.Option("--blocks", min=1, help="Number of blocks, the complete replicates.")]
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
_Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of all random choices.")]
_OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Parent of new result directories.")]
_Label = Annotated[str | None, typer.Option("--label", help="Remark for the manifest.")]
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
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line per run instead of bars, for CI.")]


def run(  # the parameters are the command line
    profile: _ProfileName = None,
    engine: _Engine = None,
    overrides: _Overrides = None,
    blocks: _Blocks = None,
    until_precision: _UntilPrecision = None,
    quick: _Quick = False,
    seed: _Seed = None,
    output_dir: _OutputDir = RESULTS,
    label: _Label = None,
    dry_run: _DryRun = False,
    step_time_model: _StepTimeModel = None,
    resume: _ResumeDir = None,
    no_store_noise: _NoStoreNoise = False,
    quiet: _Quiet = False,
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
    _check(chosen)
    if dry_run:
        _print_plan(chosen, step_time_model)
        return
    if step_time_model is not None:
        raise UsageError("--step-time-model predicts a plan: add --dry-run; 'compare' has the same option")
    lengths_from = _measure_lengths(chosen, output_dir, label, is_quiet=quiet)
    prepared = _prepare(chosen, lengths_from)
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


def _check(profile: "Profile") -> None:
    """Raise UsageError for an experiment that cannot be measured here, before it begins."""
    from benchctl.cli.commands.profiles import check_names
    from benchctl.engines.engine import engine_for
    from benchctl.profile.planning.plan import arms, undeclared_differences, variant_settings

    check_names(profile)
    engine = engine_for(profile.engine.kind)
    for variant, cell in arms(profile):
        engine.check_available(variant_settings(profile, variant, cell))
    for path in undeclared_differences(profile):
        warn(f"variants differ in {path}, which allowed_differences does not list: compare will refuse them")


def _prepare(profile: "Profile", lengths_from: Path | None = None) -> "PreparedSet":
    from benchctl.engines.engine import engine_for
    from benchctl.profile.planning.plan import arms, variant_settings
    from benchctl.workload.prepare import prepare_requests

    engine = engine_for(profile.engine.kind)
    prepared = prepare_requests(profile, lengths_from=lengths_from)
    for variant, cell in arms(profile):
        engine.check_requests(prepared.requests, variant_settings(profile, variant, cell))
    for warning in prepared.warnings:
        warn(warning.message)
    return prepared


def _print_plan(profile: "Profile", step_time_model: Path | None) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed."""
    from benchctl.cli.plan_view import print_plan
    from benchctl.measure.noise_on_file import noise_on_file
    from benchctl.workload.natural_lengths import lengths_profile, needs_lengths

    prepared = None if needs_lengths(profile) else _prepare(profile)
    on_file = noise_on_file(profile, request_set_sha256=None if prepared is None else prepared.sha256)
    for warning in on_file.warnings:
        warn(warning.message)
    if prepared is not None:
        print_plan(profile, prepared.requests, on_file.noise, step_time_model)
        return
    pilot = lengths_profile(profile)
    requests = _prepare(pilot).requests
    print(f"first the natural lengths of {len(requests)} answers, in a result directory of {pilot.name!r}:")
    print_plan(pilot, requests, None, step_time_model)
    print(f"then {profile.name!r}, every answer forced to its natural length:")
    print_plan(profile, requests, on_file.noise, step_time_model)


def _measure_lengths(profile: "Profile", output_dir: Path, label: str | None, *, is_quiet: bool) -> Path | None:
    """Measure the natural lengths that ``profile`` needs; returns their result directory, None if it needs none."""
    from benchctl.workload.natural_lengths import KEY, lengths_profile, needs_lengths

    if not needs_lengths(profile):
        return None
    pilot = lengths_profile(profile)
    prepared = _prepare(pilot)
    results = _create(pilot, prepared, output_dir, label)
    print(f"natural lengths first: {profile.baseline} once, results in {results.path}", flush=True)
    next_step = f"Set {KEY}={shlex.quote(str(results.path))} once it is measured, or start again"
    outcome = _measure(results, pilot, prepared.requests, next_step, is_quiet=is_quiet)
    if outcome.num_failed:
        warn(f"the natural lengths could not be measured, so {profile.name!r} was not begun")
        raise typer.Exit(A_RUN_FAILED)
    return results.path


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

    results = _create(profile, prepared, output_dir, label)
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


def _create(profile: "Profile", prepared: "PreparedSet", output_dir: Path, label: str | None) -> "ResultDirectory":
    from benchctl.measure.experiment import create_experiment
    from benchctl.measure.result_directory import Origin

    origin = Origin(output_root=output_dir, label=label, argv=("benchctl", *sys.argv[1:]))
    return create_experiment(profile, prepared, origin)


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
    outcome = _measure(results, profile, requests, next_step, is_quiet=is_quiet)
    print_outcome(results.path, outcome)
    if stores_noise:
        store_noise(results.path, profile)
    if outcome.num_failed:
        raise typer.Exit(A_RUN_FAILED)
    if outcome.num_suspect:
        raise typer.Exit(A_RUN_IS_SUSPECT)


def _measure(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    next_step: str,
    *,
    is_quiet: bool,
) -> "Outcome":
    """Measure the runs that are not done; ``next_step`` tells the user what to do after an interrupt."""
    from benchctl.cli.progress import experiment_progress
    from benchctl.measure.experiment import pending_runs, run_experiment
    from benchctl.profile.planning.plan import arms

    is_quiet = is_quiet or bool(os.environ.get("CI"))
    try:
        with experiment_progress(len(pending_runs(results)), len(arms(profile)), is_quiet=is_quiet) as listener:
            return run_experiment(results, profile, requests, listener)
    except KeyboardInterrupt:
        print(f"interrupted; results until now are kept. {next_step}", file=sys.stderr)
        raise
