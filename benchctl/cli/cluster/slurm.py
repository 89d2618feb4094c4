"""``benchctl run --on slurm``: the blocks of an experiment as an array job."""

from typing import TYPE_CHECKING

from benchctl.cli.options.distribution import Distribution
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest


def check_slurm(profile: "Profile", distribution: Distribution, *, is_plan: bool) -> None:
    """Raise UsageError, before anything is written, where blocks cannot be submitted."""
    del is_plan
    raise UsageError(f"profile {profile.name}: --on {distribution.on} cannot be used yet")


def print_submission(
    profile: "Profile", requests: "tuple[PreparedRequest, ...]", distribution: Distribution
) -> None:
    """Print the sbatch script and the array."""
    raise UsageError(
        f"profile {profile.name}: --on {distribution.on} cannot be used yet ({len(requests)} requests)"
    )


def measure_on_slurm(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    distribution: Distribution,
    *,
    is_quiet: bool,
) -> "Outcome | None":
    """Submit the blocks that are not done; returns their outcome, None when detached."""
    del requests, is_quiet
    raise UsageError(f"{results.path}, {profile.name}: --on {distribution.on} cannot be used yet")
