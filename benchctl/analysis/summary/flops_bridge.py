"""From published to observed FLOPs over the blocks of a cell, in mean corrections that add up."""

from dataclasses import dataclass
from statistics import fmean

from benchctl.analysis.summary.summary import CellSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStep:
    """One correction, mean FLOPs over the runs of a cell; negative if less was computed than charged."""

    code: str
    meaning: str
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsBridge:
    """Corrections from the published to the observed FLOPs of a cell, means per run.

    Invariant: ``published_flops`` plus all steps is ``observed_flops``. ``utilization_frac`` is the mean share of
    the device's peak at which the observed ones were computed; None where peak or time of a run are unknown.
    """

    label: str
    published_flops: float
    steps: tuple[BridgeStep, ...]
    observed_flops: float
    utilization_frac: float | None = None


def flops_bridge(cell: CellSummary) -> FlopsBridge | None:
    """The bridge of a cell; None if no run has both published and observed FLOPs."""
    runs = [run.flops for run in cell.runs if run.flops is not None and run.flops.observed is not None]
    published = [flops.published.total for flops in runs if flops.published is not None]
    observed = [flops.observed.total for flops in runs if flops.observed is not None]
    if not runs or len(published) != len(runs):
        return None
    corrections = [correction for flops in runs for correction in flops.corrections]
    meanings = {correction.code: correction.meaning for correction in corrections}
    shares = [flops.utilization_frac(flops.observed) for flops in runs]
    known_shares = [share for share in shares if share is not None]
    sums = {code: sum(c.flops for c in corrections if c.code == code) for code in meanings}
    return FlopsBridge(
        label=cell.label,
        published_flops=fmean(published),
        steps=tuple(  # a correction that a run does not need counts as 0
            BridgeStep(code=code, meaning=meanings[code], flops=flops / len(runs)) for code, flops in sums.items()
        ),
        observed_flops=fmean(observed),
        utilization_frac=fmean(known_shares) if len(known_shares) == len(runs) else None,
    )
