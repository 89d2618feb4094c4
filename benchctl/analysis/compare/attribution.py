"""The decomposition of each cell of a comparison."""

from collections.abc import Sequence
from dataclasses import replace

from benchctl.analysis.attribution.decomposition import Decomposition, decompose, steps_at_level
from benchctl.analysis.attribution.estimate import PairDesign
from benchctl.analysis.attribution.factors import Ratios
from benchctl.analysis.attribution.run_time import RunAnatomy, TimeScales, at_middle_of_block
from benchctl.analysis.attribution.steps import SectionSplit, split_sections
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.statistics.block_ratio import Estimator
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.records.loaded import LoadedRun


def with_decompositions(
    cells: Sequence[CellComparison], pairs: Sequence[PairedRuns], confidence: float, estimator: Estimator
) -> tuple[CellComparison, ...]:
    """The cells with their decompositions; ``pairs`` are their runs, in the same order."""
    return tuple(
        replace(cell, decomposition=_decompose(paired, cell.label, confidence, estimator))
        for cell, paired in zip(cells, pairs, strict=True)
    )


def _decompose(paired: PairedRuns, label: str, confidence: float, estimator: Estimator) -> Decomposition | None:
    a, b = _anatomies(paired, has_latencies=True)
    wall, step = (_ratio(paired, name, confidence, estimator) for name in ("wall_s", "step_ms"))
    stop = paired.a.results.manifest.stop
    return decompose(label, a, b, _pair_design(paired, confidence), stop, Ratios(wall, step))


def section_split(paired: PairedRuns, confidence: float) -> SectionSplit | None:
    """The mean step of two arms divided into sections as in a comparison; None where no section is known."""
    a, b = _anatomies(paired, has_latencies=False)
    if not a or not b or not all(run.has_steps for run in (*a, *b)):
        return None
    a, b = steps_at_level(a, b, _ratio(paired, "step_ms", confidence, paired.a.estimator))
    return split_sections(a, b, _pair_design(paired, confidence).of_times("step"))


def _ratio(paired: PairedRuns, name: str, confidence: float, estimator: Estimator) -> SideRatio | None:
    return None if paired.pair.pairing == "unpaired" else paired.ratio(name, confidence, estimator)


def _pair_design(paired: PairedRuns, confidence: float) -> PairDesign:
    slopes = paired.a.position_slopes if paired.pair.is_ordered else {}
    kinds = {kind: name for kind, name in _SCALED.items() if name in slopes}
    return PairDesign(
        is_paired=paired.pair.pairing != "unpaired",
        confidence=confidence,
        positions=paired.design.positions,
        informations={kind: slopes[name].information for kind, name in kinds.items()},
        has_own_wall=paired.pair.is_ordered and not paired.a.is_pooled,
    )


def _anatomies(paired: PairedRuns, *, has_latencies: bool) -> tuple[list[RunAnatomy], list[RunAnatomy]]:
    """The runs of both sides at the middle of their blocks; those of sections need no latencies of requests."""

    def of_side(runs: Sequence[LoadedRun], side: Experiment) -> list[RunAnatomy]:
        anatomies = list(map(side.anatomy, runs))
        if has_latencies:
            anatomies = [replace(side.anatomy(run), latencies=side.latencies(run)) for run in runs]
        is_ordered = paired.pair.is_ordered
        return [
            _at_middle(anatomy, run, side, is_ordered=is_ordered)
            for anatomy, run in zip(anatomies, runs, strict=True)
        ]

    return of_side(paired.pair.a_runs, paired.a), of_side(paired.pair.b_runs, paired.b)


_SCALED = {"wall": "wall_s", "step": "step_ms", "latency": "e2el_ms"}
"""The metric whose effect of the position is that of each kind of time."""


def _at_middle(anatomy: RunAnatomy, run: LoadedRun, experiment: Experiment, *, is_ordered: bool) -> RunAnatomy:
    """Two arms estimate the effect on the wall time with its ratio, so that it stays as measured here."""
    if not is_ordered or not experiment.position_slopes:
        return anatomy
    scales = TimeScales(**{kind: experiment.position_scale(run, name) for kind, name in _SCALED.items()})
    return at_middle_of_block(anatomy, scales if experiment.is_pooled else replace(scales, wall=1.0))
