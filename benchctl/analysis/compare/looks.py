"""A look of the declared stopping rule at the blocks so far: whether they are precise, decided, or hopeless."""

import math
from collections.abc import Collection, Sequence
from typing import Final

from benchctl.analysis.compare.compare import CompareOptions, compare_experiments
from benchctl.analysis.compare.decide import chance_of_verdict
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison, first_verdict
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.looks import looked_confidence
from benchctl.analysis.experiment.pairing import ArmPair, Side, deciding_between, match_cells
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS
from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.record import HalfWidth, Look, StoppingRecord
from benchctl.units import count_of, percentage

FUTILE_BELOW: Final = 0.1
"""Chance of a verdict by the last block below which an open metric is not waited for."""


def take_look(
    experiment: Experiment,
    rule: StoppingRecord,
    num_blocks: int,
    metrics: Sequence[str],
    *,
    left_out: Collection[str] = (),
) -> Look:
    """The precision of the primary ``metrics`` after ``num_blocks`` blocks, or the verdict that the rule wants.

    A block counts where it counts in a comparison, and so does a metric (``deciding_between``). Cells in
    ``left_out`` (by label) are ignored; where nothing remains, the look ends nothing.
    """
    so_far = experiment.first_blocks(num_blocks)
    results, baseline = so_far.results, so_far.results.manifest.baseline
    variants = {} if so_far.profile_or_none is None else so_far.profile_or_none.variants
    others = dict.fromkeys(run.variant for run in results.plan.runs if run.variant != baseline)
    sides = {other: (Side(results.path, baseline), Side(results.path, other)) for other in others}
    confidence = looked_confidence(results, results, 0.95)
    widths = tuple(
        width
        for a, b in sides.values()
        for pair in match_cells(so_far, a, so_far, b, confidence)
        if pair.b.label not in left_out
        for name in deciding_between(metrics, pair)
        if (width := _half_width(pair, name)) is not None
    )
    if rule.precision_frac is not None:
        is_precise = bool(widths) and all(_width(width) <= rule.precision_frac for width in widths)
        return Look(num_blocks=num_blocks, half_widths=widths, is_precise=is_precise)
    try:
        comparisons = [
            compare_experiments((so_far, a), (so_far, b), CompareOptions())
            for other, (a, b) in sides.items()
            if other not in variants or variants[other].control is None  # a step of a ladder decides nothing
        ]
    except (InvalidDataError, UsageError) as error:
        reason = f"nothing can be judged: {str(error).splitlines()[0]}"
        return Look(num_blocks=num_blocks, half_widths=widths, is_precise=False, reason=reason)
    return _judged_look(comparisons, rule, num_blocks, widths, left_out)


def _judged_look(
    comparisons: Sequence[Comparison],
    rule: StoppingRecord,
    num_blocks: int,
    widths: tuple[HalfWidth, ...],
    left_out: Collection[str],
) -> Look:
    """A look that ends where no metric is open, or where none that is has a chance of a verdict.

    Cells that are invalid are not waited for: more blocks do not mend them.
    """
    cells = [
        cell for each in comparisons for cell in each.cells if not cell.errors and cell.b_label not in left_out
    ]
    chances = {
        f"{metric.metric.name} in {cell.b_label}": _chance(metric, rule, num_blocks)
        for cell in cells
        for metric in cell.deciding
        if metric.verdict in {"inconclusive", "unknown"}
    }
    by, num_left = f"by block {rule.look_blocks[-1]}", rule.look_blocks[-1] - num_blocks
    verdict = first_verdict(each.verdict for each in comparisons)
    is_judged = any(cell.deciding for cell in cells)
    likeliest, chance = max(chances.items(), key=lambda each: each[1], default=("", 0.0))
    more = f" ({count_of(len(chances), 'metric')} open)" if len(chances) > 1 else ""
    if not is_judged:
        reason = "nothing can be judged"
    elif not chances:
        reason = f"{verdict}: every metric that decides has its verdict"
    elif num_left == 0:
        reason = f"{verdict}: {likeliest} stays open{more}"
    elif chance < FUTILE_BELOW:
        reason = f"{verdict}: a verdict {by} is unlikely: chance {percentage(chance, 2)} for {likeliest}{more}"
    elif chance == math.inf:
        reason = f"{likeliest} has too few blocks that count{more}"
    else:
        reason = f"chance of a verdict {by}: {percentage(chance, 2)} for {likeliest}{more}"
    is_unlikely = num_left > 0 and chance < FUTILE_BELOW
    return Look(
        num_blocks=num_blocks,
        half_widths=widths,
        is_precise=False,
        ends_for=None if not is_judged else "verdict" if not chances else "futility" if is_unlikely else None,
        reason=reason,
    )


def _chance(metric: MetricComparison, rule: StoppingRecord, num_blocks: int) -> float:
    """Chance that an open metric has its verdict at the last look; infinite where nothing can be said of it."""
    estimate, judged, num_left = metric.estimate, metric.judged_confidence, rule.look_blocks[-1] - num_blocks
    if metric.is_unreliable or (metric.verdict == "inconclusive" and estimate is None):
        return 0.0  # values that decide nothing, and a value of zero
    if estimate is None or judged is None or metric.is_screening or num_left == 0:
        return math.inf
    then = 1 - (1 - judged) * (1 - rule.last_confidence) / (1 - rule.confidence)
    return chance_of_verdict(estimate, metric.margins, estimate.num_blocks + num_left, then)


def widest_interval(look: Look) -> HalfWidth | None:
    """The widest interval, an unknown one first: what keeps the experiment from ending. None without any."""
    return max(look.half_widths, key=_width, default=None)


def _width(width: HalfWidth) -> float:
    return math.inf if width.half_width_frac is None else width.half_width_frac


def _half_width(pair: ArmPair, name: str) -> HalfWidth | None:
    """exp(half the interval of the logarithms) - 1; unknown below six blocks.

    None where all runs know the metric and it has no ratio, such as a count that is zero.
    """
    ratio = pair.ratio(name)
    if ratio is None and pair.a_runs and all(value is not None for side in pair.values(name) for value in side):
        return None
    num_blocks = 0 if ratio is None else ratio.estimate.num_blocks
    half = ratio.estimate.half_width if ratio is not None and num_blocks >= MIN_PAIRED_BLOCKS else None
    return HalfWidth(
        cell=pair.b.label,
        metric=name,
        num_blocks=num_blocks,
        half_width_frac=None if half is None else math.expm1(half),
    )
