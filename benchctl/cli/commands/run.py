"""``benchctl run``: measure an experiment, or go on with one."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.suspects import suspects_lines
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.analysis.analyzed import AnalyzedExperiment
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest
    from benchctl.workload.prepare import PreparedSet

QUICK_BLOCKS = 2
A_RUN_FAILED = 5
A_RUN_IS_SUSPECT = 4
RESULTS = Path("results")


def run(  # the parameters are the command line
    profile: Annotated[
        str | None,
        typer.Option("--profile", "-p", metavar="NAME|PATH", help="The experiment (not a torch profile)."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine preset or kind instead of the profile's.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting; repeat as needed.")
    ] = None,
    blocks: Annotated[int | None, typer.Option("--blocks", min=1, help="Complete replicates.")] = None,
    until_precision: Annotated[
        str | None,
        typer.Option(
            "--until-precision",
            metavar="1%",
            help="End once every primary metric in every cell is known this well, at looks that are fixed "
            "beforehand; --blocks is then the most.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_BLOCKS} blocks: a screening.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of everything that is drawn.")] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where result directories are made.")
    ] = RESULTS,
    label: Annotated[str | None, typer.Option("--label", help="A remark kept in the manifest.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the ordered runs and an estimate; measure nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Do the runs of DIR that are not done.")
    ] = None,
    no_store_noise: Annotated[
        bool, typer.Option("--no-store-noise", help="Keep the noise of an A/A experiment out of the store.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="One line per run and no bars, for CI.")] = False,
) -> None:
    """Measure an experiment: every variant and cell on fresh servers, in blocks, into a result directory."""
    if quick and blocks is not None:
        raise UsageError(f"--quick means --blocks {QUICK_BLOCKS}; give one of the two")
    changes = [*(overrides or []), *_stopping(until_precision)]
    chosen = _load(profile, engine, changes, QUICK_BLOCKS if quick else blocks, seed)
    if resume is not None:
        if dry_run or label is not None or output_dir != RESULTS:
            raise UsageError(
                f"--resume goes on with {resume} as it was begun: leave out --dry-run, --label and --output-dir"
            )
        _resume(resume, chosen, is_quiet=quiet, stores_noise=not no_store_noise)
        return
    if chosen is None:
        raise UsageError("name an experiment with --profile; 'benchctl profiles list' shows them")
    _check(chosen)
    if dry_run:
        _print_plan(chosen)
        return
    lengths_from = _measure_lengths(chosen, output_dir, label, is_quiet=quiet)
    prepared = _prepare(chosen, lengths_from)
    _measure_new(chosen, prepared, output_dir, label, is_quiet=quiet, stores_noise=not no_store_noise)


def _stopping(until_precision: str | None) -> list[str]:
    """The assignment that ``--until-precision`` stands for; looks are the profile's, or four."""
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
    """Refuse what cannot be measured here before anything is."""
    from benchctl.cli.commands.profiles import check_names
    from benchctl.engines.kinds import engine_for
    from benchctl.profile.planning.plan import arms, undeclared_differences, variant_settings

    check_names(profile)
    engine = engine_for(profile.engine.kind)
    for variant, cell in arms(profile):
        engine.check_available(variant_settings(profile, variant, cell))
    for path in undeclared_differences(profile):
        _warn(f"variants differ in {path}, which allowed_differences does not list: compare will refuse them")


def _prepare(profile: "Profile", lengths_from: Path | None = None) -> "PreparedSet":
    from benchctl.engines.kinds import engine_for
    from benchctl.profile.planning.plan import arms, variant_settings
    from benchctl.workload.prepare import prepare_requests

    engine = engine_for(profile.engine.kind)
    prepared = prepare_requests(profile, lengths_from=lengths_from)
    for variant, cell in arms(profile):
        engine.check_requests(prepared.requests, variant_settings(profile, variant, cell))
    for warning in prepared.warnings:
        _warn(warning.message)
    return prepared


def _print_plan(profile: "Profile") -> None:
    """The runs in order; where natural lengths are measured first, as long as the answers are by nature."""
    from benchctl.cli.plan_view import print_plan
    from benchctl.measure.noise_on_file import noise_on_file
    from benchctl.workload.natural_lengths import lengths_profile, needs_lengths

    prepared = None if needs_lengths(profile) else _prepare(profile)
    found = noise_on_file(profile, request_set_sha256=None if prepared is None else prepared.sha256)
    for warning in found.warnings:
        _warn(warning.message)
    if prepared is not None:
        print_plan(profile, prepared.requests, found.noise)
        return
    pilot = lengths_profile(profile)
    requests = _prepare(pilot).requests
    print(f"first the natural lengths of {len(requests)} answers, in a result directory of {pilot.name!r}:")
    print_plan(pilot, requests, None)
    print(f"then {profile.name!r}, every answer forced to its natural length:")
    print_plan(profile, requests, found.noise)


def _measure_lengths(profile: "Profile", output_dir: Path, label: str | None, *, is_quiet: bool) -> Path | None:
    """Measure the natural lengths that ``profile`` needs; returns their result directory, None if it needs none."""
    from benchctl.workload.natural_lengths import KEY, lengths_profile, needs_lengths

    if not needs_lengths(profile):
        return None
    pilot = lengths_profile(profile)
    prepared = _prepare(pilot)
    results = _create(pilot, prepared, output_dir, label)
    print(f"natural lengths first: {profile.baseline} once, results in {results.path}", flush=True)
    go_on = f"Set {KEY}={shlex.quote(str(results.path))} once it is measured, or begin again"
    outcome = _measure(results, pilot, prepared.requests, go_on, is_quiet=is_quiet)
    if outcome.num_failed:
        _warn(f"the natural lengths could not be measured, so {profile.name!r} was not begun")
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
    _tell_what_it_can_show(results, profile)
    print_duration(profile, prepared.requests)
    _measure_and_tell(results, profile, prepared.requests, is_quiet=is_quiet, stores_noise=stores_noise)


def _tell_what_it_can_show(results: "ResultDirectory", profile: "Profile") -> None:
    """What so many blocks can show with the noise that was taken along, and what to doubt of that."""
    from benchctl.cli.plan_view import print_power
    from benchctl.records.noise import load_noise

    print_power(profile, load_noise(results.path))
    for warning in results.manifest().warnings:
        if warning.code.startswith("noise-"):
            _warn(warning.message)


def _create(profile: "Profile", prepared: "PreparedSet", output_dir: Path, label: str | None) -> "ResultDirectory":
    from benchctl.measure.experiment import create_experiment
    from benchctl.measure.result_directory import Origin

    origin = Origin(output_root=output_dir, label=label, argv=("benchctl", *sys.argv[1:]))
    return create_experiment(profile, prepared, origin)


def _resume(path: Path, profile: "Profile | None", *, is_quiet: bool, stores_noise: bool) -> None:
    from benchctl.measure.result_directory import reopen_experiment

    reopened = reopen_experiment(path, profile)
    print(f"going on with {path}", flush=True)
    results, requests = reopened.results, reopened.requests
    _measure_and_tell(results, reopened.profile, requests, is_quiet=is_quiet, stores_noise=stores_noise)


def _measure_and_tell(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    *,
    is_quiet: bool,
    stores_noise: bool,
) -> None:
    """Measure, say what came of it, and end with the exit code of that."""
    go_on = f"Go on with: {shlex.join(['benchctl', 'run', '--resume', str(results.path)])}"
    outcome = _measure(results, profile, requests, go_on, is_quiet=is_quiet)
    analysis = _print_results(results.path)
    _print_outcome(results.path, outcome)
    for line in suspects_lines(analysis):
        _warn(line)
    if stores_noise:
        _keep_noise(results.path, profile)
    if outcome.num_failed:
        raise typer.Exit(A_RUN_FAILED)
    if outcome.num_suspect:
        raise typer.Exit(A_RUN_IS_SUSPECT)


def _measure(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    go_on: str,
    *,
    is_quiet: bool,
) -> "Outcome":
    """Do the runs that are not done; ``go_on`` is what to do after an interrupt."""
    from benchctl.cli.progress import experiment_progress
    from benchctl.measure.experiment import pending_runs, run_experiment
    from benchctl.profile.planning.plan import arms

    is_quiet = is_quiet or bool(os.environ.get("CI"))
    try:
        with experiment_progress(len(pending_runs(results)), len(arms(profile)), is_quiet=is_quiet) as listener:
            return run_experiment(results, profile, requests, listener)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is kept. {go_on}", file=sys.stderr)
        raise


def _print_results(path: Path) -> "AnalyzedExperiment":
    """The sweep, what follows from it, and where tables and pictures are; returns what they were read from."""
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.cli.screen import print_notes, wide_console
    from benchctl.report.export import write_derived
    from benchctl.report.text.ladder_table import ladder_table
    from benchctl.report.text.tables import cells_table, sweep_table

    analysis = analyze_directory(path)
    files = write_derived(analysis)
    console = wide_console()
    for table in (cells_table(analysis), sweep_table(analysis), ladder_table(analysis)):
        if table is not None:
            console.print()
            console.print(table)
    print_notes(console, analysis)
    console.print()
    for reason in files.skipped:
        print(f"not drawn: {reason}")
    for picture in files.written:
        if picture.suffix == ".png":
            print(f"picture: {picture}")
    return analysis


def _print_outcome(path: Path, outcome: "Outcome") -> None:
    counts = {
        "done": outcome.num_done,
        "suspect": outcome.num_suspect,
        "failed": outcome.num_failed,
        "done before": outcome.num_skipped,
    }
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    print(f"runs: {said}")
    print(f"tables: {path / 'summary.csv'}, {path / 'sweep_summary.csv'}")
    print(f"look closer: benchctl show {shlex.quote(str(path))}")
    if outcome.num_failed:
        _warn(
            f"{outcome.num_failed} runs failed; do them again with: benchctl run --resume {shlex.quote(str(path))}"
        )


def _keep_noise(path: Path, profile: "Profile") -> None:
    """Store what an A/A experiment showed, and say so, or why not."""
    from benchctl.measure.noise_on_file import keep_noise

    kept = keep_noise(path, profile)
    if kept is not None and kept.path is not None:
        print(f"noise of this machine stored: benchctl noise show {kept.path.parent.name}")
    elif kept is not None:
        _warn(f"no noise is stored: {kept.reason}")


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
