"""An experiment whose blocks are handed out: to Slurm, or to the slots of this host."""

from typing import TYPE_CHECKING

from benchctl.cli.options.distribution import Distribution, Place
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.request import PreparedRequest


def measure_distributed(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    distribution: Distribution,
    *,
    is_quiet: bool,
    keeps_raw_logs: bool,
) -> "Outcome | None":
    """Hand out the blocks that are not done, and wait for them.

    Returns the outcome; None where nothing is waited for, after the next step was printed.
    """
    from benchctl.records.claims.shared import share

    share(results)
    if distribution.on is Place.SLURM:
        from benchctl.cli.cluster.slurm import measure_on_slurm

        return measure_on_slurm(results, profile, requests, distribution, is_quiet=is_quiet)
    if distribution.on is Place.LOCAL:
        from benchctl.cli.cluster.local import measure_on_slots

        return measure_on_slots(
            results, profile, requests, distribution, is_quiet=is_quiet, keeps_raw_logs=keeps_raw_logs
        )
    from benchctl.cli.cluster.prepared import print_tasks

    print_tasks(results)
    return None


def print_distribution(
    profile: "Profile", requests: "tuple[PreparedRequest, ...]", distribution: Distribution
) -> None:
    """Print for a dry run where the blocks would be measured; nothing is written or submitted."""
    if distribution.on is Place.SLURM:
        from benchctl.cli.cluster.slurm import print_submission

        print_submission(profile, requests, distribution)
    elif distribution.on is Place.LOCAL:
        from benchctl.cli.cluster.local import print_slots

        print_slots(profile, requests, distribution)


def check_distribution(profile: "Profile", distribution: Distribution, *, is_plan: bool = False) -> None:
    """Raise UsageError, before anything is written, for an experiment that cannot be handed out this way.

    A plan may be made where Slurm is not: that is then a warning.
    """
    if distribution.is_shared and profile.stopping is not None:
        raise UsageError(
            "a stopping rule looks at the blocks in their order, and here they are handed out; leave out "
            "--until-precision (stopping in the profile), or --on and --prepare"
        )
    if distribution.on is Place.SLURM:
        from benchctl.cli.cluster.slurm import check_slurm

        check_slurm(profile, distribution, is_plan=is_plan)
    elif distribution.on is Place.LOCAL:
        from benchctl.cli.cluster.local import check_slots

        check_slots(profile, distribution, is_plan=is_plan)
