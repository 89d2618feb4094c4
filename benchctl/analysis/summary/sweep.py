"""Every cell against the baseline of its own block: the cost in time and FLOPs, and the part that FLOPs do not
explain.

Ratios, intervals and absolute values come from ``side_ratio``, as in a comparison: each ratio column is exactly the
quotient of its two columns. Section times (``*_ms_mean``) are arithmetic means over blocks of the mean over the
steps that have the section. The leading columns have the names of the published sweep table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from benchctl.analysis.attribution.work_split import StepFloor
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.metrics.unknown import mean_of_known, quotient
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.analysis.summary.columns import Value, number_of
from benchctl.analysis.summary.runs import CellSummary, RunSummary
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.record import Cell

_PUBLISHED: Final = {
    "wall": ("base_wall_s", "lvm_wall_s", "wall_ratio"),
    "tok_per_s": ("base_tok_per_s", "lvm_tok_per_s", "tok_per_s_ratio"),
    "pflops": ("base_pflops", "lvm_pflops", "flops_ratio"),
    "achieved_tflops": ("base_achieved_tflops_per_s", "lvm_achieved_tflops_per_s", "achieved_tflops_ratio"),
}
"""Columns of a compared quantity: the values of both sides, and their ratio."""
_SECTION_MEANS: Final = {
    "lvm_apply_ms_mean": "t_lvm_apply_outer_ms_mean",
    "lvm_forward_ms_mean": "t_lvm_forward_ms_mean",
    "lvm_build_pending_ms_mean": "t_lvm_build_pending_ms_mean",
    "lvm_apply_guidance_ms_mean": "t_lvm_apply_guidance_ms_mean",
}
_RATIO_COLUMNS: Final = tuple(chain.from_iterable(_PUBLISHED.values()))
LENVM_SWEEP_COLUMNS: Final = ("k", "results_dir", *_RATIO_COLUMNS, *_SECTION_MEANS, "utilization_gap")
OWN_SWEEP_COLUMNS: Final = (
    "variant",
    "cell",
    "n_blocks",
    "wall_ratio_ci_low",
    "wall_ratio_ci_high",
    "num_steps_ratio",
    "step_ms_ratio",
    "flops_ratio_observed",
    "utilization_gap_observed",
    "unexplained_frac",
    "unexplained_frac_observed",
    "step_floor_ratio",
    "step_times_floor",
    "infeasible",
)
SWEEP_COLUMNS: Final = (*LENVM_SWEEP_COLUMNS, *OWN_SWEEP_COLUMNS)

_COMPARED: Final = {
    "wall": "wall_s",
    "tok_per_s": "output_throughput",
    "pflops": "theoretical_pflops_total",
    "achieved_tflops": "achieved_tflops_per_s",
    "num_steps": "num_steps",
    "step_ms": "step_ms",
    "ttft": "ttft_ms",
    "p99_ttft": "p99_ttft_ms",
    "pflops_observed": "observed_pflops_total",
}
"""Compared quantities, and their columns in the row of a run."""
_OF_TIME: Final = frozenset({"wall", "tok_per_s", "achieved_tflops", "step_ms", "ttft", "p99_ttft"})
"""Quantities that drift within a block changes; the others are counts."""

MIN_EXPLAINED_LOG_RATIO: Final = math.log(1.02)
"""Smallest slowdown (two percent) whose causes are divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One cell of one variant against the baseline; ``values`` has every column of ``SWEEP_COLUMNS``."""

    variant: str
    cell: Cell
    blocks: tuple[int, ...]
    """Blocks in which both runs are usable; at least one."""
    ratios: Mapping[str, SideRatio]
    """The ratio of each quantity that some block has on both sides."""
    values: Mapping[str, Value]
    floor: StepFloor | str | None = None
    """The ratio of the steps at the peaks of the device, or the reason why it is unknown; None without guidance."""

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)

    @property
    def estimates(self) -> Mapping[str, RatioEstimate]:
        """Ratio of each compared quantity."""
        return {quantity: ratio.estimate for quantity, ratio in self.ratios.items()}

    def number(self, column: str) -> float | None:
        return number_of(self.values[column])


def sweep_rows(
    pairs: Sequence[PairedRuns],
    runs: Sequence[RunSummary],
    *,
    confidence: float,
    results_dir: str,
    floor_of: Callable[[PairedRuns], StepFloor | str | None] = lambda _: None,
) -> tuple[SweepRow, ...]:
    """A row for each arm that shares at least one block with the baseline; ``pairs`` are those of ``runs``."""
    summaries = {id(run.run): run for run in runs}
    return tuple(_row(paired, summaries, confidence, results_dir, floor_of(paired)) for paired in pairs)


def infeasible_values(cell: CellSummary, results_dir: str) -> dict[str, Value]:
    """The columns of an infeasible cell: its name and the reason, without numbers."""
    values: dict[str, Value] = {
        "results_dir": results_dir,
        "variant": cell.variant,
        "cell": cell_name(cell.cell),
        "n_blocks": 0,
        "infeasible": cell.infeasible,
    }
    return {column: values.get(column) for column in SWEEP_COLUMNS}


def unexplained_frac(wall: RatioEstimate | None, flops_ratio: float | None) -> float | None:
    """Share of a slowdown that more FLOPs do not explain: 1 - ln(FLOPs ratio) / ln(wall ratio).

    From wall ratio = FLOPs ratio / (ratio of achieved FLOP/s): in logarithms the two factors add up, so their
    shares do as well. Above 1 if FLOPs fell; below 0 if FLOPs grew more than time. None without a slowdown to
    divide: the ratio is below two percent, or its interval includes 1.
    """
    if wall is None or flops_ratio is None or wall.log_ratio < MIN_EXPLAINED_LOG_RATIO:
        return None
    if wall.log_interval is not None and wall.log_interval[0] <= 0:
        return None
    return 1 - math.log(flops_ratio) / wall.log_ratio


def _row(
    paired: PairedRuns,
    summaries: Mapping[int, RunSummary],
    confidence: float,
    results_dir: str,
    floor: StepFloor | str | None,
) -> SweepRow:
    runs = [summaries[id(run)] for run in paired.pair.b_runs]
    ratios = {
        quantity: of_sides
        for quantity in _COMPARED
        if (of_sides := _ratio(quantity, paired, summaries, confidence)) is not None
    }
    estimates = {quantity: ratio.estimate for quantity, ratio in ratios.items()}
    ratio = {quantity: estimate.ratio for quantity, estimate in estimates.items()}
    record = runs[0].record
    settings = runs[0].settings
    wall, flops, observed = ratio.get("wall"), ratio.get("pflops"), ratio.get("pflops_observed")
    values: dict[str, Value] = {
        "k": None if settings is None else settings.sampling.top_k,
        "results_dir": results_dir,
        **_published_columns(ratios),
        **{name: mean_of_known([run.number(column) for run in runs]) for name, column in _SECTION_MEANS.items()},
        "utilization_gap": quotient(wall, flops),
        "variant": record.variant,
        "cell": cell_name(record.cell),
        "n_blocks": len(runs),
        "wall_ratio_ci_low": estimates["wall"].ci_low if "wall" in estimates else None,
        "wall_ratio_ci_high": estimates["wall"].ci_high if "wall" in estimates else None,
        "num_steps_ratio": ratio.get("num_steps"),
        "step_ms_ratio": ratio.get("step_ms"),
        "flops_ratio_observed": observed,
        "utilization_gap_observed": quotient(wall, observed),
        "unexplained_frac": unexplained_frac(estimates.get("wall"), flops),
        "unexplained_frac_observed": unexplained_frac(estimates.get("wall"), observed),
        "step_floor_ratio": floor.ratio if isinstance(floor, StepFloor) else None,
        "step_times_floor": floor.times_floor if isinstance(floor, StepFloor) else None,
        "infeasible": None,
    }
    return SweepRow(
        variant=record.variant,
        cell=record.cell,
        blocks=paired.pair.blocks,
        ratios=ratios,
        values={column: values[column] for column in SWEEP_COLUMNS},
        floor=floor,
    )


def _ratio(
    quantity: str, paired: PairedRuns, summaries: Mapping[int, RunSummary], confidence: float
) -> SideRatio | None:
    """The ratio as in ``compare``: the same runs, blocks, position effect and estimator."""
    column = _COMPARED[quantity]
    return paired.ratio_of(
        lambda run: summaries[id(run)].counted(column), is_time=quantity in _OF_TIME, confidence=confidence
    )


def _published_columns(ratios: Mapping[str, SideRatio]) -> dict[str, Value]:
    columns: dict[str, Value] = dict.fromkeys(_RATIO_COLUMNS)
    for quantity in _PUBLISHED.keys() & ratios.keys():
        of_sides = ratios[quantity]
        numbers = (of_sides.a, of_sides.b, of_sides.estimate.ratio)
        columns |= zip(_PUBLISHED[quantity], numbers, strict=True)
    return columns
