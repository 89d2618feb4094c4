"""Checks before a measurement, its end by an interrupt or by the system, and the exit codes after it."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchctl.cli.screen import warn
from benchctl.costs.hardware import hardware_for
from benchctl.errors import BenchctlError, ProfileError, UsageError
from benchctl.load.demand import size_of
from benchctl.measure.machine_limits import Shortfall, shortfalls
from benchctl.profile.model import Profile
from benchctl.records.record import PreparedRequest
from benchctl.system_errors import KEPT, as_run_error, is_of_the_system


def refuse(message: str, *, is_plan: bool) -> None:
    """Raise UsageError; of a plan, which may be measured on another machine, it is a warning."""
    if not is_plan:
        raise UsageError(message)
    warn(f"not to be measured on this machine: {message}")


def check_names(profile: Profile) -> None:
    """Check the names that only the analysis needs, before anything is measured."""
    from benchctl.analysis.compare.compare import deciding_metrics  # 'benchctl load' needs no numpy

    try:
        key = "primary_metrics"
        deciding_metrics(profile.primary_metrics)
        key = "hardware"
        hardware_for(profile.hardware)
    except UsageError as error:
        raise ProfileError(f"profile {profile.name}: {key}: {error}") from error


def check_gpu(profile: Profile, *, is_plan: bool = False) -> None:
    """Raise UsageError where servers of this profile need a GPU and there is none; of a plan it is a warning."""
    from benchctl.measure.gpu_need import gpu_shortfalls  # 'benchctl load' needs no NVML

    _refuse_certain(gpu_shortfalls(profile), is_plan=is_plan)


def check_machine(
    profile: Profile, requests: Iterable[PreparedRequest], output: Path, *, is_plan: bool = False
) -> None:
    """Raise UsageError where a limit of this machine ends the experiment; of a plan it is a warning."""
    _refuse_certain(shortfalls(profile, size_of(requests), output), is_plan=is_plan)


def _refuse_certain(shortfalls: Iterable[Shortfall], *, is_plan: bool) -> None:
    for shortfall in shortfalls:
        if shortfall.is_certain:
            refuse(shortfall.message, is_plan=is_plan)
        else:
            warn(shortfall.message)


@contextmanager
def keeping(results: Path) -> Iterator[None]:
    """After a measurement: what the system refuses now ends the command with what was measured on disk."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BenchctlError) or not is_of_the_system(error):
            raise
        next_step = f"; {KEPT} in {results}, and 'benchctl report' writes its report"
        raise as_run_error(error, "the output", next_step=next_step) from error


@contextmanager
def advising(next_step: str) -> Iterator[None]:
    """After an interrupt, say that the results are kept, and what can be done with them."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; results until now are kept. {next_step}", file=sys.stderr)
        raise


def exit_code_of(num_failed: int, num_suspect: int) -> int:
    """The exit code of a measurement: 5 where a run failed, 4 where one is suspect."""
    return 5 if num_failed else 4 if num_suspect else 0
