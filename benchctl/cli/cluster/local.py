"""``benchctl run --on local --parallel N``: N blocks at a time on this host."""

from typing import TYPE_CHECKING

from benchctl.cli.options.distribution import Distribution
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest


def check_slots(profile: "Profile", distribution: Distribution, *, is_plan: bool) -> None:
    """Raise UsageError, before anything is written, where this host has no place for so many blocks."""
    del is_plan
    raise UsageError(f"profile {profile.name}: --on {distribution.on} cannot be used yet")


def print_slots(profile: "Profile", requests: "tuple[PreparedRequest, ...]", distribution: Distribution) -> None:
    """Print the devices or cores of each slot."""
    raise UsageError(
        f"profile {profile.name}: --on {distribution.on} cannot be used yet ({len(requests)} requests)"
    )


def measure_on_slots(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    distribution: Distribution,
    *,
    is_quiet: bool,
    keeps_raw_logs: bool,
) -> "Outcome | None":
    """Measure the blocks that are not done, at most ``--parallel`` at a time; returns their outcome."""
    del requests, is_quiet, keeps_raw_logs
    raise UsageError(f"{results.path}, {profile.name}: --on {distribution.on} cannot be used yet")
