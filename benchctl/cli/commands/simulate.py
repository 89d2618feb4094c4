"""``benchctl simulate``: an experiment in virtual time, without servers and HTTP."""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchctl.cli.experiment import (
    A_RUN_FAILED,
    A_RUN_IS_SUSPECT,
    check_experiment,
    create,
    keeping,
    measure,
    measure_lengths,
    prepare_experiment,
)
from benchctl.cli.options.experiment import (
    RESULTS,
    AsJson,
    Blocks,
    EnginePreset,
    Label,
    Output,
    OutputDir,
    Overrides,
    ProfileName,
    Quiet,
    Seed,
)
from benchctl.cli.output.outcome import print_outcome
from benchctl.cli.output.prediction_intervals import print_predictions, write_predictions
from benchctl.cli.output.recorded import simulate_summary
from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_BLOCKS, MAX_THREADS

if TYPE_CHECKING:
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest

app = typer.Typer(help="Simulate an experiment in virtual time, without servers and HTTP.")


class Kept(StrEnum):
    """The records that each run keeps."""

    SUMMARY = "summary"
    REQUESTS = "requests"
    ALL = "all"


Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, max=MAX_THREADS, help="Runs at a time; by default one for each core if that pays."
    ),
]
_Keep = Annotated[
    Kept,
    typer.Option(
        "--keep",
        help="Records of each run: requests and steps, requests alone, or, of a trace of any length, only metrics.",
    ),
]


_Draws = Annotated[
    int | None,
    typer.Option(
        "--draws",
        min=2,
        max=MAX_BLOCKS,
        help="Repeat each arm with so many draws of a fitted cost model, for prediction intervals.",
    ),
]


@app.callback(invoke_without_command=True)
def simulate(  # the parameters are the command line
    context: typer.Context,
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    seed: Seed = None,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    keep: _Keep = Kept.ALL,
    jobs: Jobs = None,
    draws: _Draws = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Simulate an experiment in virtual time, without servers and HTTP: the same runs, requests and steps."""
    if context.invoked_subcommand is not None:
        if profile is not None or overrides:
            raise UsageError(f"the options of {context.invoked_subcommand} follow that word")
        return
    chosen = simulated_profile(profile, engine, overrides or [], blocks, seed)
    check_experiment(chosen)
    if keep is Kept.SUMMARY:
        if output is not None:
            raise UsageError("--keep summary writes no result directory: leave out --output, or name --output-dir")
        simulate_summary(chosen, output_dir, as_json=as_json)
        return
    is_quiet = quiet or as_json
    from benchctl.measure.simulated_run import simulate_run

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        lengths_from = measure_lengths(chosen, output_dir, label, is_quiet=is_quiet, simulate=simulate_run)
    prepared = prepare_experiment(chosen, lengths_from)
    predictions = None
    if draws is not None:  # first, because a model without draws is an error of usage
        from benchctl.measure.capacity.prediction import predict_intervals

        predictions = predict_intervals(chosen, prepared.requests, draws)
    results = create(chosen, prepared, output_dir, label, directory=output, is_simulated=True)
    if not as_json:
        print(f"results in {results.path}; nothing is measured, all times are those of a cost model", flush=True)
    outcome = _simulate(results, chosen, prepared.requests, keep, jobs, is_quiet=is_quiet)
    with keeping(results.path):
        predicted = [] if predictions is None else write_predictions(results.path, predictions)
        if as_json:
            _print_document(results.path, predicted)
        else:
            print_outcome(results.path, outcome)
            print_predictions(predictions or ())
    if outcome.num_failed:
        raise typer.Exit(A_RUN_FAILED)
    if outcome.num_suspect:
        raise typer.Exit(A_RUN_IS_SUSPECT)


def simulated_profile(
    name: str | None, engine: str | None, overrides: list[str], blocks: int | None, seed: int | None
) -> "Profile":
    """The profile that is simulated. Raises UsageError for one of a real engine, whose times nothing here knows."""
    from benchctl.profile.load import load_profile

    if name is None:
        raise UsageError("name a profile with --profile; 'benchctl profiles list' lists them")
    profile = load_profile(name, engine=engine, overrides=overrides, blocks=blocks, seed=seed)
    if profile.engine.kind != "sim":
        raise UsageError(
            f"profile {profile.name!r} is for engine {profile.engine.kind!r}, a real server: simulate it with "
            "--engine sim, and choose what stands for its times, such as --set engine.options.cost_model=roofline "
            "--set engine.options.hardware=h100-sxm"
        )
    return profile


def _simulate(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    keep: Kept,
    jobs: int | None,
    *,
    is_quiet: bool,
) -> "Outcome":
    from benchctl.measure.simulated_runs import simulated_runs

    next_step = f"See them with: {shlex.join(['benchctl', 'show', str(results.path)])}"
    with simulated_runs(
        results, profile, requests, jobs=jobs, keep="all" if keep is Kept.ALL else "requests"
    ) as simulate_run:
        return measure(results, profile, requests, next_step, is_quiet=is_quiet, simulate=simulate_run)


def _print_document(path: Path, predicted: "list[Any]") -> None:
    """Print what ``show --json`` prints, with the directory; everything derived is written as well."""
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.cli.output.screen import print_json
    from benchctl.report.documents.experiment import show_document
    from benchctl.report.export import write_derived

    analysis = analyze_directory(path)
    write_derived(analysis)
    intervals = {"predictions": predicted} if predicted else {}
    print_json({"directory": str(path), **show_document(analysis), **intervals})
