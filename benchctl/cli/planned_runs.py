"""The plan of an experiment on the terminal: of a new one, of the rest of one, and what is known beforehand.

An experiment from its directory to its outcome: measured here or handed out, told by tables and exit code.
"""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import typer

from benchctl.cli.checks import A_RUN_FAILED, A_RUN_IS_SUSPECT, check_gpu, check_machine, keeping
from benchctl.cli.cluster.distributed import check_block_time, measure_distributed, print_distribution, with_cluster
from benchctl.cli.conduct import (
    measure,
    prepare_experiment,
    print_duration,
    print_kv_memory,
    print_plan,
    print_power,
    print_rest,
    reporting_alone,
    warn_of_repeats,
)
from benchctl.cli.options.options import Distribution
from benchctl.cli.output.verdicts import outcome_document, print_outcome, store_noise
from benchctl.cli.screen import print_json, warn
from benchctl.cluster.local.held_slots import held_devices
from benchctl.measure.noise_on_file import noise_on_file
from benchctl.measure.result_directory import reopen_experiment
from benchctl.measure.resume.extension import extended_plan
from benchctl.measure.resume.here import Here
from benchctl.measure.resume.pending import pending_runs
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.noise import NOISE
from benchctl.records.record import PreparedRequest
from benchctl.workload.natural_lengths import lengths_profile, needs_lengths
from benchctl.workload.prepare import PreparedSet


def print_planned(
    profile: Profile,
    step_time_model: Path | None,
    output: Path,
    kv_memory: str | None,
    distribution: Distribution,
) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed, the KV cache, and where
    the blocks would be measured.
    """
    prepared = None if needs_lengths(profile) else prepare_experiment(profile)
    sha256 = None if prepared is None else prepared.sha256
    on_file = noise_on_file(profile, request_set_sha256=sha256, command=("benchctl", *sys.argv[1:]))
    for warning in on_file.warnings:
        warn(warning.message)
    if prepared is not None:
        check_machine(profile, prepared.requests, output, is_plan=True)
        print_plan(profile, prepared.requests, on_file.noise, step_time_model)
        print_kv_memory(kv_memory)
        check_block_time(profile, prepared.requests, distribution, is_plan=True)
        print_distribution(profile, prepared.requests, distribution)
        return
    pilot = lengths_profile(profile)
    requests = prepare_experiment(pilot).requests
    check_machine(profile, requests, output, is_plan=True)
    print(f"first the natural lengths of {len(requests)} answers, in a result directory of {pilot.name!r}:")
    print_plan(pilot, requests, None, step_time_model)
    print(f"then {profile.name!r}, every answer forced to its natural length:")
    print_plan(profile, requests, on_file.noise, step_time_model)
    print_kv_memory(kv_memory)
    print_distribution(profile, requests, distribution)


def print_expectations(results: ResultDirectory, profile: Profile) -> None:
    """Print the KV cache that was computed, the power with the noise on file, and the warnings about that noise."""
    print_power(profile, NOISE.in_results(results.path))
    for warning in results.manifest().warnings:
        if warning.code == "kv-memory-computed":
            print_kv_memory(warning.message)
        if warning.code.startswith("noise-"):
            warn(warning.message)


def print_runs_left(
    path: Path,
    profile: Profile | None,
    num_blocks: int | None,
    step_time_model: Path | None,
    distribution: Distribution,
) -> None:
    """Print the runs that would be measured; nothing is written."""
    reopened = reopen_experiment(path, profile)
    results = reopened.results
    plan = results.due_plan() if num_blocks is None else extended_plan(reopened, num_blocks)
    check_gpu(reopened.profile, is_plan=True)
    check_machine(reopened.profile, reopened.requests, path, is_plan=True)
    pending = pending_runs(results, Here(reopened.profile), plan)
    warn_of_repeats(results, pending)
    print_rest(reopened.profile, reopened.requests, pending, len(plan.runs), step_time_model)
    elsewhere = with_cluster(reopened.profile, distribution, given=profile)
    print_distribution(elsewhere, reopened.requests, distribution, sorted({planned.block for planned in pending}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Choices about the outcome: its form on the screen, and whether noise is stored."""

    is_quiet: bool
    stores_noise: bool
    as_json: bool
    keeps_raw_logs: bool
    distribution: Distribution


def measure_new(results: ResultDirectory, profile: Profile, prepared: PreparedSet, manner: Manner) -> None:

    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"results in {results.path}", flush=True)
        print_expectations(results, profile)
        if not manner.distribution.is_shared:  # else so many blocks at a time decide
            print_duration(profile, prepared.requests)
    measure_and_report(results, profile, prepared.requests, manner)


def measure_and_report(
    results: ResultDirectory, profile: Profile, requests: tuple[PreparedRequest, ...], manner: Manner
) -> None:

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
