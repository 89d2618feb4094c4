"""From published to observed FLOPs over the blocks of a cell, in mean corrections that add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchctl.analysis.attribution.flops import RunFlops
from benchctl.analysis.summary.runs import CellSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStep:
    """One correction, mean FLOPs over the runs of a cell; negative if less was computed than charged."""

    code: str
    meaning: str
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsBridge:
    """Corrections from the published to the observed FLOPs of a cell, means per run.

    Invariant: ``published_flops`` plus all steps is ``observed_flops``.
    """

    label: str
    published_flops: float
    steps: tuple[BridgeStep, ...]
    observed_flops: float


def flops_bridge(cell: CellSummary) -> FlopsBridge | None:
    """The bridge of a cell; None if no run has both published and observed FLOPs."""
    runs = [run.flops for run in cell.runs if run.flops is not None and run.flops.observed is not None]
    published = [flops.published.total for flops in runs if flops.published is not None]
    observed = [flops.observed.total for flops in runs if flops.observed is not None]
    if not runs or len(published) != len(runs):
        return None
    return FlopsBridge(
        label=cell.label,
        published_flops=fmean(published),
        steps=_mean_steps(runs),
        observed_flops=fmean(observed),
    )


def _mean_steps(runs: Sequence[RunFlops]) -> tuple[BridgeStep, ...]:
    """Mean corrections; one that a run does not need counts as 0."""
    meanings = {correction.code: correction.meaning for flops in runs for correction in flops.corrections}
    return tuple(
        BridgeStep(
            code=code,
            meaning=meaning,
            flops=sum(c.flops for flops in runs for c in flops.corrections if c.code == code) / len(runs),
        )
        for code, meaning in meanings.items()
    )
