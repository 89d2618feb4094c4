"""Where the difference between two sides sits: the wall time as factors and parts, the latency, the step.

    wall = factors (exact in logarithms)            decomposition_factors.py
    latency of a request = parts                    decomposition_latency.py
    mean step = sections = batches = work + rest    decomposition_steps.py, decomposition_work.py

For a waterfall of the wall time: from ``wall.a_s`` by ``added_s`` of each of ``wall.factors`` to ``wall.b_s``, in
seconds, exact; for the latency from ``latency.whole.a_s`` by ``latency.parts``; for a step from
``sections.whole.a_s`` by ``sections.sections``, or from ``work.whole.a_s`` by ``work.parts``. ``is_told`` says of
each bar whether it is more than scatter. The unit of every estimate is the block, as in the comparison itself.

Wall time and factors are geometric means over the blocks, all else arithmetic ones: a product needs the former, a
sum the latter. So the mean step of ``sections`` may differ from the factor ``time per step`` by the scatter of the
blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.analysis.decomposition_estimate import Facing, kept
from benchctl.analysis.decomposition_factors import WallSplit, split_wall
from benchctl.analysis.decomposition_latency import LatencySplit, split_latency
from benchctl.analysis.decomposition_run import RunAnatomy
from benchctl.analysis.decomposition_steps import BatchSplit, SectionSplit, split_batches, split_sections
from benchctl.analysis.decomposition_work import FlooredRun, WorkSplit, split_work
from benchctl.records.run import StopMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Two sides of one cell. What the records do not tell is None."""

    label: str
    num_blocks: int
    """Of the smaller side."""
    wall: WallSplit
    latency: LatencySplit | None
    sections: SectionSplit | None
    batches: BatchSplit | None
    work: WorkSplit | None
    work_missing: str | None
    """Why there is no ``work``."""


def decompose(
    label: str, a: Sequence[RunAnatomy], b: Sequence[RunAnatomy], facing: Facing, stop: StopMode
) -> Decomposition | None:
    """The decomposition of B against A; None where no block has a wall time on both sides.

    When paired, both sequences hold the same blocks in the same order.
    """
    a, b, facing = kept(a, b, facing, lambda run: bool(run.wall_s and run.wall_s > 0))
    if not a or not b:
        return None
    has_steps = all(run.has_steps for run in (*a, *b))
    work, missing = _work(a, b, facing)
    return Decomposition(
        label=label,
        num_blocks=min(len(a), len(b)),
        wall=split_wall(a, b, facing, stop),
        latency=split_latency(a, b, facing),
        sections=split_sections(a, b, facing) if has_steps else None,
        batches=split_batches(a, b, facing) if has_steps else None,
        work=work,
        work_missing=missing,
    )


def _work(a: Sequence[RunAnatomy], b: Sequence[RunAnatomy], facing: Facing) -> tuple[WorkSplit | None, str | None]:
    for run in (*a, *b):
        if isinstance(run.floor, str):
            return None, run.floor
    sides = [
        [FlooredRun(run.step_s / run.num_steps, run.floor) for run in side if not isinstance(run.floor, str)]
        for side in (a, b)
    ]
    return split_work(sides[0], sides[1], facing), None
