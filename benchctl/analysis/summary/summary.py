"""Every run as one row of numbers, and every variant and cell as the centre of its blocks.

Every cell against the baseline of its own block: the cost in time and FLOPs, and the part that FLOPs do not
explain.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean, stdev
from typing import Final

from benchctl.analysis.attribution.breakdown import Breakdown, StepTally, mean_breakdown, tally_steps
from benchctl.analysis.attribution.estimate import StepFloor
from benchctl.analysis.attribution.flops import RunFlops
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import PairedRuns
from benchctl.analysis.metrics.bounds import TIMES_BOUNDED, Bounds, bounds_warnings
from benchctl.analysis.metrics.latency import mean_of_known, quotient
from benchctl.analysis.metrics.speculation import ArmDrafts, arm_drafts
from benchctl.analysis.metrics.table import CLIENT_TIMED, METRICS, POSITION_ADJUSTED
from benchctl.analysis.statistics.estimate import PooledSlope, RatioEstimate, SideRatio, scatter_of
from benchctl.analysis.statistics.position_effect import adjusted_level
from benchctl.analysis.summary.columns import (
    CLIENT_COLUMNS,
    LABEL_COLUMNS,
    SUMMARY_COLUMNS,
    Value,
    number_of,
    summary_row,
)
from benchctl.analysis.validity.usable import Usability
from benchctl.profile.model import VariantSettings
from benchctl.records.directory import arm_label, arm_order, cell_name
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RunRecord
from benchctl.records.schema import Cell, ResultWarning

_OF_COMPARISONS: Final = METRICS.keys() | CLIENT_COLUMNS
"""Columns whose centres are those of a comparison."""
_TIME_COLUMNS: Final = POSITION_ADJUSTED | (CLIENT_COLUMNS - CLIENT_TIMED)
"""Columns that drift within a block changes."""
INFEASIBLE_CAUSES: Final = frozenset({"out-of-memory", "infeasible"})
"""Causes of failure that mark the whole cell; ``infeasible`` are blocks that were skipped after the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSummary:
    """One run and its row: a value for every column of ``SUMMARY_COLUMNS``, None if it is unknown."""

    run: LoadedRun
    usability: Usability
    settings: VariantSettings | None
    flops: RunFlops | None
    values: Mapping[str, Value]
    bounds: Mapping[str, Bounds]
    """Columns that are known between bounds only."""
    tally: StepTally
    """Of its steps after the warm-up."""
    step_scale: float
    """Factor that adjusts its step times to the middle of its block."""
    warnings: tuple[ResultWarning, ...]

    @property
    def record(self) -> RunRecord:
        return self.run.record

    @property
    def is_usable(self) -> bool:
        """The run counts in means and comparisons."""
        return self.usability.is_usable

    @property
    def state(self) -> str:
        """Its state, with a qualification of what counts."""
        if self.run.is_damaged:
            return f"{self.record.state}, damaged"
        if self.usability.client_excluded is not None:
            return f"{self.record.state}: client's times"
        if self.record.state == "suspect" and self.is_usable:
            return "suspect, counted"
        if self.record.state == "done" and not self.is_usable:
            return "done, excluded"
        return self.record.state

    @property
    def label(self) -> str:
        return arm_label(self.record.variant, self.record.cell)

    def number(self, column: str) -> float | None:
        """The value of a numeric column, as measured."""
        return number_of(self.values[column])

    def counted(self, column: str) -> float | None:
        """The value of a numeric column; None if it has bounds or rests on client times that do not count."""
        is_excluded = self.usability.client_excluded is not None and column in CLIENT_COLUMNS
        return None if is_excluded or column in self.bounds else self.number(column)

    def reason_excluded(self, column: str) -> str | None:
        """The reason why the value of a column does not count; None if it does."""
        if self.is_usable and self.counted(column) is not None:
            return None
        return "known between bounds only" if self.is_usable and column in self.bounds else self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Centre and scatter of a value over blocks; scatter is None for one block.

    Metrics that are positive in every block have the centre of a comparison: exp of the mean of the logarithms, at
    the middle of the block, weighted by the estimator of the profile. ``scatter_frac`` is then the standard
    deviation of the logarithms with the same weights. Other columns have the arithmetic mean, and ``scatter_frac``
    is sd / mean. ``sd`` is that of the values as measured (n - 1), in which every block counts the same.
    """

    centre: float
    n: int
    sd: float | None = None
    scatter_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One variant in one cell over its blocks; ``spreads`` has the columns with a known number."""

    variant: str
    cell: Cell
    runs: tuple[RunSummary, ...]
    """Usable runs, by block."""
    num_unusable: int
    spreads: Mapping[str, Spread]
    infeasible: str | None = None
    """The reason why no server can run this cell (``out of memory``), if no run of it is usable."""

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)

    @property
    def speculates(self) -> bool | None:
        """True where its servers draft tokens, None where their options do not say."""
        settings = next((run.settings for run in self.runs if run.settings is not None), None)
        return None if settings is None else settings.server.speculates

    def centre(self, column: str) -> float | None:
        spread = self.spreads.get(column)
        return None if spread is None else spread.centre

    def drafts(self) -> ArmDrafts | None:
        """Its speculative decoding; None where no token was drafted."""
        return arm_drafts([run.run for run in self.runs])

    def breakdown(self) -> Breakdown | None:
        """The sections of a step: shares of the mean step, at the middle of the block, times ``step_ms``.

        None without steps.
        """
        level_ms = self.centre("step_ms")
        arithmetic_ms = [time_ms * run.step_scale for run in self.runs if (time_ms := run.number("step_ms"))]
        to_level = level_ms / fmean(arithmetic_ms) if level_ms and arithmetic_ms else 1.0
        return mean_breakdown((run.tally, run.step_scale * to_level) for run in self.runs)


def summarise_runs(experiment: Experiment) -> tuple[RunSummary, ...]:
    """The row of every run that was begun, in plan order."""
    return tuple(_summarise(run, experiment) for run in experiment.results.runs)


def _summarise(run: LoadedRun, experiment: Experiment) -> RunSummary:
    settings = experiment.settings(run.record)
    flops, warnings = experiment.flops(run)
    bounds = experiment.bounds(run)
    # The warning is about late reads; a simulator that fell behind says so itself.
    is_reported = run.record.clock == "virtual" or any(warning.code == TIMES_BOUNDED for warning in run.warnings)
    return RunSummary(
        run=run,
        usability=experiment.usability(run),
        settings=settings,
        flops=flops,
        bounds=bounds,
        values=summary_row(run, experiment.metrics(run), settings, flops),
        tally=tally_steps(run.columns, covers_steps=run.record.times_whole_steps),
        step_scale=experiment.position_scale(run, "step_ms"),
        warnings=(
            *run.warnings,
            *(() if is_reported else bounds_warnings(bounds)),
            *experiment.contradictions(run),
            *experiment.prompt_warnings(run),
            *warnings,
        ),
    )


def summarise_cells(
    runs: Iterable[RunSummary], experiment: Experiment, pairs: Sequence[PairedRuns] = ()
) -> tuple[CellSummary, ...]:
    """Each variant and cell over its blocks: the baseline first, then by variant and factor values.

    Arms that are compared with the baseline in ``pairs`` have the centres whose quotient is the ratio.
    """
    baseline = experiment.results.manifest.baseline
    ordered = sorted(
        runs, key=lambda run: (arm_order(run.record.variant, run.record.cell, baseline), run.record.block)
    )
    groups: dict[str, list[RunSummary]] = {}
    for run in ordered:
        groups.setdefault(run.label, []).append(run)
    summaries = {id(run.run): run for run in ordered}
    cells = _Cells(
        experiment=experiment,
        slopes={column: experiment.slope_of(partial(_counted, summaries, column)) for column in _TIME_COLUMNS},
        summaries=summaries,
        pairs={paired.pair.b.label: paired for paired in pairs},
    )
    return tuple(cells.over_blocks(group) for group in groups.values())


def _counted(summaries: Mapping[int, RunSummary], column: str, run: LoadedRun) -> float | None:
    return summaries[id(run)].counted(column)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """Computes the centres of all cells."""

    experiment: Experiment
    slopes: Mapping[str, PooledSlope | None]
    """Effect of the position on every column of times or rates."""
    summaries: Mapping[int, RunSummary]
    pairs: Mapping[str, PairedRuns]

    def over_blocks(self, group: Sequence[RunSummary]) -> CellSummary:
        usable = tuple(run for run in group if run.is_usable)
        spreads = {}
        for column in SUMMARY_COLUMNS:
            numbers = {run: number for run in usable if (number := run.counted(column)) is not None}
            if numbers and column not in LABEL_COLUMNS:
                spreads[column] = self._spread(group[0].label, column, numbers)
        first = group[0].record
        causes = {run.record.failure.cause for run in group if run.record.failure is not None}
        return CellSummary(
            variant=first.variant,
            cell=first.cell,
            runs=usable,
            num_unusable=len(group) - len(usable),
            spreads=spreads,
            infeasible="out of memory" if causes & INFEASIBLE_CAUSES and not usable else None,
        )

    def _spread(self, label: str, column: str, numbers: Mapping[RunSummary, float]) -> Spread:
        if column not in _OF_COMPARISONS or min(numbers.values()) <= 0:
            return _spread(list(numbers.values()))
        ratio = self._ratio(label, column)
        if ratio is not None and label in self.pairs:
            return _weighted_spread(ratio.b_values, ratio.b, ratio.estimate.block_weights)
        if ratio is not None and len(ratio.a_values) == len(numbers):
            return _weighted_spread(ratio.a_values, ratio.a, ratio.estimate.block_weights)
        offsets, values = [self.experiment.offset(run.run) for run in numbers], list(numbers.values())
        slope = self.slopes.get(column)
        return _weighted_spread(values, *adjusted_level(values, offsets, slope, self.experiment.estimator))

    def _ratio(self, label: str, column: str) -> SideRatio | None:
        """The ratio to the baseline as in a comparison; for the baseline itself, that of the only arm compared with
        it.
        """
        paired = self.pairs.get(label)
        with_baseline = [pair for pair in self.pairs.values() if pair.pair.a.label == label]
        if paired is None and len(with_baseline) == 1:
            (paired,) = with_baseline
        if paired is None:
            return None
        return paired.ratio_of(partial(_counted, self.summaries, column), is_time=column in _TIME_COLUMNS)


def _weighted_spread(values: Sequence[float], centre: float, weights: Sequence[float]) -> Spread:
    return Spread(
        centre=centre,
        n=len(values),
        sd=stdev(values) if len(values) > 1 else None,
        scatter_frac=scatter_of(values, weights),
    )


def _spread(numbers: Sequence[float]) -> Spread:
    mean, sd = fmean(numbers), stdev(numbers) if len(numbers) > 1 else None
    return Spread(
        centre=mean, n=len(numbers), sd=sd, scatter_frac=sd / abs(mean) if sd is not None and mean else None
    )


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
