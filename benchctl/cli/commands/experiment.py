"""An experiment as ``benchctl run`` is told: measured, resumed, or extended by blocks, or its plan printed.

What only judges is imported while the first server starts: until then the command imports what measures.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchctl.cli.commands.blocks import (
    check_block_time,
    check_handing_out,
    measure_block,
    measure_on_slots,
    measure_on_slurm,
    print_slots,
    print_submission,
    print_tasks,
)
from benchctl.cli.conduct import (
    announced_tokenizer,
    check_experiment,
    measure,
    measure_lengths,
    measure_sizes,
    prepare_experiment,
    reporting_alone,
    to_stderr,
    warn_of_repeats,
)
from benchctl.cli.failures import exit_code_of, keeping
from benchctl.cli.options import RunOptions, refuse_certain
from benchctl.cli.plan import duration_text, estimate_plan, print_changes, print_plan, print_power, print_rest
from benchctl.cli.screen import print_json, say, warn
from benchctl.cluster.blocks import divide
from benchctl.cluster.local import held_devices
from benchctl.measure.devices import gpu_shortfalls, kv_shortfalls
from benchctl.measure.directory import Origin, extend_experiment, extended_plan, reopen_experiment
from benchctl.measure.experiment import Outcome, create_experiment, pending_runs
from benchctl.measure.machine import loads_at, shortfalls
from benchctl.measure.on_file import earlier_noise, noise_on_file
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.load import load_cluster, load_profile
from benchctl.profile.model import Profile
from benchctl.profile.sizes import capacity_sizes, pilot_profile, with_sizes
from benchctl.records.directory import RequestSets, ResultDirectory
from benchctl.records.stores import NOISE
from benchctl.workload.prepare import lengths_profile, needs_lengths


def carry_out(options: RunOptions) -> int:
    """Measure, resume or plan as the options say; returns the exit code."""
    with to_stderr(when=options.as_json):
        if options.into is not None and options.block is not None:
            return measure_block(options.into, options.block, options)
        document = _carried_out(options)
    if document is None:
        return 0
    if options.as_json:
        print_json(document)
    return int(document["exit_code"])


def _carried_out(options: RunOptions) -> dict[str, Any] | None:
    """The outcome of an experiment; None where nothing is measured, or its end is not waited for."""
    profile = None if options.profile_name is None else _load(options.profile_name, options)
    if options.resume is not None and not options.dry_run:
        return _resume(options.resume, profile, options)
    if options.resume is not None:
        _print_runs_left(options.resume, profile, options)
    elif profile is not None:
        profile = _completed(profile, options)
        if not options.dry_run:
            return _begin(profile, options)
        _print_planned(profile, options)
    return None


def _load(name: str, options: RunOptions) -> Profile:
    overrides = list(options.overrides or ())
    if options.until_precision is not None:  # the number of looks is the profile's, or four
        from benchctl.cli.commands.compare import parse_threshold

        precision = parse_threshold(options.until_precision, "--until-precision")
        overrides += ["stopping.until=precision", f"stopping.precision={precision!r}"]
    if options.until_verdict:
        overrides += ["stopping.until=verdict", "stopping.precision=null"]
    blocks = options.num_blocks if options.resume is None else None  # of a resumed one, those that it shall have
    return load_profile(
        name, engine=options.engine, overrides=overrides, blocks=blocks, seed=options.seed, is_to_send=True
    )


def _completed(profile: Profile, options: RunOptions) -> Profile:
    """The profile of a new experiment as this machine measures it, checked."""
    is_plan = options.dry_run or options.is_elsewhere  # then neither engine nor GPU is needed here
    profile = _with_cluster(profile, options)
    check_handing_out(profile, options)
    # of all arms of the experiment, also where the baseline alone is then measured
    refuse_certain(kv_shortfalls(profile), is_plan=is_plan)
    if options.measures_noise:
        from benchctl.analysis.planning import repeated_baseline

        changes = {} if options.num_blocks is None else {"blocks": options.num_blocks}
        profile = repeated_baseline(profile).model_copy(update=changes)
    check_experiment(profile, is_plan=is_plan)
    return profile


def _with_cluster(profile: Profile, options: RunOptions, given: Profile | None = None) -> Profile:
    """The profile with the cluster settings that count: those of ``--cluster FILE``, else those of the profile that
    was ``given`` with ``--resume``, else its own; ``--parallel`` goes over them.

    Raises ProfileError for a file that does not describe them.
    """
    if options.on != "slurm":
        return profile
    settings = (given or profile).cluster if options.cluster is None else load_cluster(options.cluster)
    if options.parallel is not None:
        settings = settings.model_copy(update={"parallel": options.parallel})
    return profile.model_copy(update={"cluster": settings})


def _check_load(profile: Profile, requests: RequestSets, path: Path, options: RunOptions) -> None:
    """Raise UsageError where a limit of this machine, or the time of a task, ends the experiment."""
    refuse_certain(shortfalls(loads_at(profile, requests), path), is_plan=options.dry_run or options.is_elsewhere)
    if options.on == "slurm":
        check_block_time(profile, requests, is_plan=options.dry_run)


def _print_planned(profile: Profile, options: RunOptions) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed, and where the blocks
    would be measured.
    """
    if profile.capacity is not None:
        pilot = pilot_profile(profile)
        say(f"first the sizes of the loads, by one server of each arm, in a result directory of {pilot.name!r}:")
        print_plan(pilot, prepare_experiment(pilot).sets, None, options.step_time_model)
        profile = with_sizes(profile, capacity_sizes(profile))
        say(f"then {profile.name!r}, with sizes around the capacities there, such as these:")
    first = lengths_profile(profile) if needs_lengths(profile) else profile
    prepared = prepare_experiment(first)
    sha256 = prepared.sha256 if first is profile else None
    stored_noise, warnings = noise_on_file(profile, request_set_sha256=sha256)
    for warning in warnings:
        warn(warning.message)
    requests = prepared.sets
    if first is profile:
        _check_load(profile, requests, options.output or options.output_dir, options)
    else:
        refuse_certain(shortfalls(loads_at(first, requests), options.output or options.output_dir), is_plan=True)
        number = len(prepared.requests)
        say(f"first the natural lengths of {number} answers, in a result directory of {first.name!r}:")
        print_plan(first, requests, None, options.step_time_model)
        say(f"then {profile.name!r}, every answer forced to its natural length:")
    noise = stored_noise or earlier_noise(profile, options.output_dir)
    print_plan(profile, requests, noise, options.step_time_model)
    _print_handing_out(profile, requests, range(profile.blocks), options)


def _print_runs_left(path: Path, profile: Profile | None, options: RunOptions) -> None:
    """Print the runs that would be measured; nothing is written."""
    reopened = reopen_experiment(path, profile)
    results, stored, requests = reopened.results, reopened.profile, reopened.requests
    plan = results.due_plan() if options.num_blocks is None else extended_plan(reopened, options.num_blocks)
    refuse_certain(gpu_shortfalls(stored), is_plan=True)
    refuse_certain(shortfalls(loads_at(stored, requests), path), is_plan=True)
    pending = pending_runs(results, stored, plan)
    warn_of_repeats(results, pending)
    print_rest(stored, requests, pending, len(plan.runs), options.step_time_model)
    blocks = sorted({planned.block for planned in pending})
    _print_handing_out(_with_cluster(stored, options, given=profile), requests, blocks, options)


def _print_handing_out(profile: Profile, requests: RequestSets, blocks: Sequence[int], options: RunOptions) -> None:
    if options.on == "slurm":
        print_submission(profile, blocks)
    elif options.on == "local":
        print_slots(profile, requests, options.parallel or 1)


def _begin(profile: Profile, options: RunOptions) -> dict[str, Any] | None:
    """Create a new experiment and measure it."""
    tokenizer = announced_tokenizer(profile, on_login_node=options.on == "slurm")
    origin = Origin(
        output_root=options.output_dir,
        argv=("benchctl", *sys.argv[1:]),
        label=options.label,
        directory=options.output,
        is_elsewhere=options.is_elsewhere,
    )
    profile = measure_sizes(profile, origin, is_quiet=options.is_quiet, tokenizer=tokenizer)
    lengths_from = measure_lengths(profile, origin, is_quiet=options.is_quiet, tokenizer=tokenizer)
    prepared = prepare_experiment(profile, lengths_from, tokenizer=tokenizer)
    _check_load(profile, prepared.sets, options.output or options.output_dir, options)
    compares = len(profile.variants) > 1  # where nothing is compared, it has no power
    earlier = earlier_noise(profile, options.output_dir) if compares else None  # before the new one is the latest
    results = create_experiment(profile, prepared, origin)
    say(f"results in {results.path}")
    if compares:
        print_changes(profile)
        print_power(profile, NOISE.in_results(results.path) or earlier)
    for warning in results.manifest().warnings:
        if warning.code.startswith("noise-"):
            warn(warning.message)
    if not is_virtual(profile.engine.kind) and not options.is_shared:  # a simulated one ends soon
        say(duration_text(profile, estimate_plan(profile, prepared.sets)))
    return _measure_and_report(results, profile, prepared.sets, options)


def _resume(path: Path, profile: Profile | None, options: RunOptions) -> dict[str, Any] | None:
    """Measure the runs of ``path`` that are not done, after its plan was extended to ``--blocks`` where given."""
    reopened = reopen_experiment(path, profile)
    extension = None if options.num_blocks is None else extend_experiment(reopened, options.num_blocks)
    say(f"continuing {path}")
    if extension is not None:
        added = extension.to_blocks - extension.from_blocks
        warn(
            f"{added} {'block is' if added == 1 else 'blocks are'} added to {extension.from_blocks}; "
            f"all verdicts are corrected for {extension.num_looks} looks at the results"
        )
    stored = _with_cluster(reopened.profile, options, given=profile)
    check_handing_out(stored, options)
    _check_load(stored, reopened.requests, path, options)
    return _measure_and_report(reopened.results, stored, reopened.requests, options)


def _measure_and_report(
    results: ResultDirectory, profile: Profile, requests: RequestSets, options: RunOptions
) -> dict[str, Any] | None:
    """Measure what is not done and print the outcome; returns its document, None where it is not waited for."""
    outcome = _measured(results, profile, requests, options)
    if outcome is None:
        return None
    from benchctl.cli.outcome import outcome_document, print_outcome, store_noise

    with keeping(results.path), reporting_alone(results.path):
        analysis, verdict = print_outcome(results.path, outcome)
        if not options.no_store_noise and not options.is_elsewhere:
            store_noise(results.path, profile)
    return outcome_document(analysis, outcome, verdict, exit_code_of(outcome.num_failed, outcome.num_suspect))


def _measured(
    results: ResultDirectory, profile: Profile, requests: RequestSets, options: RunOptions
) -> Outcome | None:
    """The outcome of what is not done, here or elsewhere; None where it is not waited for."""
    if options.is_shared:
        divide(results)
    if options.prepare:
        print_tasks(results)
        return None
    if options.on == "slurm":
        return measure_on_slurm(results, profile, options)
    if options.on == "local":
        return measure_on_slots(results, profile, requests, options)
    next_step = f"Continue with: {shlex.join(['benchctl', 'run', '--resume', str(results.path)])}"
    with held_devices(profile):
        return measure(
            results,
            profile,
            requests,
            next_step,
            is_quiet=options.is_quiet,
            keeps_raw_logs=options.keep_raw_logs,
            takes_over=options.take_over,
        )
