"""``benchctl run``: measure an experiment, resume one, or add blocks to one."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import typer

from benchctl.analysis.planning import repeated_baseline
from benchctl.cli.checks import check_gpu, check_machine
from benchctl.cli.cluster.distributed import check_block_time, check_distribution, with_cluster
from benchctl.cli.cluster.slurm import measure_block
from benchctl.cli.commands.compare import parse_threshold
from benchctl.cli.conduct import (
    check_experiment,
    create,
    measure_lengths,
    prepare_experiment,
    share_kv_memory,
    tokenizer_of,
)
from benchctl.cli.options.options import (
    RESULTS,
    Block,
    Blocks,
    ClusterFile,
    Destination,
    Detach,
    Distribution,
    EnginePreset,
    Into,
    Label,
    On,
    Output,
    OutputDir,
    Overrides,
    Parallel,
    Prepare,
    ProfileArgument,
    ProfileName,
    Quiet,
    Scheduler,
    Seed,
    TimeLeft,
    chosen_profile,
)
from benchctl.cli.options.run import (
    QUICK_BLOCKS,
    AsJson,
    DryRun,
    KeepRawLogs,
    MeasureNoise,
    NoStoreNoise,
    Quick,
    ResumeDir,
    StepTimeModel,
    UntilPrecision,
)
from benchctl.cli.planned_runs import Manner, measure_and_report, measure_new, print_planned, print_runs_left
from benchctl.cli.screen import warn
from benchctl.errors import UsageError
from benchctl.measure.kv_memory import KvPlan
from benchctl.measure.result_directory import reopen_experiment
from benchctl.measure.resume.extension import extend_experiment
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile


def run(  # the parameters are the command line
    name: ProfileArgument = None,
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    until_precision: UntilPrecision = None,
    quick: Quick = False,
    seed: Seed = None,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    dry_run: DryRun = False,
    step_time_model: StepTimeModel = None,
    resume: ResumeDir = None,
    measures_noise: MeasureNoise = False,
    no_store_noise: NoStoreNoise = False,
    keep_raw_logs: KeepRawLogs = False,
    on: On = None,
    parallel: Parallel = None,
    cluster: ClusterFile = None,
    detach: Detach = False,
    prepare: Prepare = False,
    block: Block = None,
    into: Into = None,
    time_left: TimeLeft = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
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
        is_prepared_only=prepare,
    )
    profile_name, manner = (
        chosen_profile(name, profile),
        Manner(
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
        changed = _load(profile_name, engine, changes, None, seed)
        if dry_run:
            print_runs_left(resume, changed, num_blocks, step_time_model, distribution)
        else:
            _refuse_model(step_time_model)
            _resume(resume, changed, num_blocks, manner)
        return
    chosen = _load(profile_name, engine, changes, num_blocks, seed)
    if chosen is None:
        raise UsageError("name a profile, such as 'benchctl run ci-smoke'; 'benchctl profiles list' lists them")
    if not dry_run:
        _refuse_model(step_time_model)
    chosen, kv_plan = _completed(chosen, num_blocks, distribution, measures_noise=measures_noise, is_plan=dry_run)
    destination = Destination(output=output, output_dir=output_dir, label=label)
    if dry_run:
        print_planned(chosen, step_time_model, destination.path, kv_plan.text, distribution)
    else:
        _begin(chosen, destination, kv_plan, manner)


def _completed(
    chosen: Profile,
    num_blocks: int | None,
    distribution: Distribution,
    *,
    measures_noise: bool,
    is_plan: bool,
) -> tuple[Profile, KvPlan]:
    """The profile of a new experiment as this machine measures it, checked, and the plan of its KV cache."""
    chosen = with_cluster(chosen, distribution)
    check_distribution(chosen, distribution, is_plan=is_plan)
    # A machine that does not measure needs neither engine nor GPU.
    is_elsewhere = is_plan or distribution.is_elsewhere
    check_gpu(chosen, is_plan=is_elsewhere)
    # of all arms of the experiment, also where the baseline alone is then measured
    kv_plan = share_kv_memory(chosen, is_plan=is_elsewhere)
    chosen = kv_plan.applied_to(chosen)
    if measures_noise:
        chosen = _baseline_against_itself(chosen, num_blocks)
    check_experiment(chosen, is_plan=is_elsewhere)
    return chosen, kv_plan


def _begin(chosen: Profile, destination: Destination, kv_plan: KvPlan, manner: Manner) -> None:
    """Create a new experiment and measure it."""
    distribution = manner.distribution
    tokenizer = tokenizer_of(chosen, may_start_server=distribution.on is not Scheduler.SLURM)
    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        lengths_from = measure_lengths(
            chosen, destination.output_dir, destination.label, is_quiet=manner.is_quiet, tokenizer=tokenizer
        )
        prepared = prepare_experiment(chosen, lengths_from, tokenizer=tokenizer)
        check_machine(chosen, prepared.requests, destination.path, is_plan=distribution.is_elsewhere)
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
    measure_new(results, chosen, prepared, manner)


def _measure_block(
    block: int | None, into: Path | None, time_left_s: float | None, profile_name: str | None, manner: Manner
) -> int:
    """Measure one block of an experiment that others measure, too; returns the exit code."""
    if block is None or into is None:
        raise UsageError("--block I and --into DIR belong together: the block, and the experiment that it is of")
    if profile_name is not None or manner.distribution.is_shared:
        raise UsageError(
            f"--into {into} measures a block as it was planned: leave out the profile, --on and --prepare"
        )

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

    return [f"stopping.precision={parse_threshold(until_precision, '--until-precision')!r}"]


def _load(
    name: str | None,
    engine: str | None,
    overrides: list[str],
    blocks: int | None,
    seed: int | None,
) -> Profile | None:
    if name is None:
        if engine or overrides or blocks or seed is not None:
            raise UsageError(
                "--engine, --set, --blocks, --until-precision, --quick and --seed change a profile: name it, as in "
                "'benchctl run ci-smoke'"
            )
        return None

    return load_profile(name, engine=engine, overrides=overrides, blocks=blocks, seed=seed, is_to_send=True)


def _baseline_against_itself(profile: Profile, num_blocks: int | None) -> Profile:

    repeated = repeated_baseline(profile)
    return repeated if num_blocks is None else repeated.model_copy(update={"blocks": num_blocks})


def _resume(path: Path, profile: Profile | None, num_blocks: int | None, manner: Manner) -> None:
    """Measure the runs of ``path`` that are not done, after its plan was extended to ``num_blocks`` where given."""
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
    is_elsewhere = manner.distribution.is_elsewhere
    stored = with_cluster(reopened.profile, manner.distribution, given=profile)
    check_distribution(stored, manner.distribution)
    check_gpu(stored, is_plan=is_elsewhere)
    check_machine(stored, reopened.requests, path, is_plan=is_elsewhere)
    check_block_time(stored, reopened.requests, manner.distribution)
    measure_and_report(reopened.results, stored, reopened.requests, manner)
