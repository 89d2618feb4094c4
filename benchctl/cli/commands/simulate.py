"""``benchctl simulate``: an experiment in virtual time, without servers and HTTP.

``benchctl simulate sweep``: a table, a JSON document and a picture of the load that a setting carries.
"""

import datetime as dt
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from benchctl.cli.conduct import (
    check_experiment,
    measure,
    measure_lengths,
    measure_sizes,
    prepare_experiment,
    to_stderr,
)
from benchctl.cli.failures import exit_code_of, keeping
from benchctl.cli.options import (
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
    numbers,
    refuse_first,
)
from benchctl.cli.outcome import print_outcome
from benchctl.cli.screen import print_json, say, tell, text_console, uncollected, warn
from benchctl.errors import UsageError
from benchctl.measure.capacity import (
    ArmPrediction,
    Largest,
    LoadKind,
    Predicted,
    Sweep,
    parse_objective,
    predict_intervals,
    run_sweep,
    sweep_points,
)
from benchctl.measure.directory import Origin, renamed_when_complete
from benchctl.measure.experiment import create_simulation
from benchctl.measure.virtual import simulate_recorded, simulate_run, simulated_runs
from benchctl.profile.bounds import MAX_BLOCKS, MAX_THREADS
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.load import dump_profile, load_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.profile.settings import setting_of
from benchctl.records.directory import arm_label
from benchctl.records.files import document_bytes, write_bytes_atomic, write_json_atomic
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.models import draw_saturation
from benchctl.report.documents import show_document
from benchctl.report.table import Column, Table
from benchctl.sim.predict import profile_draft_warnings
from benchctl.sim.virtual import costs_in_words
from benchctl.units import percentage, short_number
from benchctl.workload.prepare import recorded_load

_NO_OBJECTIVE_HELD: Final = 1
_ALWAYS: Final = ("ttft_ms", "tpot_ms", "output_throughput", "mean_batch_size")
"""Metrics of every table, behind those of the limits."""
_OUTCOMES: Final = {True: "kept", False: "broken", None: "too short to tell"}
_UNITS: Final = {"rate": "requests/s", "max-concurrency": "slots"}

app = typer.Typer(add_completion=False, help="Simulate an experiment in virtual time, without servers and HTTP.")

Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, max=MAX_THREADS, help="Runs at a time; by default one for each core if that pays."
    ),
]


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    seed: Seed = None,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    keep: Annotated[
        Literal["summary", "requests", "all"],
        typer.Option(
            help="Records of each run: requests and steps, requests alone, or, of a trace of any length, only "
            "metrics."
        ),
    ] = "all",
    jobs: Jobs = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MAX_BLOCKS,
            help="Repeat each arm with so many draws of a fitted cost model, for prediction intervals.",
        ),
    ] = None,
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
    origin = Origin(output_root=output_dir, argv=("benchctl", *sys.argv[1:]), label=label, directory=output)
    if keep != "summary":
        _simulate(chosen, origin, keep, jobs, draws, is_quiet=quiet or as_json, as_json=as_json)
    elif output is None:
        _simulate_summary(chosen, output_dir, as_json=as_json)
    else:
        raise UsageError("--keep summary writes no result directory: leave out --output, or name --output-dir")


def simulated_profile(
    name: str | None, engine: str | None, overrides: list[str], blocks: int | None, seed: int | None
) -> Profile:
    """The profile that is simulated. Raises UsageError for one of a real engine, whose times nothing here knows."""
    if name is None:
        raise UsageError("name a profile with --profile; 'benchctl profiles list' lists them")
    profile = load_profile(name, engine=engine, overrides=overrides, blocks=blocks, seed=seed)
    if not is_virtual(profile.engine.kind):
        raise UsageError(
            f"profile {profile.name!r} is for engine {profile.engine.kind!r}, a real server: simulate it with "
            "--engine sim, and choose what stands for its times, such as --set engine.options.cost_model=roofline "
            "--set engine.options.hardware=h100-sxm"
        )
    if profile.loads_per_server == "auto":
        raise UsageError(
            "loads_per_server is auto, and virtual time starts no server whose cost counts: set a number"
        )
    return profile


def _simulate(
    profile: Profile,
    origin: Origin,
    keep: Literal["requests", "all"],
    jobs: int | None,
    draws: int | None,
    *,
    is_quiet: bool,
    as_json: bool,
) -> None:
    """Simulate every run, and tell the outcome; as JSON in the form of ``show --json``, with the directory."""
    with to_stderr(when=as_json):
        profile = measure_sizes(profile, origin, is_quiet=is_quiet, simulate=simulate_run)
        lengths_from = measure_lengths(profile, origin, is_quiet=is_quiet, simulate=simulate_run)
        prepared = prepare_experiment(profile, lengths_from)
        # first, because a model without draws is an error of usage
        predictions = () if draws is None else predict_intervals(profile, prepared.sets, draws)
        results = create_simulation(profile, prepared, origin)
        say(f"results in {results.path}; nothing is measured, all times are those of a cost model")
        next_step = f"See them with: {shlex.join(['benchctl', 'show', str(results.path)])}"
        with simulated_runs(results, profile, prepared.sets, jobs=jobs, keep=keep) as do_run:
            outcome = measure(results, profile, prepared.sets, next_step, is_quiet=is_quiet, simulate=do_run)
        with keeping(results.path):
            analysis, _ = print_outcome(results.path, outcome)
            predicted = _tell_predictions(results.path, predictions) if predictions else {}
    if as_json:
        print_json({"directory": str(results.path), **show_document(analysis), **predicted})
    raise typer.Exit(exit_code_of(outcome.num_failed, outcome.num_suspect))


_OF_A_TRACE: Final = (
    "num_requests",
    "wall_s",
    "output_throughput",
    "ttft_ms",
    "p99_ttft_ms",
    "tpot_ms",
    "e2el_ms",
    "p99_e2el_ms",
    "num_steps",
)


@uncollected()
def _simulate_summary(profile: Profile, output_root: Path, *, as_json: bool) -> None:
    """Simulate every run of the profile on its trace, one after the other; write ``metrics.json`` and print it."""
    if profile.num_loads > 1:
        raise UsageError(
            f"loads_per_server is {profile.num_loads}, and --keep summary simulates one load; leave out one of them"
        )
    load, warnings = recorded_load(profile), profile_draft_warnings(profile)
    runs: list[dict[str, Any]] = []
    for planned in plan_runs(profile).runs:
        metrics = simulate_recorded(profile, planned, load)
        costs = costs_in_words(variant_settings(profile, planned.variant, planned.cell))
        arm = {"run_id": planned.run_id, "arm": arm_label(planned.variant, planned.cell), "costs": costs}
        runs.append({**arm, "metrics": {name: value for name, value in metrics.items() if value is not None}})
    document = {
        "schema_version": 1,
        "profile": profile.name,
        "seed": profile.seed,
        "runs": runs,
        "warnings": msgspec.to_builtins(warnings),
    }
    files = {"metrics.json": document_bytes(document), "profile.yaml": dump_profile(profile).encode()}
    directory = _new_directory(output_root / profile.name, "summary", files)
    for warning in () if as_json else warnings:
        warn(warning.message)
    columns = (Column("run_id", "run", is_left=True), *(Column(name, name, short_number) for name in _OF_A_TRACE))
    table = Table("", columns, tuple(dict.fromkeys(_OF_A_TRACE) | run["metrics"] | run for run in runs))
    end = f"all times are simulated; every metric is in {directory / 'metrics.json'}"
    tell({"directory": str(directory), **document}, table, end, as_json=as_json)


def _new_directory(parent: Path, kind: str, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` into a new directory below ``parent``, named after now and ``kind``."""
    stem = f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}-{kind}"
    with renamed_when_complete(parent, stem) as (unfinished, finish):
        for name, content in files.items():
            write_bytes_atomic(unfinished / name, content)
        return finish()


_OF_AN_ARM: Final = ("wall_s", "output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "step_ms")


def _tell_predictions(directory: Path, predictions: Sequence[ArmPrediction]) -> dict[str, Any]:
    """Write ``predictions.json`` into the result directory and print a row for each arm; returns the document."""
    document = {"predictions": msgspec.to_builtins(predictions)}
    write_json_atomic(directory / "predictions.json", {"schema_version": 1, **document})
    level, num_draws = percentage(predictions[0].level), predictions[0].num_draws
    say(f"\nPredicted, with the interval of {level} of {num_draws} draws of the fit")
    columns = (Column("arm", "arm", is_left=True), *(Column(name, name, _interval) for name in _OF_AN_ARM))
    rows = (dict.fromkeys(_OF_AN_ARM) | dict(each.metrics) | {"arm": each.arm} for each in predictions)
    text_console().print(Table("", columns, tuple(rows)))
    return document


def _interval(metric: Predicted) -> str:
    return f"{short_number(metric.value)} [{short_number(metric.low)}, {short_number(metric.high)}]"


def _sweep_table(sweep: Sweep) -> Table:
    """A row for each load: its size, the metrics of the limits and some others, and whether it keeps the limits."""
    names = list(dict.fromkeys([*(objective.metric for objective in sweep.objectives), *_ALWAYS]))
    columns = [
        Column("arm", "arm", is_left=True),
        *([Column("size", _UNITS[sweep.kind], "{:.4g}".format)] if sweep.kind else []),
        *(Column(name, name, short_number) for name in names),
        *([Column("limits", "limits", is_left=True)] if sweep.objectives else []),
    ]
    rows = (
        {**each.metrics, "arm": each.point.label, "size": each.point.size, "limits": _OUTCOMES[each.holds]}
        for each in sweep.points
    )
    return Table("", tuple(columns), tuple(rows))


def _sweep_document(sweep: Sweep, profile: Profile) -> dict[str, Any]:
    """Everything of a sweep; ``largest`` and ``breaks`` enclose the capacity of an arm."""
    costs = {costs_in_words(variant_settings(profile, variant, cell)) for variant, cell in arms(profile)}
    return {
        "schema_version": 1,
        "profile": profile.name,
        "seed": profile.seed,
        "blocks": profile.blocks,
        "costs": " and ".join(sorted(costs)),
        "load": sweep.kind,
        "objectives": [str(objective) for objective in sweep.objectives],
        "points": [
            {
                "arm": each.point.label,
                "variant": each.point.variant,
                "cell": each.point.cell,
                "settings": each.point.settings,
                "size": each.point.size,
                "holds": each.holds if sweep.objectives else None,
                "metrics": {name: value for name, value in each.metrics.items() if value is not None},
            }
            for each in sweep.points
        ],
        "capacities": [
            {"arm": label, "largest": largest.holds, "breaks": largest.breaks}
            for label, largest in sweep.capacities.items()
        ],
        "warnings": msgspec.to_builtins(sweep.warnings),
    }


def _picture(sweep: Sweep, profile: Profile) -> bytes:
    largest = {label: each.holds for label, each in sweep.capacities.items()}
    limits = {objective.metric: objective.limit for objective in sweep.objectives}
    names = list(dict.fromkeys([*(limits or ("ttft_ms",)), "output_throughput"]))
    rows = [
        {"arm": each.point.label, "size": each.point.size or 0.0, "metric": name, "value": each.metrics[name]}
        for each in sweep.points
        for name in names
        if each.metrics[name] is not None
    ]
    spec = draw_saturation(_UNITS[sweep.kind or "rate"], rows, names, limits, largest)
    return picture_bytes(spec, f"{profile.name}: load and latency, simulated")


def _sentences(sweep: Sweep) -> list[str]:
    limits = " and ".join(map(str, sweep.objectives))
    unit = _UNITS[sweep.kind or "rate"]
    lines = [f"{label}: {_in_words(largest, unit)}" for label, largest in sweep.capacities.items()]
    if sweep.objectives and any(each.holds is None for each in sweep.points):
        lines.append(
            "too short to tell: the requests arrive within less than five latencies, or fill the slots less than "
            "five times; raise workload.num_prompts"
        )
    held = {label: largest.holds for label, largest in sweep.capacities.items() if largest.holds is not None}
    if held and len(sweep.capacities) > 1:
        best = max(held, key=held.__getitem__)
        lines.append(f"most under {limits}: {best} with {held[best]:.4g} {unit}")
    return lines


def _in_words(largest: Largest, unit: str) -> str:
    if largest.holds is None:
        least = "" if largest.breaks is None else f", not even {largest.breaks:.4g} {unit}"
        return f"no load keeps the limits{least}"
    if largest.breaks is None:
        return f"no load breaks the limits up to {largest.holds:.4g} {unit}, the most that was tried"
    return f"{largest.holds:.4g} {unit} keep the limits, {largest.breaks:.4g} break them"


@app.command("sweep")
def sweep(
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C,D,…", help="Try each value of a setting; repeat for every combination."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Requests per second of an open loop to try.")
    ] = None,
    max_concurrency: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Slots of a closed loop to try.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=LIMIT", help="Limit that a metric must keep; repeat as needed."),
    ] = None,
    largest: Annotated[
        LoadKind | None,
        typer.Option(help="Search the largest load of each arm that keeps every --slo, by bisection."),
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_BLOCKS, help="Servers of each load, whose mean is taken; they differ in noise."
        ),
    ] = 1,
    seed: Seed = None,
    output_dir: OutputDir = RESULTS,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Simulate each arm of a profile under several loads: a saturation curve, and the largest load under limits.

    Ends with 1 if no load of any arm keeps every --slo.
    """
    objectives = [parse_objective(text) for text in slo or []]
    kind, sizes = _loads(rate, max_concurrency, largest, has_limit=bool(objectives))
    profiles = [
        (differing, simulated_profile(profile, engine, settings, blocks, seed))
        for differing, settings in _combinations(overrides or [])
    ]
    of_loads = {factor for _, each in profiles for factor in each.sweep if "arrival" in setting_of(factor)}
    if kind is not None and of_loads:
        raise UsageError(
            f"--{kind} sets the load, and the profile sweeps {of_loads.pop()}; leave out one of the two"
        )
    points = sweep_points(profiles, kind, sizes)
    outcome = run_sweep(points, objectives, searches=largest is not None, jobs=jobs or os.cpu_count() or 1)
    _, first = profiles[0]
    document = _sweep_document(outcome, first)
    files = {"sweep.json": document_bytes(document)}
    if outcome.kind is not None:
        files["saturation.png"] = _picture(outcome, first)
    directory = _new_directory(output_dir / first.name, "sweep", files)
    paths = [str(directory / name) for name in files]
    for warning in () if as_json else outcome.warnings:
        warn(warning.message)
    ends = (f"all times are simulated, with {document['costs']}", f"files: {', '.join(paths)}")
    tell({"files": paths, **document}, _sweep_table(outcome), "", *_sentences(outcome), *ends, as_json=as_json)
    if objectives and not any(each.holds for each in outcome.points):
        warn("no load of any arm keeps every limit")
        raise typer.Exit(_NO_OBJECTIVE_HELD)


def _loads(
    rate: str | None, concurrency: str | None, largest: LoadKind | None, *, has_limit: bool
) -> tuple[LoadKind | None, list[float]]:
    """The swept size of the load, and its values; a search without values begins at 1."""
    text = concurrency if rate is None else rate
    kind: LoadKind = "max-concurrency" if rate is None else "rate"
    refuse_first(
        {
            "--largest needs a limit: give --slo METRIC=LIMIT, such as --slo p99_ttft_ms=200": (
                largest is not None and not has_limit
            ),
            "--rate is for an open loop and --max-concurrency for a closed one; give one of the two": (
                rate is not None and concurrency is not None
            ),
            f"--largest {largest} searches another load than the one whose values are given": (
                largest is not None and text is not None and largest != kind
            ),
        }
    )
    if text is None:
        return (None, []) if largest is None else (largest, [1.0])
    values = sorted(set(numbers(text, f"--{kind}", int if rate is None else float)))
    if values[0] <= 0:
        raise UsageError(f"--{kind} {text!r}: each must be above 0")
    return kind, list(map(float, values))


def _combinations(overrides: list[str]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every combination of the values of settings: those of it that differ between combinations, and all of it."""
    choices = [_values(override) for override in overrides]
    for combination in product(*choices):
        differing = (each for each, values in zip(combination, choices, strict=True) if len(values) > 1)
        yield tuple(differing), list(combination)


def _values(override: str) -> list[str]:
    """``a=1,2`` as ``a=1`` and ``a=2``; a list or a mapping in YAML is one value."""
    key, separator, value = override.partition("=")
    if not separator or value.lstrip().startswith(("[", "{", '"', "'")):
        return [override]
    return [f"{key}={part}" for part in value.split(",")]
