"""The result of comparing two sides: values only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from benchctl.analysis.attribution.decomposition import Decomposition, sentence
from benchctl.analysis.compare.accuracy import DivergenceComparison, QualityComparison
from benchctl.analysis.compare.cells import NodeResults
from benchctl.analysis.compare.decide import blocks_for_verdict
from benchctl.analysis.compare.metric import MetricComparison, MetricVerdict, Rules
from benchctl.analysis.experiment.pairing import Pairing
from benchctl.analysis.metrics.run import ArmDrafts
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, UNORDERED, BlockDesign
from benchctl.analysis.validity.comparable import Difference
from benchctl.records.schema import ResultWarning
from benchctl.records.stores import MetricNoise

OverallVerdict: TypeAlias = Literal["invalid", "regression", "inconclusive", "improvement", "equivalent"]

EXIT_CODES: Final[dict[OverallVerdict, int]] = {
    "invalid": 4,
    "regression": 1,
    "inconclusive": 3,
    "improvement": 0,
    "equivalent": 0,
}
"""Exit code of each verdict, in order of precedence: the whole has the first verdict that any part has."""

_PART: Final[dict[MetricVerdict, OverallVerdict]] = {
    "regression": "regression",
    "improvement": "improvement",
    "equivalent": "equivalent",
    "equal": "equivalent",
}
"""Contribution of a deciding metric to the verdict; any other metric verdict makes the whole inconclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellComparison:
    """The comparison of two arms."""

    label: str
    a_label: str
    b_label: str
    num_blocks: int
    metrics: tuple[MetricComparison, ...]
    errors: tuple[str, ...]
    """Reasons why the comparison is invalid; empty when it is valid."""
    failures: tuple[str, ...] = ()
    """Runs with failed requests: errors as well, unless they are allowed."""
    quality: QualityComparison | None = None
    """Quality of the answers; None where none could be judged."""
    quality_note: str | None = None
    """Reason why no answer was judged although there are gold answers."""
    is_quality_deciding: bool = False
    """A quality margin was set: the verdict on quality counts like that of a deciding metric."""
    divergence: DivergenceComparison | None = None
    decomposition: Decomposition | None = None
    """Parts of the difference of the wall times; None where no block has a wall time on both sides."""
    unrecorded: tuple[str, ...] = ()
    """Primary metrics that a server of either side does not record: they decide nothing."""
    a_drafts: ArmDrafts | None = None
    """Speculative decoding of A; None where no token was drafted."""
    b_drafts: ArmDrafts | None = None
    design: BlockDesign = UNORDERED
    """Blocks and positions of the values of each side."""

    @property
    def num_a_first(self) -> int | None:
        """Blocks in which A ran before B; None where the sides share no blocks or are the same runs."""
        positions = self.design.positions
        return None if positions is None else sum(apart > 0 for apart in positions)

    @property
    def deciding(self) -> tuple[MetricComparison, ...]:
        return tuple(m for m in self.metrics if m.role == "deciding")

    @property
    def cause(self) -> str | None:
        """The cause of the difference of the wall times; None where they are not known."""
        levels = {m.metric.name: (m.a, m.b) for m in self.metrics if m.a and m.b}
        return None if self.decomposition is None else sentence(self.decomposition, levels)

    @property
    def verdict(self) -> OverallVerdict:
        if self.errors:
            return "invalid"
        parts = [_PART.get(m.verdict, "inconclusive") for m in self.deciding]
        if self.is_quality_deciding:
            parts.append(self.quality.verdict if self.quality is not None else "inconclusive")
        return first_verdict(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two sides: everything that ``benchctl compare`` reports."""

    a_name: str
    b_name: str
    pairing: Pairing
    rules: Rules
    cells: tuple[CellComparison, ...]
    allowed: tuple[Difference, ...]
    """Differences between the sides that were declared."""
    warnings: tuple[ResultWarning, ...]
    num_looks: int = 1
    """Number of looks at which the experiment could have ended; 1 where the number of blocks was fixed."""
    num_extensions: int = 0
    """Number of times that blocks were added after the experiment had begun; each is one of the looks."""
    nodes: NodeResults | None = None
    """Deciding metrics by node; None where the blocks ran on one."""
    is_simulated: bool = False
    """The times of a side are those of a simulator."""
    measured_on: str = ""
    """Engine, model and device of both sides in words; empty for files of other tools."""
    other_cores: tuple[float, int] | None = None
    """Cores that programs beside server and client used while A was measured, of those of the machine; None where
    that was not sampled."""

    @property
    def verdict(self) -> OverallVerdict:
        return first_verdict(cell.verdict for cell in self.cells)

    @property
    def noise(self) -> dict[str, MetricNoise]:
        """Noise of the deciding metrics, where it was measured."""
        deciding = {metric.metric.name for cell in self.cells for metric in cell.deciding}
        return {name: noise for name, noise in self.rules.noise.items() if name in deciding}

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def is_screening(self) -> bool:
        """No deciding metric has enough blocks for a verdict."""
        estimated = [m for cell in self.cells for m in cell.deciding if m.estimate is not None]
        return bool(estimated) and all(m.is_screening for m in estimated)

    @property
    def num_tests(self) -> int:
        """Deciding metrics times cells: the number of chances to be wrong."""
        return sum(len(cell.deciding) for cell in self.cells)


def first_verdict(verdicts: Iterable[OverallVerdict]) -> OverallVerdict:
    """The verdict of highest precedence; nothing to judge is inconclusive."""
    of_parts = set(verdicts)
    return next((verdict for verdict in EXIT_CODES if verdict in of_parts), "inconclusive")


def blocks_to_settle(comparisons: Iterable[Comparison]) -> int | None:
    """Blocks in all that give every cell without a verdict its own; None where none is open or no number helps."""
    cells = ((comparison, cell) for comparison in comparisons for cell in comparison.cells)
    needed = [number for comparison, cell in cells if (number := blocks_of_cell(cell, comparison.num_looks))]
    return max(needed, default=None)


def blocks_of_cell(cell: CellComparison, num_looks: int) -> int | None:
    """Blocks in all that give an inconclusive cell its verdict: those of the first metric that becomes a
    regression, else of the last one that is open; None where no number helps.

    Ratio and scatter are taken to stay as they are. To add blocks is one more look at the data, so the intervals
    are those of alpha * K / (K + 1) where they were those of alpha after K looks. A screening needs at least the
    blocks that a verdict takes.
    """
    if cell.verdict != "inconclusive":
        return None
    still_open = [metric for metric in cell.deciding if metric.verdict in {"inconclusive", "unknown"}]
    needed = [(metric, _blocks_of_metric(metric, num_looks)) for metric in still_open]
    regressions = [number for metric, number in needed if number is not None and metric.tends_to_regress]
    if regressions:
        return min(regressions)
    numbers = [number for _, number in needed if number is not None]
    return max(numbers, default=None) if len(numbers) == len(needed) else None


def _blocks_of_metric(metric: MetricComparison, num_looks: int) -> int | None:
    """Blocks in all that decide one metric; None where no number does."""
    estimate, judged = metric.estimate, metric.judged_confidence
    if estimate is None or judged is None or not metric.is_test:
        return None
    confidence = 1 - (1 - judged) * num_looks / (num_looks + 1)
    number = blocks_for_verdict(estimate, metric.margins, confidence)
    if metric.is_screening:
        return max(number or 0, MIN_PAIRED_BLOCKS)
    return None if number is None else max(number, estimate.num_blocks + 1)
