"""An experiment whose blocks are handed out: to Slurm, or to the slots of this host."""

from collections.abc import Sequence

from benchctl.cli.cluster.local import check_slots, measure_on_slots, print_slots
from benchctl.cli.cluster.slurm import check_block_time as check
from benchctl.cli.cluster.slurm import check_slurm, measure_on_slurm, print_submission, print_tasks
from benchctl.cli.options.options import Distribution, Scheduler
from benchctl.errors import UsageError
from benchctl.measure.experiment import Outcome
from benchctl.profile.load import load_cluster
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PreparedRequest
from benchctl.records.shared_claims import share


def measure_distributed(
    results: ResultDirectory,
    profile: Profile,
    requests: tuple[PreparedRequest, ...],
    distribution: Distribution,
    *,
    is_quiet: bool,
    keeps_raw_logs: bool,
) -> Outcome | None:
    """Hand out the blocks that are not done, and wait for them.

    Returns the outcome; None where nothing is waited for, after the next step was printed.
    """
    share(results)
    if distribution.on is Scheduler.SLURM:
        return measure_on_slurm(results, profile, distribution, is_quiet=is_quiet, keeps_raw_logs=keeps_raw_logs)
    if distribution.on is Scheduler.LOCAL:
        return measure_on_slots(
            results, profile, requests, distribution, is_quiet=is_quiet, keeps_raw_logs=keeps_raw_logs
        )

    print_tasks(results)
    return None


def print_distribution(
    profile: Profile,
    requests: tuple[PreparedRequest, ...],
    distribution: Distribution,
    blocks: Sequence[int] | None = None,
) -> None:
    """Print for a dry run where the blocks, by default all, would be measured; nothing is written or submitted."""
    if distribution.on is Scheduler.SLURM:
        print_submission(profile, range(profile.blocks) if blocks is None else blocks)
    elif distribution.on is Scheduler.LOCAL:
        print_slots(profile, requests, distribution)


def check_distribution(profile: Profile, distribution: Distribution, *, is_plan: bool = False) -> None:
    """Raise UsageError, before anything is written, for an experiment that cannot be handed out this way.

    A plan may be made where Slurm is not: that is then a warning.
    """
    if distribution.is_shared and profile.stopping is not None:
        raise UsageError(
            "a stopping rule looks at the blocks in their order, and here they are handed out; leave out "
            "--until-precision (stopping in the profile), or --on and --prepare"
        )
    if distribution.on is Scheduler.SLURM:
        check_slurm(profile, is_plan=is_plan)
    elif distribution.on is Scheduler.LOCAL:
        check_slots(profile, distribution, is_plan=is_plan)


def with_cluster(profile: Profile, distribution: Distribution, given: Profile | None = None) -> Profile:
    """The profile with the cluster settings that count: those of ``--cluster FILE``, else those of the profile that
    was ``given`` with ``--resume``, else its own; ``--parallel`` goes over them.

    Raises ProfileError for a file that does not describe them.
    """
    if distribution.on is not Scheduler.SLURM:
        return profile
    settings = profile.cluster if given is None else given.cluster
    if distribution.cluster_file is not None:
        settings = load_cluster(distribution.cluster_file)
    if distribution.parallel is not None:
        settings = settings.model_copy(update={"parallel": distribution.parallel})
    return profile.model_copy(update={"cluster": settings})


def check_block_time(
    profile: Profile, requests: Sequence[PreparedRequest], distribution: Distribution, *, is_plan: bool = False
) -> None:
    """Raise UsageError where a block needs longer than its task may last; of a plan it is a warning."""
    if distribution.on is Scheduler.SLURM:
        check(profile, requests, is_plan=is_plan)
