"""The answers of both sides: quality where there is something to judge by, and divergence of the texts.

Answers are judged against gold answers; where there are none and requests of a side ask for JSON, by being JSON.
Against gold answers they are judged only where they end naturally: with stop mode ``forced`` a text runs on past
its end, and its last number is chance; the JSON document with which it begins is not. A simulator's texts are
invented and not judged. Each cell's quality is judged on its own, at the confidence of the comparison and outside
the correction for several tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import CellPair
from benchctl.analysis.quality.accuracy import MARGIN_POINTS, compare_quality
from benchctl.analysis.quality.divergence import DivergenceComparison, compare_divergence
from benchctl.analysis.quality.judge import Judge, judge_named
from benchctl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Judge of the answers, and the margin with which quality decides; None: it is only reported."""

    judge: str | None = None
    """Its name; None: ``json`` where requests ask for JSON and have no gold answers, else ``numeric``."""
    margin_points: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Raises UsageError for a judge or a margin that does not exist."""
        if self.judge is not None:
            judge_named(self.judge)
        if self.margin_points is not None and not 0 <= self.margin_points < 100:
            raise UsageError(
                f"the quality margin is {self.margin_points:g}; it must be a number of percentage points from 0 to "
                "below 100, for example --quality-margin 1"
            )


def with_answers(
    cells: Sequence[CellComparison],
    pairs: Sequence[CellPair],
    sides: tuple[Experiment, Experiment],
    options: AnswerOptions,
) -> tuple[CellComparison, ...]:
    """The cells with quality and divergence of their answers; ``pairs`` are their runs, in the same order.

    Raises UsageError where quality must decide and no answer can be judged.
    """
    runs_on = _why_past_end(sides)
    judge = judge_named(options.judge or _fitting_judge(sides), runs_on=runs_on is not None)
    no_answers = _why_no_answers(sides, pairs, judge)
    past_end = runs_on if judge.needs_gold else None
    is_deciding = options.margin_points is not None
    if is_deciding and (reason := no_answers or past_end):
        raise UsageError(f"--quality-margin cannot decide: {reason}")
    margin_points = MARGIN_POINTS if options.margin_points is None else options.margin_points
    answered_cells = []
    for cell, pair in zip(cells, pairs, strict=True):
        quality, a, b = None, pair.a_runs, pair.b_runs
        if no_answers is None and past_end is None:
            prepared = sides[0].results.requests
            quality = compare_quality(prepared, a, b, judge, margin_points, options.confidence)
        answered_cells.append(
            replace(
                cell,
                quality=quality,
                quality_note=past_end if no_answers is None else None,
                is_quality_deciding=is_deciding,
                divergence=_divergence(pair, sides),
            )
        )
    return tuple(answered_cells)


def _fitting_judge(sides: tuple[Experiment, Experiment]) -> str:
    """``json`` where requests of either side ask for it and have no gold answers, else ``numeric``."""
    if _has_gold(sides):
        return "numeric"
    settings = (side.settings(run.record) for side in sides for run in side.results.runs)
    return "json" if any(each is not None and each.request.asks_for_json for each in settings) else "numeric"


def _has_gold(sides: tuple[Experiment, Experiment]) -> bool:
    return any(request.answer is not None for request in sides[0].results.requests)


def _why_no_answers(sides: tuple[Experiment, Experiment], pairs: Sequence[CellPair], judge: Judge) -> str | None:
    """The reason why no answer of this workload can be right or wrong; None where answers can."""
    if judge.needs_gold and not _has_gold(sides):
        return "no request of this workload has a gold answer (those of gsm8k and generated have)"
    if any(_is_simulated(pair) for pair in pairs):
        return "a simulator invents its texts; measure a real engine"
    return None


def _is_simulated(pair: CellPair) -> bool:
    return any(run.record.clock == "virtual" for run in (*pair.a_runs, *pair.b_runs))


def _why_past_end(sides: tuple[Experiment, Experiment]) -> str | None:
    """The reason why answers are not judged although there are gold answers; None where they are."""
    forced = next((side.results for side in sides if side.results.manifest.stop == "forced"), None)
    return (
        None
        if forced is None
        else (
            f"{forced.source} was measured with stop: forced, where answers run on past their end; "
            "measure with stop: natural or replay-natural"
        )
    )


def _divergence(pair: CellPair, sides: tuple[Experiment, Experiment]) -> DivergenceComparison | None:
    """Divergence with the sampling temperature that all sides share: 0 where a single candidate remains."""
    if _is_simulated(pair):
        return None
    runs_by_side = zip(sides, (pair.a_runs, pair.b_runs), strict=True)
    settings = [side.settings(runs[0].record) for side, runs in runs_by_side if runs]
    temperatures = {s if s is None else 0.0 if s.sampling.top_k == 1 else s.sampling.temperature for s in settings}
    return compare_divergence(pair.a_runs, pair.b_runs, temperatures.pop() if len(temperatures) == 1 else None)
