"""The plan of an experiment on the terminal: of a new one, of the rest of one, and what is known beforehand."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchctl.cli.cluster.distributed import check_block_time, print_distribution, with_cluster
from benchctl.cli.experiment import check_gpu, check_machine, prepare_experiment
from benchctl.cli.output.outcome import warn

if TYPE_CHECKING:
    from benchctl.cli.options.distribution import Distribution
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory


def print_planned(
    profile: "Profile",
    step_time_model: Path | None,
    output: Path,
    kv_memory: str | None,
    distribution: "Distribution",
) -> None:
    """Print the ordered runs, with those that measure natural lengths first where needed, the KV cache, and where
    the blocks would be measured.
    """
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


def print_expectations(results: "ResultDirectory", profile: "Profile") -> None:
    """Print the KV cache that was computed, the power with the noise on file, and the warnings about that noise."""
    from benchctl.cli.output.plan import print_kv_memory, print_power
    from benchctl.records.noise import load_noise

    print_power(profile, load_noise(results.path))
    for warning in results.manifest().warnings:
        if warning.code == "kv-memory-computed":
            print_kv_memory(warning.message)
        if warning.code.startswith("noise-"):
            warn(warning.message)


def print_runs_left(
    path: Path,
    profile: "Profile | None",
    num_blocks: int | None,
    step_time_model: Path | None,
    distribution: "Distribution",
) -> None:
    """Print the runs that would be measured; nothing is written."""
    from benchctl.cli.output.plan import print_rest, warn_of_repeats
    from benchctl.measure.result_directory import reopen_experiment
    from benchctl.measure.resume.extension import extended_plan
    from benchctl.measure.resume.here import Here
    from benchctl.measure.resume.pending import pending_runs

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
