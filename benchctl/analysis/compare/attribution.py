"""The decomposition of each cell of a comparison."""

from dataclasses import replace

from benchctl.analysis.attribution.breakdown import RunTimeBreakdown
from benchctl.analysis.attribution.decomposition import (
    NO_MODEL,
    Decomposition,
    decompose,
    split_work,
    steps_at_level,
)
from benchctl.analysis.attribution.estimate import PairDesign, StepFloor
from benchctl.analysis.attribution.splits import METRIC_OF
from benchctl.analysis.attribution.step_time_model import SourcedModel
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import PairedRuns
from benchctl.analysis.statistics.estimate import Estimator
from benchctl.analysis.step_time.observed import modelled_run
from benchctl.records.loaded import LoadedRun


def decompose_pair(
    paired: PairedRuns, confidence: float, estimator: Estimator, model: SourcedModel | str
) -> Decomposition | None:
    """The decomposition of one cell; ``model`` explains its steps, or is the reason why none does."""
    a, b = _break_down_runs(paired, model)
    compared = {name: paired.ratio(name, confidence, estimator) for name in ("wall_s", *METRIC_OF.values())}
    ratios = {name: ratio for name, ratio in compared.items() if ratio is not None}
    design, stop = _pair_design(paired, confidence), paired.a.results.manifest.stop
    return decompose(paired.pair.label, a, b, design, stop, ratios, model)


def step_floor(paired: PairedRuns, confidence: float) -> StepFloor | str | None:
    """The step of two arms beside the ratio of their floors, as in a comparison, or why that ratio is unknown.

    None where no value model scored anything on either side.
    """
    a, b = _break_down_runs(paired)
    if not any(run.is_guided for run in (*a, *b)):
        return None
    if not a or not b or not all(run.has_steps for run in (*a, *b)):
        return "the step log of a side does not time whole steps"
    ratio = paired.ratio("step_ms", confidence)
    work = split_work(*steps_at_level(a, b, ratio), _pair_design(paired, confidence).of_times("step"), ratio)
    return work if isinstance(work, str) else work.floor


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


def _break_down_runs(
    paired: PairedRuns, model: SourcedModel | str = NO_MODEL
) -> tuple[list[RunTimeBreakdown], list[RunTimeBreakdown]]:
    """The runs of both sides at the middle of their blocks.

    Two arms estimate the effect on the wall time with its ratio, so that the wall time stays as measured here.
    """

    def break_down(run: LoadedRun, side: Experiment) -> RunTimeBreakdown:
        breakdown = side.run_time(run)
        if isinstance(model, SourcedModel):
            breakdown = replace(breakdown, modelled=modelled_run(side, run, model))
        if not paired.pair.is_ordered or not side.position_slopes:
            return breakdown
        wall = side.position_scale(run, "wall_s") if side.is_pooled else 1.0
        return breakdown.scaled(wall=wall, step=side.position_scale(run, "step_ms"))

    a = [break_down(run, paired.a) for run in paired.pair.a_runs]
    return a, [break_down(run, paired.b) for run in paired.pair.b_runs]


_SCALED = {"wall": "wall_s", "step": "step_ms"}
"""The metric whose effect of the position is that of each kind of time."""
