"""``benchctl run``: measure an experiment, resume one, or add blocks to one."""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.experiment import (
    A_RUN_FAILED,
    A_RUN_IS_SUSPECT,
    check_experiment,
    check_gpu,
    check_machine,
    create,
    keeping,
    measure,
    measure_lengths,
    prepare_experiment,
    share_kv_memory,
    tokenizer_of,
)
from benchctl.cli.options.experiment import (
    RESULTS,
    Blocks,
    EnginePreset,
    Label,
    Output,
    OutputDir,
    Overrides,
    ProfileArgument,
    ProfileName,
    Quiet,
    Seed,
    chosen_profile,
)
from benchctl.cli.output.outcome import print_outcome, store_noise, warn
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
    bool,
    typer.Option(
        "--dry-run",
        help="Print the ordered runs and an estimate; measure nothing. With --resume: the runs that are left.",
    ),
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
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Continue DIR: measure the runs that are not done. With --blocks N, add blocks until there are N; "
        "each addition is a look at the results and widens the intervals.",
    ),
]
_MeasureNoise = Annotated[
    bool,
    typer.Option(
        "--aa",
        help="Measure the noise of this experiment instead: its baseline against itself, with the same server, "
        "model and workload.",
    ),
]
_NoStoreNoise = Annotated[
    bool, typer.Option("--no-store-noise", help="Do not store the noise of an A/A experiment.")
]
_KeepRawLogs = Annotated[
    bool,
    typer.Option(
        "--keep-raw-logs",
        help="Keep each server's log with its secrets, too: server.raw.log, which only you may read. Delete it "
        "before you share the results.",
    ),
]
_AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document at the end: directory, page, runs by state, verdicts, warnings; all else "
        "goes to stderr.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manner:
    """Choices about the outcome: its form on the screen, and whether noise is stored."""

    is_quiet: bool
    stores_noise: bool
    as_json: bool
    keeps_raw_logs: bool


def run(  # the parameters are the command line
    name: ProfileArgument = None,
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    until_precision: _UntilPrecision = None,
    quick: _Quick = False,
    seed: Seed = None,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    dry_run: _DryRun = False,
    step_time_model: _StepTimeModel = None,
    resume: _ResumeDir = None,
    measures_noise: _MeasureNoise = False,
    no_store_noise: _NoStoreNoise = False,
    keep_raw_logs: _KeepRawLogs = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Measure an experiment: every variant in every cell, in blocks, each run on a fresh server.

    It ends with the verdict on every arm, which does not change the exit code: 0 every run is done, 4 a run is
    suspect, 5 a run failed. The verdict is the exit code of 'benchctl compare DIR'. Example: benchctl run ci-smoke
    """
    if quick and blocks is not None:
        raise UsageError(f"--quick means --blocks {QUICK_BLOCKS}; give one of the two")
    if as_json and dry_run:
        raise UsageError("--json prints what was measured, and --dry-run measures nothing; leave one of them out")
    profile_name, manner = (
        chosen_profile(name, profile),
        _Manner(
            is_quiet=quiet or as_json,
            stores_noise=not no_store_noise,
            as_json=as_json,
            keeps_raw_logs=keep_raw_logs,
        ),
    )
    num_blocks, changes = QUICK_BLOCKS if quick else blocks, [*(overrides or []), *_stopping(until_precision)]
    if resume is not None:
        if measures_noise or label is not None or output is not None or output_dir != RESULTS:
            raise UsageError(
                f"--resume continues {resume} as it was begun: leave out --aa, --label, --output and --output-dir"
            )
        given = _load(profile_name, engine, changes, None, seed)
        if dry_run:
            _print_rest(resume, given, num_blocks, step_time_model)
        else:
            _refuse_model(step_time_model)
            _resume(resume, given, num_blocks, manner)
        return
    chosen = _load(profile_name, engine, changes, num_blocks, seed)
    if chosen is None:
        raise UsageError("name a profile, such as 'benchctl run ci-smoke'; 'benchctl profiles list' lists them")
    check_gpu(chosen, is_plan=dry_run)
    kv_plan = share_kv_memory(chosen, is_plan=dry_run)
    chosen = kv_plan.applied_to(chosen)
    chosen = _baseline_against_itself(chosen, num_blocks) if measures_noise else chosen
    check_experiment(chosen, is_plan=dry_run)
    if dry_run:
        _print_plan(chosen, step_time_model, output or output_dir, kv_plan.text)
        return
    _refuse_model(step_time_model)
    tokenizer = tokenizer_of(chosen)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        lengths_from = measure_lengths(chosen, output_dir, label, is_quiet=manner.is_quiet, tokenizer=tokenizer)
        prepared = prepare_experiment(chosen, lengths_from, tokenizer=tokenizer)
        check_machine(chosen, prepared.requests, output or output_dir)
        results = create(chosen, prepared, output_dir, label, directory=output, notes=kv_plan.notes)
    _measure_new(results, chosen, prepared, manner)


def _refuse_model(step_time_model: Path | None) -> None:
    if step_time_model is not None:
        raise UsageError("--step-time-model predicts a plan: add --dry-run; 'compare' has the same option")


def _stopping(until_precision: str | None) -> list[str]:
    """The override that ``--until-precision`` means; the number of looks is the profile's, or four."""
    if until_precision is None:
        return []
    from benchctl.cli.commands.compare import parse_threshold

    return [f"stopping.precision={parse_threshold(until_precision, '--until-precision')!r}"]


def _load(
    name: str | None,
    engine: str | None,
    overrides: list[str],
    blocks: int | None,
    seed: int | None,
) -> "Profile | None":
    if name is None:
        if engine or overrides or blocks or seed is not None:
            raise UsageError(
                "--engine, --set, --blocks, --until-precision, --quick and --seed change a profile: name it, as in "
                "'benchctl run ci-smoke'"
            )
        return None
    from benchctl.profile.load import load_profile

    return load_profile(name, engine=engine, overrides=overrides, blocks=blocks, seed=seed, is_to_send=True)


def _baseline_against_itself(profile: "Profile", num_blocks: int | None) -> "Profile":
    from benchctl.analysis.planning.noise_floor import repeated_baseline

    repeated = repeated_baseline(profile)
    return repeated if num_blocks is None else repeated.model_copy(update={"blocks": num_blocks})


def _print_plan(profile: "Profile", step_time_model: Path | None, output: Path, kv_memory: str | None) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed, and the KV cache."""
    from benchctl.cli.output.plan import print_kv_memory, print_plan
    from benchctl.measure.noise_on_file import noise_on_file
    from benchctl.workload.natural_lengths import lengths_profile, needs_lengths

    prepared = None if needs_lengths(profile) else prepare_experiment(profile)
    sha256 = None if prepared is None else prepared.sha256
    on_file = noise_on_file(profile, request_set_sha256=sha256, command=("benchctl", *sys.argv[1:]))
    for warning in on_file.warnings:
        warn(warning.message)
    if prepared is not None:
        check_machine(profile, prepared.requests, output, is_plan=True)
        print_plan(profile, prepared.requests, on_file.noise, step_time_model)
        print_kv_memory(kv_memory)
        return
    pilot = lengths_profile(profile)
    requests = prepare_experiment(pilot).requests
    check_machine(profile, requests, output, is_plan=True)
    print(f"first the natural lengths of {len(requests)} answers, in a result directory of {pilot.name!r}:")
    print_plan(pilot, requests, None, step_time_model)
    print(f"then {profile.name!r}, every answer forced to its natural length:")
    print_plan(profile, requests, on_file.noise, step_time_model)
    print_kv_memory(kv_memory)


def _measure_new(results: "ResultDirectory", profile: "Profile", prepared: "PreparedSet", manner: _Manner) -> None:
    from benchctl.cli.output.plan import print_duration

    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"results in {results.path}", flush=True)
        _print_expectations(results, profile)
        print_duration(profile, prepared.requests)
    _measure_and_report(results, profile, prepared.requests, manner)


def _print_expectations(results: "ResultDirectory", profile: "Profile") -> None:
    """Print the KV cache that was computed, the power with the noise on file, and the warnings about that noise."""
    from benchctl.cli.output.plan import print_kv_memory, print_power
    from benchctl.records.noise import load_noise

    print_power(profile, load_noise(results.path))
    for warning in results.manifest().warnings:
        if warning.code == "kv-memory-computed":
            print_kv_memory(warning.message)
        if warning.code.startswith("noise-"):
            warn(warning.message)


def _resume(path: Path, profile: "Profile | None", num_blocks: int | None, manner: _Manner) -> None:
    """Measure the runs of ``path`` that are not done, after its plan was extended to ``num_blocks`` where given."""
    from benchctl.measure.extension import extend_experiment
    from benchctl.measure.result_directory import reopen_experiment

    reopened = reopen_experiment(path, profile)
    extension = None if num_blocks is None else extend_experiment(reopened, num_blocks)
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"continuing {path}", flush=True)
        if extension is not None:
            added = extension.to_blocks - extension.from_blocks
            warn(
                f"{added} {'block is' if added == 1 else 'blocks are'} added to {extension.from_blocks}; "
                f"all verdicts are corrected for {extension.num_looks} looks at the results"
            )
    check_gpu(reopened.profile)
    check_machine(reopened.profile, reopened.requests, path)
    _measure_and_report(reopened.results, reopened.profile, reopened.requests, manner)


def _print_rest(
    path: Path, profile: "Profile | None", num_blocks: int | None, step_time_model: Path | None
) -> None:
    """Print the runs that would be measured; nothing is written."""
    from benchctl.cli.output.plan import print_rest
    from benchctl.measure.experiment import pending_runs
    from benchctl.measure.extension import extended_plan
    from benchctl.measure.result_directory import reopen_experiment

    reopened = reopen_experiment(path, profile)
    results = reopened.results
    plan = results.due_plan() if num_blocks is None else extended_plan(reopened, num_blocks)
    check_gpu(reopened.profile, is_plan=True)
    check_machine(reopened.profile, reopened.requests, path, is_plan=True)
    pending = pending_runs(results, plan)
    print_rest(reopened.profile, reopened.requests, pending, len(plan.runs), step_time_model)


def _measure_and_report(
    results: "ResultDirectory", profile: "Profile", requests: "tuple[PreparedRequest, ...]", manner: _Manner
) -> None:
    from benchctl.cli.output.screen import print_json
    from benchctl.cli.output.verdicts import outcome_document

    next_step = f"Continue with: {shlex.join(['benchctl', 'run', '--resume', str(results.path)])}"
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        outcome = measure(
            results, profile, requests, next_step, is_quiet=manner.is_quiet, keeps_raw_logs=manner.keeps_raw_logs
        )
        with keeping(results.path):
            analysis, verdict = print_outcome(results.path, outcome)
            if manner.stores_noise:
                store_noise(results.path, profile)
    code = A_RUN_FAILED if outcome.num_failed else A_RUN_IS_SUSPECT if outcome.num_suspect else 0
    if manner.as_json:
        print_json(outcome_document(analysis, outcome, verdict, code))
    if code:
        raise typer.Exit(code)
