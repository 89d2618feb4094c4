"""Every run as a row of numbers, every arm as the centres of its blocks, every other arm against the baseline.

The centres and ratios are those of ``ArmPair.ratio``, as in a comparison. A row of the sweep has the cost in time
and FLOPs, and the part that FLOPs do not explain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from statistics import fmean, stdev
from typing import Any, Final

from benchctl.analysis.attribution.breakdown import Breakdown, mean_breakdown, runs_at_level
from benchctl.analysis.attribution.estimate import Split
from benchctl.analysis.attribution.flops import RunFlops
from benchctl.analysis.experiment.columns import CLIENT_COLUMNS, LABEL_COLUMNS, SUMMARY_COLUMNS, Value, number_of
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import ArmPair
from benchctl.analysis.metrics.latency import mean_of_known, quotient
from benchctl.analysis.metrics.run import ArmDrafts, arm_drafts
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.estimate import RatioEstimate, SideRatio, adjusted_level, scatter_of
from benchctl.analysis.validity.usable import Usability
from benchctl.costs.flops import utilization_frac
from benchctl.profile.model import VariantSettings
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RunRecord
from benchctl.records.schema import Cell, ResultWarning

_OF_COMPARISONS: Final = METRICS.keys() | CLIENT_COLUMNS
"""Columns whose centres are those of a comparison."""
INFEASIBLE_CAUSES: Final = frozenset({"out-of-memory", "infeasible"})
"""Causes of failure that mark the whole cell; ``infeasible`` are blocks that were skipped after the first."""


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run with what its experiment derives from it."""

    run: LoadedRun
    experiment: Experiment

    @property
    def record(self) -> RunRecord:
        return self.run.record

    @cached_property
    def usability(self) -> Usability:
        return self.experiment.usability(self.run)

    @property
    def settings(self) -> VariantSettings | None:
        return self.experiment.settings(self.record)

    @property
    def flops(self) -> RunFlops | None:
        return self.experiment.flops(self.run)

    @property
    def values(self) -> Mapping[str, Value]:
        """Its row: a value for every column of ``SUMMARY_COLUMNS``, None if it is unknown."""
        return self.experiment.row(self.run)

    @cached_property
    def warnings(self) -> tuple[ResultWarning, ...]:
        """Those on record, and those that its records give rise to now."""
        run, experiment = self.run, self.experiment
        return (
            *run.warnings,
            *experiment.contradictions(run),
            *experiment.unsteadiness(run),
            *(() if self.flops is None else self.flops.warnings),
        )

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
        """The value of a numeric column; None if it rests on client times that do not count."""
        return self.experiment.counted_columns(self.run).get(column)

    def reason_excluded(self, column: str) -> str | None:
        """The reason why the value of a column does not count; None if it does."""
        if self.is_usable and self.counted(column) is not None:
            return None
        return self.state


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


@dataclass(frozen=True, eq=False)
class Spreads(Mapping[str, Spread]):
    """The spread of each column with a known number, computed when it is first read: few are shown."""

    columns: Sequence[str]
    spread_of: Callable[[str], Spread]

    def __getitem__(self, column: str) -> Spread:
        if column not in self.columns:
            raise KeyError(column)
        return self.spread_of(column)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


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
        at_middle = [
            run.experiment.run_time(run.run).scaled(step=run.experiment.position_scale(run.run, "step_ms"))
            for run in self.runs
        ]
        return mean_breakdown(runs_at_level(at_middle, self.centre("step_ms")))


def summarise_cells(
    runs: Iterable[RunSummary], experiment: Experiment, pairs: Sequence[ArmPair] = ()
) -> tuple[CellSummary, ...]:
    """Each arm with a run, over its blocks: the baseline first, then by variant and factor values.

    Arms that are compared with the baseline in ``pairs`` have the centres whose quotient is the ratio; the baseline
    has those of the only arm that is compared with it.
    """
    runs_of: dict[str, list[RunSummary]] = {}
    for run in sorted(runs, key=lambda run: run.record.block):
        runs_of.setdefault(run.label, []).append(run)
    cells = []
    for arm in experiment.arms:
        begun = runs_of.get(arm.label, [])
        usable = tuple(run for run in begun if run.is_usable)
        own = next((paired for paired in pairs if paired.b.label == arm.label), None)
        of_baseline = [paired for paired in pairs if paired.a.label == arm.label]
        paired = of_baseline[0] if own is None and len(of_baseline) == 1 else own
        causes = {run.record.failure.cause for run in begun if run.record.failure is not None}
        numbers = [experiment.counted_columns(run.run) for run in usable]
        columns = [
            column
            for column in SUMMARY_COLUMNS
            if column not in LABEL_COLUMNS and any(of_run.get(column) is not None for of_run in numbers)
        ]
        spread_of = partial(_spread_of, usable=usable, experiment=experiment, paired=paired)
        cells.append(
            CellSummary(
                variant=arm.variant,
                cell=arm.cell,
                runs=usable,
                num_unusable=len(begun) - len(usable),
                spreads=Spreads(columns, cache(spread_of)),
                infeasible="out of memory" if causes & INFEASIBLE_CAUSES and not usable else None,
            )
        )
    return tuple(cell for cell in cells if runs_of.get(cell.label))


def _spread_of(
    column: str,
    usable: Sequence[RunSummary],
    experiment: Experiment,
    paired: ArmPair | None,
) -> Spread:
    """The spread of a column over the usable runs of an arm, of which at least one knows it."""
    numbers = {run: number for run in usable if (number := run.counted(column)) is not None}
    values = list(numbers.values())
    if column not in _OF_COMPARISONS or min(values) <= 0:
        mean, sd = fmean(values), stdev(values) if len(values) > 1 else None
        scatter_frac = sd / abs(mean) if sd is not None and mean else None
        return Spread(centre=mean, n=len(values), sd=sd, scatter_frac=scatter_frac)
    ratio = None if paired is None else paired.ratio(column, of_few=True)
    if paired is not None and ratio is not None and paired.b.label == usable[0].label:
        values, centre, weights = list(ratio.b_values), ratio.b, ratio.estimate.block_weights
    elif ratio is not None and len(ratio.a_values) == len(values):
        values, centre, weights = list(ratio.a_values), ratio.a, ratio.estimate.block_weights
    else:
        offsets = [experiment.offset(run.run) for run in numbers]
        slope = experiment.position_slope(column, usable[0].record.cell, of_few=True)
        centre, weights = adjusted_level(values, offsets, slope, experiment.estimator)
    return Spread(
        centre=centre,
        n=len(values),
        sd=stdev(values) if len(values) > 1 else None,
        scatter_frac=scatter_of(values, weights),
    )


_SIDES: Final = {
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
LENVM_SWEEP_COLUMNS: Final = (
    "k",
    "results_dir",
    *(column for columns in _SIDES.values() for column in columns),
    *_SECTION_MEANS,
    "utilization_gap",
)
SWEEP_COLUMNS: Final = (
    *LENVM_SWEEP_COLUMNS,
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
MIN_EXPLAINED_LOG_RATIO: Final = math.log(1.02)
"""Smallest slowdown (two percent) whose causes are divided."""


@dataclass(frozen=True, eq=False)
class SweepRow:
    """One arm against the baseline, in at least one block."""

    pair: ArmPair
    work: Split | str
    """The mean step by the floors of the models, or the reason why these are unknown."""

    @property
    def variant(self) -> str:
        return self.pair.b.variant

    @property
    def cell(self) -> Cell:
        return self.pair.b.cell

    @property
    def label(self) -> str:
        return self.pair.b.label

    @cached_property
    def ratios(self) -> Mapping[str, SideRatio]:
        """The ratio of each quantity that some block has on both sides."""
        compared = {name: self.pair.ratio(column, of_few=True) for name, column in _COMPARED.items()}
        return {name: ratio for name, ratio in compared.items() if ratio is not None}

    @property
    def estimates(self) -> Mapping[str, RatioEstimate]:
        """Ratio of each compared quantity."""
        return {quantity: ratio.estimate for quantity, ratio in self.ratios.items()}

    def number(self, column: str) -> float | None:
        return number_of(self.values[column])

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Every column of ``SWEEP_COLUMNS``."""
        experiment, runs, estimates = self.pair.sides[1], self.pair.b_runs, self.estimates
        ratio_of = {name: estimate.ratio for name, estimate in estimates.items()}
        settings, wall = experiment.settings(self.pair.b), estimates.get("wall")
        wall_ratio, flops, observed = (ratio_of.get(name) for name in ("wall", "pflops", "pflops_observed"))
        floor = None if isinstance(self.work, str) else self.work.predicted
        floor_ratio = None if floor is None else floor.ratio
        of_sides: dict[str, Value] = {}
        for quantity in _SIDES.keys() & self.ratios.keys():
            ratio = self.ratios[quantity]
            of_sides |= zip(_SIDES[quantity], (ratio.a, ratio.b, ratio.estimate.ratio), strict=True)
        return dict.fromkeys(SWEEP_COLUMNS) | {
            "k": None if settings is None else settings.sampling.top_k,
            "results_dir": str(experiment.path),
            **of_sides,
            **{
                name: mean_of_known([number_of(experiment.row(run)[column]) for run in runs])
                for name, column in _SECTION_MEANS.items()
            },
            "utilization_gap": quotient(wall_ratio, flops),
            "variant": self.variant,
            "cell": cell_name(self.cell),
            "n_blocks": len(runs),
            "wall_ratio_ci_low": None if wall is None else wall.ci_low,
            "wall_ratio_ci_high": None if wall is None else wall.ci_high,
            "num_steps_ratio": ratio_of.get("num_steps"),
            "step_ms_ratio": ratio_of.get("step_ms"),
            "flops_ratio_observed": observed,
            "utilization_gap_observed": quotient(wall_ratio, observed),
            "unexplained_frac": unexplained_frac(wall, flops),
            "unexplained_frac_observed": unexplained_frac(wall, observed),
            "step_floor_ratio": floor_ratio,
            "step_times_floor": quotient(ratio_of.get("step_ms"), floor_ratio),
        }


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


def flops_bridge(cell: CellSummary) -> dict[str, Any] | None:
    """The corrections from the published to the observed FLOPs of a cell, means per run, which add up.

    ``utilization_frac`` is the mean share of the device's peak at which the observed ones were computed; None where
    peak or time of a run are unknown. The whole is None if a run lacks published or observed FLOPs.
    """
    runs = [(run, run.flops) for run in cell.runs if run.flops is not None and run.flops.observed is not None]
    published = [flops.published.total for _, flops in runs if flops.published is not None]
    observed = [flops.observed.total for _, flops in runs if flops.observed is not None]
    if not runs or len(published) != len(runs):
        return None
    corrections = [correction for _, flops in runs for correction in flops.corrections]
    meanings = {correction.code: correction.meaning for correction in corrections}
    sums = {code: sum(c.flops for c in corrections if c.code == code) for code in meanings}
    shares = [
        utilization_frac(total, run.number("wall_s"), run.experiment.hardware_of(run.record))
        for (run, _), total in zip(runs, observed, strict=True)
    ]
    return {
        "label": cell.label,
        "published_flops": fmean(published),
        "steps": [  # a correction that a run does not need counts as 0
            {"code": code, "meaning": meanings[code], "flops": flops / len(runs)} for code, flops in sums.items()
        ],
        "observed_flops": fmean(observed),
        "utilization_frac": None if None in shares else mean_of_known(shares),
    }
