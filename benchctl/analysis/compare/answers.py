"""The answers of both sides: quality where there is something to judge by, and divergence of the texts.

Answers are judged against gold answers; where there are none and requests of a side ask for JSON, by being JSON.
Against gold answers they are judged only where they end naturally: with stop mode ``forced`` a text runs on past
its end, and its last number is chance; the JSON document with which it begins is not. A simulator's texts are
invented and not judged. Each cell's quality is judged on its own, at the confidence of the comparison and outside
the correction for several tests.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import ArmPair
from benchctl.analysis.quality.accuracy import MARGIN_POINTS, compare_quality
from benchctl.analysis.quality.divergence import DivergenceComparison, compare_divergence
from benchctl.analysis.quality.judge import Judge, judge_named
from benchctl.errors import UsageError


def compare_answers(
    sides: tuple[Experiment, Experiment],
    pairs: Sequence[ArmPair],
    judge_name: str | None,
    margin_points: float | None,
    confidence: float,
) -> Iterator[dict[str, Any]]:
    """Quality and divergence of the answers of each pair: the fields of ``CellComparison`` on them.

    ``judge_name`` None: ``json`` where requests ask for JSON and have no gold answers, else ``numeric``. Quality
    decides where ``margin_points`` is given; raises UsageError where it must and no answer can be judged.
    """
    runs_on = _why_past_end(sides)
    judge = judge_named(judge_name or _fitting_judge(sides), runs_on=runs_on is not None)
    no_answers = _why_no_answers(sides, pairs, judge)
    past_end = runs_on if judge.needs_gold else None
    if margin_points is not None and (reason := no_answers or past_end):
        raise UsageError(f"--quality-margin cannot decide: {reason}")
    margin = MARGIN_POINTS if margin_points is None else margin_points
    for pair in pairs:
        quality, a, b = None, pair.a_runs, pair.b_runs
        if no_answers is None and past_end is None:
            quality = compare_quality(sides[0].results.requests, a, b, judge, margin, confidence)
        yield {
            "quality": quality,
            "quality_note": past_end if no_answers is None else None,
            "is_quality_deciding": margin_points is not None,
            "divergence": _divergence(pair),
        }


def _fitting_judge(sides: tuple[Experiment, Experiment]) -> str:
    """``json`` where requests of either side ask for it and have no gold answers, else ``numeric``."""
    if _has_gold(sides):
        return "numeric"
    settings = (side.settings(run.record) for side in sides for run in side.results.runs)
    return "json" if any(each is not None and each.request.asks_for_json for each in settings) else "numeric"


def _has_gold(sides: tuple[Experiment, Experiment]) -> bool:
    return any(request.answer is not None for request in sides[0].results.requests)


def _why_no_answers(sides: tuple[Experiment, Experiment], pairs: Sequence[ArmPair], judge: Judge) -> str | None:
    """The reason why no answer of this workload can be right or wrong; None where answers can."""
    if judge.needs_gold and not _has_gold(sides):
        return "no request of this workload has a gold answer (those of gsm8k and generated have)"
    if any(_is_simulated(pair) for pair in pairs):
        return "a simulator invents its texts; measure a real engine"
    return None


def _is_simulated(pair: ArmPair) -> bool:
    return any(run.record.clock == "virtual" for run in (*pair.a_runs, *pair.b_runs))


def _why_past_end(sides: tuple[Experiment, Experiment]) -> str | None:
    """The reason why answers are not judged although there are gold answers; None where they are."""
    forced = next((side.results for side in sides if side.results.manifest.stop == "forced"), None)
    return (
        None
        if forced is None
        else (
            f"{forced.path} was measured with stop: forced, where answers run on past their end; "
            "measure with stop: natural or replay-natural"
        )
    )


def _divergence(pair: ArmPair) -> DivergenceComparison | None:
    """Divergence with the sampling temperature that all sides share: 0 where a single candidate remains."""
    if _is_simulated(pair):
        return None
    runs_by_side = zip(pair.sides, (pair.a_runs, pair.b_runs), strict=True)
    settings = [side.settings(runs[0].record) for side, runs in runs_by_side if runs]
    temperatures = {s if s is None else 0.0 if s.sampling.top_k == 1 else s.sampling.temperature for s in settings}
    return compare_divergence(pair.a_runs, pair.b_runs, temperatures.pop() if len(temperatures) == 1 else None)
