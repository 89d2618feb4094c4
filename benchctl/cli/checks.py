"""Checks before a measurement, the exit codes after it, and refusals of the system in between."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchctl.cli.screen import warn
from benchctl.errors import BenchctlError, UsageError
from benchctl.load.demand import size_of
from benchctl.measure.machine_limits import Shortfall, shortfalls
from benchctl.profile.model import Profile
from benchctl.records.record import PreparedRequest
from benchctl.system_errors import KEPT, as_run_error, is_of_the_system

A_RUN_FAILED = 5


A_RUN_IS_SUSPECT = 4


def check_gpu(profile: Profile, *, is_plan: bool = False) -> None:
    """Raise UsageError where servers of this profile need a GPU and there is none; of a plan it is a warning."""
    from benchctl.measure.gpu_need import gpu_shortfalls  # 'benchctl load' needs no NVML

    _refuse(gpu_shortfalls(profile), is_plan=is_plan)


def check_machine(
    profile: Profile, requests: Iterable[PreparedRequest], output: Path, *, is_plan: bool = False
) -> None:
    """Raise UsageError where a limit of this machine ends the experiment; of a plan it is a warning."""
    _refuse(shortfalls(profile, size_of(requests), output), is_plan=is_plan)


def _refuse(shortfalls: Iterable[Shortfall], *, is_plan: bool) -> None:
    """Raise UsageError for the first certain one; the others, and all of a plan, are warnings."""
    for shortfall in shortfalls:
        if shortfall.is_certain and not is_plan:
            raise UsageError(shortfall.message)
        warn(
            f"not to be measured on this machine: {shortfall.message}"
            if shortfall.is_certain
            else shortfall.message
        )


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
