"""Two arms with the values that every comparison of them takes: metrics by block, positions, slopes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchctl.analysis.experiment.experiment import Experiment, Metrics
from benchctl.analysis.experiment.pairing import CellPair
from benchctl.analysis.statistics.block_ratio import Estimator, PooledSlope
from benchctl.analysis.statistics.side_ratio import UNORDERED, BlockDesign, SideRatio, metric_ratio, side_ratio
from benchctl.analysis.validity.prompt_tokens import differing_counts
from benchctl.analysis.validity.token_checks import Check
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRuns:
    """A pair of arms with the experiments that they belong to: the same one where both are of one directory."""

    pair: CellPair
    a: Experiment
    b: Experiment
    design: BlockDesign

    @classmethod
    def of(cls, pair: CellPair, experiments: tuple[Experiment, Experiment]) -> "PairedRuns":
        """The pair with its design: positions count only where both sides ran inside the same blocks."""
        design = UNORDERED if pair.pairing == "unpaired" else BlockDesign(pair.blocks)
        if pair.is_ordered:
            a, b = pair.a.positions, pair.b.positions
            centre = experiments[0].position_effects.centre
            design = BlockDesign(
                pair.blocks,
                tuple(b[block] - a[block] for block in pair.blocks),
                tuple(a[block] - centre for block in pair.blocks),
            )
        return cls(pair=pair, a=experiments[0], b=experiments[1], design=design)

    @property
    def runs(self) -> tuple[LoadedRun, ...]:
        """The runs of both sides."""
        return (*self.pair.a_runs, *self.pair.b_runs)

    def metrics(self) -> tuple[list[Metrics], list[Metrics]]:
        """The metrics of each side that count, run by run."""
        a = [self.a.counted_metrics(run) for run in self.pair.a_runs]
        b = [self.b.counted_metrics(run) for run in self.pair.b_runs]
        return a, b

    def slopes(self) -> Mapping[str, PooledSlope] | None:
        """Effects of the position by metric, from all arms; None where these two arms estimate their own."""
        if not self.pair.is_ordered:
            return {}
        return self.a.position_slopes if self.a.is_pooled else None

    def ratio(self, name: str, confidence: float = 0.95, estimator: Estimator | None = None) -> SideRatio | None:
        """The ratio of a metric as a comparison estimates it; None where no block knows it on both sides."""
        a, b = ([metrics[name] for metrics in side] for side in self.metrics())
        return metric_ratio(name, a, b, self.design, self.slopes(), confidence, estimator or self.a.estimator)

    def ratio_of(
        self, value_of: Callable[[LoadedRun], float | None], *, is_time: bool, confidence: float = 0.95
    ) -> SideRatio | None:
        """The ratio of any other value of a run; ``is_time`` where a drift within the block moves it."""
        a, b = ([value_of(run) for run in side] for side in (self.pair.a_runs, self.pair.b_runs))
        is_adjusted = is_time and self.pair.is_ordered
        slope = self.a.slope_of(value_of) if is_adjusted and self.a.is_pooled else None
        is_adjusted = is_adjusted and (slope is not None or not self.a.is_pooled)
        design = self.design if is_adjusted else self.design.without_positions
        return side_ratio(a, b, design, slope, confidence, self.a.estimator)

    def prompt_warnings(self) -> Iterator[ResultWarning]:
        """Warnings about the prompt tokens of single runs, and of one side against the other."""
        yield from (warning for run in self.pair.a_runs for warning in self.a.prompt_warnings(run))
        yield from (warning for run in self.pair.b_runs for warning in self.b.prompt_warnings(run))
        yield from self.prompt_differences()

    def prompt_differences(self) -> tuple[ResultWarning, ...]:
        """A warning where the two sides count the same prompts differently."""
        return differing_counts(self.pair.a_runs, self.pair.b_runs, (self.pair.a.label, self.pair.b.label))

    def checks(self) -> Iterator[tuple[LoadedRun, Check]]:
        """The checks of every run of both sides."""
        yield from ((run, check) for run in self.pair.a_runs for check in self.a.checks(run))
        yield from ((run, check) for run in self.pair.b_runs for check in self.b.checks(run))
