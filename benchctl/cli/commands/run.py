"""``benchctl run``: measure an experiment, resume one, or add blocks to one."""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.cluster.distributed import (
    check_block_time,
    check_distribution,
    measure_distributed,
    with_cluster,
)
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
    reporting_alone,
    share_kv_memory,
    tokenizer_of,
)
from benchctl.cli.options.distribution import (
    Block,
    CheckNeighbours,
    ClusterFile,
    Detach,
    Distribution,
    Into,
    On,
    Parallel,
    Prepare,
    Scheduler,
    TimeLeft,
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
from benchctl.cli.planned_runs import print_expectations, print_planned, print_runs_left
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
    distribution: Distribution


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
    on: On = None,
    parallel: Parallel = None,
    cluster: ClusterFile = None,
    detach: Detach = False,
    check_neighbours: CheckNeighbours = False,
    prepare: Prepare = False,
    block: Block = None,
    into: Into = None,
    time_left: TimeLeft = None,
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
    distribution = Distribution(
        on=on,
        parallel=parallel,
        cluster_file=cluster,
        is_detached=detach,
        checks_neighbours=check_neighbours,
        is_prepared_only=prepare,
    )
    profile_name, manner = (
        chosen_profile(name, profile),
        _Manner(
            is_quiet=quiet or as_json,
            stores_noise=not no_store_noise,
            as_json=as_json,
            keeps_raw_logs=keep_raw_logs,
            distribution=distribution,
        ),
    )
    if block is not None or into is not None or time_left is not None:
        raise typer.Exit(_measure_block(block, into, time_left, profile_name, manner))
    num_blocks, changes = QUICK_BLOCKS if quick else blocks, [*(overrides or []), *_stopping(until_precision)]
    if resume is not None:
        if measures_noise or label is not None or output is not None or output_dir != RESULTS:
            raise UsageError(
                f"--resume continues {resume} as it was begun: leave out --aa, --label, --output and --output-dir"
            )
        given = _load(profile_name, engine, changes, None, seed)
        if dry_run:
            print_runs_left(resume, given, num_blocks, step_time_model, distribution)
        else:
            _refuse_model(step_time_model)
            _resume(resume, given, num_blocks, manner)
        return
    chosen = _load(profile_name, engine, changes, num_blocks, seed)
    if chosen is None:
        raise UsageError("name a profile, such as 'benchctl run ci-smoke'; 'benchctl profiles list' lists them")
    chosen = _baseline_against_itself(chosen, num_blocks) if measures_noise else chosen
    if not dry_run:
        _refuse_model(step_time_model)
    destination = _Destination(output=output, output_dir=output_dir, label=label)
    _begin(chosen, destination, step_time_model, manner, is_plan=dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Destination:
    """The directory of a new experiment, and the user's remark on it."""

    output: Path | None
    output_dir: Path
    label: str | None

    @property
    def path(self) -> Path:
        return self.output or self.output_dir


def _begin(
    profile: "Profile", destination: _Destination, step_time_model: Path | None, manner: _Manner, *, is_plan: bool
) -> None:
    """Measure a new experiment; of a plan, print it.

    What only the measuring machine can have, an engine or a GPU, is not demanded where other machines measure.
    """
    distribution = manner.distribution
    is_elsewhere = is_plan or distribution.is_elsewhere
    profile = with_cluster(profile, distribution)
    check_distribution(profile, distribution, is_plan=is_plan)
    check_gpu(profile, is_plan=is_elsewhere)
    kv_plan = share_kv_memory(profile, is_plan=is_elsewhere)
    chosen = kv_plan.applied_to(profile)
    check_experiment(chosen, is_plan=is_elsewhere)
    if is_plan:
        print_planned(chosen, step_time_model, destination.path, kv_plan.text, distribution)
        return
    tokenizer = tokenizer_of(chosen, may_start_server=distribution.on is not Scheduler.SLURM)
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        lengths_from = measure_lengths(
            chosen, destination.output_dir, destination.label, is_quiet=manner.is_quiet, tokenizer=tokenizer
        )
        prepared = prepare_experiment(chosen, lengths_from, tokenizer=tokenizer)
        check_machine(chosen, prepared.requests, destination.path, is_plan=is_elsewhere)
        check_block_time(chosen, prepared.requests, distribution)
        results = create(
            chosen,
            prepared,
            destination.output_dir,
            destination.label,
            directory=destination.output,
            notes=kv_plan.notes,
            is_elsewhere=distribution.is_elsewhere,
        )
    _measure_new(results, chosen, prepared, manner)


def _measure_block(
    block: int | None, into: Path | None, time_left_s: float | None, profile_name: str | None, manner: _Manner
) -> int:
    """Measure one block of an experiment that others measure, too; returns the exit code."""
    if block is None or into is None:
        raise UsageError("--block I and --into DIR belong together: the block, and the experiment that it is of")
    if profile_name is not None or manner.distribution.is_shared:
        raise UsageError(
            f"--into {into} measures a block as it was planned: leave out the profile, --on and --prepare"
        )
    from benchctl.cli.cluster.block import measure_block

    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        return measure_block(
            into, block, time_left_s, is_quiet=manner.is_quiet, keeps_raw_logs=manner.keeps_raw_logs
        )


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


def _measure_new(results: "ResultDirectory", profile: "Profile", prepared: "PreparedSet", manner: _Manner) -> None:
    from benchctl.cli.output.plan import print_duration

    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"results in {results.path}", flush=True)
        print_expectations(results, profile)
        if not manner.distribution.is_shared:  # else so many blocks at a time decide
            print_duration(profile, prepared.requests)
    _measure_and_report(results, profile, prepared.requests, manner)


def _resume(path: Path, profile: "Profile | None", num_blocks: int | None, manner: _Manner) -> None:
    """Measure the runs of ``path`` that are not done, after its plan was extended to ``num_blocks`` where given."""
    from benchctl.measure.extension import extend_experiment
    from benchctl.measure.result_directory import reopen_experiment

    reopened = reopen_experiment(path, profile)
    _refuse_check(reopened.results)
    extension = None if num_blocks is None else extend_experiment(reopened, num_blocks)
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"continuing {path}", flush=True)
        if extension is not None:
            added = extension.to_blocks - extension.from_blocks
            warn(
                f"{added} {'block is' if added == 1 else 'blocks are'} added to {extension.from_blocks}; "
                f"all verdicts are corrected for {extension.num_looks} looks at the results"
            )
    is_elsewhere = manner.distribution.is_elsewhere
    stored = with_cluster(reopened.profile, manner.distribution, given=profile)
    check_distribution(stored, manner.distribution)
    check_gpu(stored, is_plan=is_elsewhere)
    check_machine(stored, reopened.requests, path, is_plan=is_elsewhere)
    check_block_time(stored, reopened.requests, manner.distribution)
    _measure_and_report(reopened.results, stored, reopened.requests, manner)


def _refuse_check(results: "ResultDirectory") -> None:
    """Raise UsageError for a check of neighbours, of which this command starts none."""
    from benchctl.cluster.neighbours.check import is_check

    if is_check(results):
        path = shlex.quote(str(results.path))
        raise UsageError(
            f"{results.path} is a check of neighbours; continue it with 'benchctl noise neighbours --resume {path}'"
        )


def _measure_and_report(
    results: "ResultDirectory", profile: "Profile", requests: "tuple[PreparedRequest, ...]", manner: _Manner
) -> None:
    from benchctl.cli.output.screen import print_json
    from benchctl.cli.output.verdicts import outcome_document
    from benchctl.cluster.local.held_slots import held_devices

    next_step = f"Continue with: {shlex.join(['benchctl', 'run', '--resume', str(results.path)])}"
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        if manner.distribution.is_shared:
            outcome = measure_distributed(
                results,
                profile,
                requests,
                manner.distribution,
                is_quiet=manner.is_quiet,
                keeps_raw_logs=manner.keeps_raw_logs,
            )
            if outcome is None:
                return
        else:
            with held_devices(profile):
                outcome = measure(
                    results,
                    profile,
                    requests,
                    next_step,
                    is_quiet=manner.is_quiet,
                    keeps_raw_logs=manner.keeps_raw_logs,
                )
        with keeping(results.path), reporting_alone(results.path):
            analysis, verdict = print_outcome(results.path, outcome)
            if manner.stores_noise and not manner.distribution.is_elsewhere:
                store_noise(results.path, profile)
    code = A_RUN_FAILED if outcome.num_failed else A_RUN_IS_SUSPECT if outcome.num_suspect else 0
    if manner.as_json:
        print_json(outcome_document(analysis, outcome, verdict, code))
    if code:
        raise typer.Exit(code)
