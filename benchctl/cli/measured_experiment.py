"""An experiment from its directory to its outcome: measured here or handed out, told by tables and exit code."""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from benchctl.cli.cluster.distributed import measure_distributed
from benchctl.cli.experiment import A_RUN_FAILED, A_RUN_IS_SUSPECT, keeping, measure, reporting_alone
from benchctl.cli.options.distribution import Distribution
from benchctl.cli.output.outcome import print_outcome, store_noise
from benchctl.cli.planned_runs import print_expectations

if TYPE_CHECKING:
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest
    from benchctl.workload.prepare import PreparedSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Choices about the outcome: its form on the screen, and whether noise is stored."""

    is_quiet: bool
    stores_noise: bool
    as_json: bool
    keeps_raw_logs: bool
    distribution: Distribution


def measure_new(results: "ResultDirectory", profile: "Profile", prepared: "PreparedSet", manner: Manner) -> None:
    from benchctl.cli.output.plan import print_duration

    with redirect_stdout(sys.stderr) if manner.as_json else nullcontext():
        print(f"results in {results.path}", flush=True)
        print_expectations(results, profile)
        if not manner.distribution.is_shared:  # else so many blocks at a time decide
            print_duration(profile, prepared.requests)
    measure_and_report(results, profile, prepared.requests, manner)


def measure_and_report(
    results: "ResultDirectory", profile: "Profile", requests: "tuple[PreparedRequest, ...]", manner: Manner
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
