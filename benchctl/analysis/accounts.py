"""What each run was asked to do, and the FLOPs that this should have cost, by what its profile says."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.analysis.flops_accounting import RunFlops, account_run
from benchctl.analysis.peaks import peaks_of
from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.plan import variant_settings
from benchctl.records.directory import LoadedResults, LoadedRun
from benchctl.records.run import PreparedRequest, ResultWarning, RunRecord


@dataclass(frozen=True, slots=True)
class Accounts:
    """The profile's side of a result directory. Without a readable profile nothing is known."""

    profile: Profile | None
    prepared: Sequence[PreparedRequest]
    warnings: tuple[ResultWarning, ...] = ()
    hardware: Hardware | None = None
    """The device whose peaks FLOP/s may be compared with."""

    def settings(self, record: RunRecord) -> VariantSettings | None:
        """What a run used, or None when the profile does not say so."""
        if self.profile is None or record.variant not in self.profile.variants:
            return None
        try:
            return variant_settings(self.profile, record.variant, record.cell)
        except UsageError:
            return None

    def flops(self, run: LoadedRun) -> tuple[RunFlops | None, tuple[ResultWarning, ...]]:
        """Published and observed FLOPs of a run; None when its settings or the shape of a model are unknown.

        A value model counts where the run's requests asked for guidance, not where one lay idle.
        """
        settings = self.settings(run.record)
        if self.profile is None or settings is None:
            return None, ()
        guided_by = settings.server.guides_with if settings.guidance is not None else None
        try:
            base = shape_for(settings.model)
            value_model = None if guided_by is None else shape_for(guided_by)
        except UsageError as error:
            doubt = ResultWarning(code="model-shape-unknown", message=f"no FLOPs: {error}", where=run.record.run_id)
            return None, (doubt,)
        flops = account_run(
            run,
            base=base,
            value_model=value_model,
            top_k=settings.sampling.top_k,
            hardware=self.hardware,
            prepared=self.prepared,
        )
        return flops, flops.warnings


def open_accounts(results: LoadedResults) -> Accounts:
    """Read the profile that lies in a result directory; a warning says so when that cannot be done."""
    source = str(results.path / "profile.yaml")
    try:
        profile = parse_profile(results.profile_yaml, source)
    except UsageError as error:
        doubt = ResultWarning(
            code="profile-unreadable",
            message=f"settings and FLOPs of the runs are unknown, because the profile cannot be read: {error}",
            where=source,
        )
        return Accounts(None, results.requests, (doubt,))
    hardware, doubts = peaks_of(profile, results.manifest)
    return Accounts(profile, results.requests, doubts, hardware)
