"""A comparison in sentences: the verdict and its reasons."""

import math
from collections.abc import Iterable, Iterator, Sequence

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.experiment.deciding import unrecorded_text
from benchctl.analysis.quality.text import accuracy_sentence
from benchctl.analysis.statistics.margins import Margins
from benchctl.analysis.validity.comparability.differences import ABSENT, Difference
from benchctl.formats import percentage, percentage_change


def change_text(metric: MetricComparison) -> str:
    """``+14.3% [+13.1%, +15.4%]``; the reason where there is no interval."""
    estimate = metric.estimate
    if estimate is None or metric.verdict == "equal":
        return {"equal": "=", "different": "differs"}.get(metric.verdict, "?")
    change = percentage_change(estimate.ratio - 1)
    if estimate.ci_low is None or estimate.ci_high is None:
        num_a, num_b = (sum(value is not None for value in side) for side in (metric.a_blocks, metric.b_blocks))
        return f"{change} [{'one block' if estimate.is_paired else f'no interval: {num_a} against {num_b} runs'}]"
    return f"{change} [{percentage_change(estimate.ci_low - 1)}, {percentage_change(estimate.ci_high - 1)}]"


def speed_line(cell: CellComparison) -> str | None:
    """Tokens per step over time per step of decode steps; None where no side drafts tokens or one is unknown."""
    metrics = {metric.metric.name: metric for metric in cell.metrics}
    tokens, time = metrics.get("tokens_per_step"), metrics.get("decode_step_ms")
    if cell.a_drafts is None and cell.b_drafts is None:
        return None
    if tokens is None or time is None or not (tokens.a and tokens.b and time.a and time.b):
        return None
    gain, cost = tokens.b / tokens.a, time.b / time.a
    return (
        f"decode steps: {tokens.a:.4g} to {tokens.b:.4g} tokens of a sequence per step (x{gain:.3f}) at "
        f"{time.a:.4g} to {time.b:.4g} ms per step (x{cost:.3f}) make x{gain / cost:.3f} tokens per second of a "
        "sequence"
    )


def margin_text(margin_frac: float) -> str:
    """A margin with its two ends, which are equal as factors but not in per cent."""
    low, high = percentage_change(1 / (1 + margin_frac) - 1), percentage_change(margin_frac)
    return f"{percentage(margin_frac)} ({low} to {high})"


def threshold_text(comparison: Comparison) -> str:
    """The threshold, and the margin of equivalence where one was named."""
    equivalence = comparison.equivalence_margin_frac
    threshold = f"margin {margin_text(comparison.margin_frac)}"
    return threshold if equivalence is None else f"{threshold}, of equivalence {margin_text(equivalence)}"


def floors_text(comparison: Comparison) -> str:
    """The noise floors of the deciding metrics and their source; empty where no A/A experiment is on file."""
    floors = ", ".join(
        f"{name} {percentage(noise.floor_frac, 2)}"
        + (" (a change is called beyond it)" if noise.floor_frac > comparison.margin_frac else "")
        for name, noise in comparison.noise.items()
    )
    return f"{floors}; from {comparison.noise_source}" if floors else ""


def unrecorded_lines(comparison: Comparison) -> tuple[str, ...]:
    """One line for each set of primary metrics that a server does not record, with those that decide instead."""
    cells_of: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for cell in comparison.cells:
        if cell.unrecorded:
            deciding = tuple(metric.metric.name for metric in cell.deciding)
            cells_of.setdefault((cell.unrecorded, deciding), []).append(cell.label)
    return tuple(
        unrecorded_text(unrecorded, deciding)
        + ("" if len(labels) == len(comparison.cells) else f" ({'; '.join(labels)})")
        for (unrecorded, deciding), labels in cells_of.items()
    )


def difference_lines(differences: Iterable[Difference]) -> Iterator[str]:
    """One line for each setting, with its values in all cells; one for all settings of a section that only one side
    has.
    """
    values_of: dict[tuple[str, str], list[str]] = {}
    for difference in differences:
        cells = f" ({'; '.join(difference.cells)})" if difference.cells else ""
        values_of.setdefault((difference.key, difference.a), []).append(f"{difference.b}{cells}")
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, a in values_of:
        groups.setdefault(key.partition(".")[0] if a == ABSENT else f"{key}: {a}", []).append((key, a))
    for name, group in groups.items():
        if len(group) == 1:
            (key, a) = group[0]
            yield f"{key}: {a} against {', '.join(values_of[key, a])}"
        else:
            parts = (f"{key.partition('.')[2]} {', '.join(values_of[key, a])}" for key, a in group)
            yield f"{name}: {ABSENT} against {'; '.join(parts)}"


def looks_lines(comparison: Comparison) -> Iterator[str]:
    """The cost of each way in which the experiment could have ended earlier than it did."""
    confidence = percentage(comparison.confidence, 4)
    if (times := comparison.num_extensions) > 0:
        how_often = {1: "once", 2: "twice"}.get(times, f"{times} times")
        yield f"blocks were added {how_often} after results were seen: intervals are those of {confidence}"
    elif comparison.num_looks > 1:
        yield (
            f"declared stopping rule: the experiment could end at {comparison.num_looks} looks; intervals are at "
            f"{confidence} and every verdict is corrected for them"
        )


def has_two_margins(metrics: Iterable[MetricComparison]) -> bool:
    """True where the change margin of any metric differs from its equivalence margin."""
    return any(len(metric.margins.log_bands) > 1 for metric in metrics)


def verdict_sentence(comparison: Comparison) -> str:
    """The first line of the output: the verdict and the strongest reason for it."""
    verdict = comparison.verdict
    sides = f"{comparison.b_name} against {comparison.a_name}"
    if verdict == "invalid":
        errors = [error for cell in comparison.cells for error in cell.errors]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return f"invalid: {sides} cannot be judged: {errors[0]}{more}"
    if comparison.is_screening and verdict == "inconclusive":
        fewest = min(cell.num_blocks for cell in comparison.cells)
        blocks = "1 block" if fewest == 1 else f"{fewest} blocks"
        pairs = [(cell, metric) for cell in comparison.cells for metric in cell.deciding]
        cell, metric = max(pairs, key=lambda pair: _strength(pair[1]))
        largest = f"its largest change is {metric.metric.name} {change_text(metric)} in {cell.label}"
        return f"inconclusive: {sides}: a screening of {blocks} gives no verdict; {largest}"
    deciding = [(c, m) for c in comparison.cells for m in c.deciding if _decides(m, verdict)]
    if not deciding and (qualities := _deciding_qualities(comparison.cells, verdict)):
        return f"{verdict}: {sides}: {qualities[0]}"
    if not deciding and comparison.num_tests == 0 and (lines := unrecorded_lines(comparison)):
        return f"inconclusive: {sides}: nothing to judge: {lines[0]}"
    if not deciding:
        return (
            f"inconclusive: {sides}: nothing to judge, because exact metrics can only be equal or make "
            "the comparison invalid; name one that scatters with --metrics, such as step_ms"
        )
    cell, strongest = max(deciding, key=lambda pair: _strength(pair[1]))
    tests = comparison.num_tests
    number = f"{len(deciding)} of {tests} comparisons" if tests > 1 else "the one comparison"
    return (
        f"{verdict}: {sides}: {number} {_OUTCOME[verdict]} {_margins_used([m for _, m in deciding], verdict)}, "
        f"foremost {strongest.metric.name} {change_text(strongest)} in {cell.label}"
    )


def cell_sentence(cell: CellComparison) -> str:
    """One cell: its verdict, the strongest change that decided it, and the reason where nothing was decided."""
    if cell.verdict == "invalid":
        return f"invalid: {cell.errors[0]}"
    deciding = [metric for metric in cell.deciding if _decides(metric, cell.verdict)]
    if not deciding:
        qualities = _deciding_qualities([cell], cell.verdict)
        return f"{cell.verdict}: {qualities[0] if qualities else 'nothing to judge'}"
    metric = max(deciding, key=_strength)
    reason = f": {metric.reason}" if metric.reason and cell.verdict == "inconclusive" else ""
    return f"{cell.verdict}, {metric.metric.name} {change_text(metric)}{reason}"


_OUTCOME = {
    "regression": "worse by more than",
    "improvement": "better by more than",
    "equivalent": "inside",
    "inconclusive": "undecided at",
}


def _margins_used(metrics: Sequence[MetricComparison], verdict: str) -> str:
    """The margins that the verdict rests on: those of a change, of equivalence, or both where neither was left."""
    margins = [metric.margins for metric in metrics if metric.estimate is not None]
    changes, equivalences = _change_margins(margins), _reach(m.equivalence_frac for m in margins)
    if verdict == "equivalent":
        return f"a margin of {equivalences}"
    if verdict != "inconclusive" or changes == f"a margin of {equivalences}":
        return changes
    return f"a margin of {equivalences} for equivalence and {changes} for a change"


def _change_margins(margins: Sequence[Margins]) -> str:
    """The threshold, the noise floors above it, or both where metrics differ in what decides them."""
    floors = [m.change_frac for m in margins if m.is_noise_floor]
    thresholds = [m.change_frac for m in margins if not m.is_noise_floor]
    floor = f"{'a' if len(set(floors)) > 1 else 'the'} noise floor of {_reach(floors)}"
    if not floors:
        return f"a margin of {_reach(thresholds)}"
    return f"a margin of {_reach(thresholds)} or {floor}" if thresholds else floor


def _reach(margins_frac: Iterable[float]) -> str:
    """``1%``, or ``1% to 19%`` where metrics differ."""
    margins = list(margins_frac) or [0.0]
    return " to ".join(dict.fromkeys(percentage(margin) for margin in (min(margins), max(margins))))


def reasons_of(comparison: Comparison) -> tuple[str, ...]:
    """Reasons of the verdict: every error, or each deciding metric that has the verdict of the whole."""
    verdict, reasons = comparison.verdict, []
    for cell in comparison.cells:
        if verdict == "invalid":
            reasons += [f"{cell.label}: {error}" for error in cell.errors]
            continue
        for metric in cell.deciding:
            if _decides(metric, verdict):
                reason = f": {metric.reason}" if metric.reason else ""
                reasons.append(f"{cell.label}: {metric.metric.name} {change_text(metric)} {metric.verdict}{reason}")
    return (*reasons, *_deciding_qualities(comparison.cells, verdict))


def _deciding_qualities(cells: Iterable[CellComparison], verdict: str) -> list[str]:
    """Accuracy of each cell whose deciding quality has the verdict of the whole."""
    return [
        f"{cell.label}: {accuracy_sentence(cell.quality)}"
        for cell in cells
        if cell.is_quality_deciding and cell.quality is not None and cell.quality.verdict == verdict
    ]


def _decides(metric: MetricComparison, verdict: str) -> bool:
    return metric.verdict in {verdict, {"equivalent": "equal", "inconclusive": "unknown"}.get(verdict)}


def _strength(metric: MetricComparison) -> float:
    return -1.0 if metric.estimate is None else math.fabs(metric.estimate.log_ratio)
