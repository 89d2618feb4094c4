"""The answer of a comparison in a few lines: verdict, what was changed against what, cause, and trust."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from benchctl.analysis.compare.accuracy import accuracy_sentence
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.noise_words import noise_sentence
from benchctl.analysis.compare.result import CellComparison, Comparison, blocks_of_cell
from benchctl.analysis.compare.words import change_text, floors_text, unrecorded_lines
from benchctl.analysis.validity.comparable import Difference
from benchctl.analysis.validity.machines import ABSENT
from benchctl.units import count_of, first_of, in_a_row, percentage, range_of

_MOST_CHANGES: Final = 3
_MOST_VALUES: Final = 5
_MOST_CHARACTERS: Final = 40
"""Of one value of a setting."""


def answer_lines(comparison: Comparison) -> Iterator[str]:
    """The answer after the verdict: change, subject, cause in the foremost cell, trust and blocks."""
    if any(cell.num_blocks for cell in comparison.cells):
        yield f"changed: {change_in_words(comparison.allowed)}"
    if comparison.measured_on:
        yield f"measured on: {comparison.measured_on}"
    if comparison.verdict == "invalid":
        return
    foremost = foremost_cells(comparison)[0]
    if foremost.cause is not None:
        where = f" ({foremost.label})" if len(comparison.cells) > 1 else ""
        yield f"cause{where}: {foremost.cause}"
    yield f"trust: {trust_text(comparison)}"
    yield from filter(None, [noise_sentence(comparison)])
    if needed := needed_text(comparison):
        yield f"open: {needed}"


def foremost_cells(comparison: Comparison) -> list[CellComparison]:
    """The cells, those with the verdict of the whole and the largest changes first."""

    def rank(cell: CellComparison) -> tuple[bool, float]:
        return cell.verdict == comparison.verdict, max(map(_strength, cell.deciding), default=-1.0)

    return sorted(comparison.cells, key=rank, reverse=True)


def foremost_metric(cell: CellComparison) -> MetricComparison:
    """The deciding metric that has the verdict of its cell and the largest change."""
    metrics = [metric for _, metric in _deciding_metrics([cell], cell.verdict)] or cell.deciding
    return max(metrics, key=_strength)


def change_in_words(differences: Iterable[Difference]) -> str:
    """``max_num_seqs 4 against 8``: the values of B against that of A, of at most three settings.

    A section that only B has, such as guidance, is one of them.
    """
    values_of: dict[tuple[str, str], list[str]] = {}
    for difference in differences:
        section, _, name = difference.key.partition(".")
        whole = difference.a == ABSENT and section == "guidance"
        values = values_of.setdefault((section, ABSENT) if whole else (name or section, difference.a), [])
        values += [] if whole else [_value(difference.b)]
    changes = [
        " ".join(filter(None, (name, first_of(list(dict.fromkeys(values)), _MOST_VALUES), "against", _value(a))))
        for (name, a), values in sorted(values_of.items(), key=_is_switch)
    ]
    more = len(changes) - _MOST_CHANGES
    parts = changes if more <= 0 else [*changes[:_MOST_CHANGES], f"{more} more"]
    return in_a_row(parts) if parts else "nothing on record: both sides have the same settings"


def _is_switch(item: tuple[tuple[str, str], list[str]]) -> bool:
    """True for a setting that is switched, which often follows from another one: it is named last."""
    return bool(item[1]) and {*item[1]} <= {"true", "false"}


def _value(text: str) -> str:
    """A value of a setting, which is JSON or ``absent``, as a reader writes it."""
    value = {ABSENT: "none", "null": "none"}.get(text, re.sub(r"^(-?\d+)\.0$", r"\1", text)).strip('"')
    return value if len(value) <= _MOST_CHARACTERS else f"{value[: _MOST_CHARACTERS - 1]}…"


def trust_text(comparison: Comparison) -> str:
    """Blocks and their order, how many tests were judged, the margin, and the noise floor."""
    blocks = range_of([cell.num_blocks for cell in comparison.cells])
    floor = floors_text(comparison) or "no noise floor on file"
    parts = [
        f"{blocks} {'block' if blocks == '1' else 'blocks'}, {comparison.pairing}",
        correction_text(comparison),
        f"margin {percentage(comparison.rules.margin_frac)}",
        floor,
    ]
    return "; ".join(parts)


def correction_text(comparison: Comparison) -> str:
    """The number of deciding tests, and the interval that each verdict rests on where they are several."""
    tests = comparison.num_tests
    if tests <= 1:
        return "one deciding comparison"
    if comparison.pairing == "unpaired":
        return f"{tests} comparisons judged together (Holm)"
    levels = {m.judged_confidence for c in comparison.cells for m in c.deciding if m.judged_confidence is not None}
    level = f", each by its {percentage(max(levels), 4)} interval" if levels and not comparison.is_screening else ""
    return f"{tests} comparisons judged together{level}"


def needed_text(comparison: Comparison) -> str:
    """The blocks in all that would settle each open cell, or that none would; empty where none is open."""
    needed = [
        (number, cell.b_label)
        for cell in comparison.cells
        if (number := blocks_of_cell(cell, comparison.num_looks)) is not None
    ]
    if not needed:
        return (
            "blocks alone would not settle it; compare gives the reasons"
            if comparison.verdict == "inconclusive"
            else ""
        )
    if comparison.is_screening:
        return f"a verdict takes at least {comparison.rules.min_blocks} blocks"
    most, label = max(needed)
    others = f"; fewer for {count_of(len(needed) - 1, 'other cell')}" if len(needed) > 1 else ""
    where = f" ({label}{others})" if len(comparison.cells) > 1 else ""
    return f"about {most} blocks in all would settle it{where}, if scatter and changes stay as they are"


def verdict_sentence(comparison: Comparison) -> str:
    """The first line of the output: the verdict and the strongest reason for it."""
    verdict = comparison.verdict
    simulated = " (simulated)" if comparison.is_simulated else ""
    sides = f"{comparison.b_name} against {comparison.a_name}{simulated}"
    if verdict == "invalid":
        errors = [error for cell in comparison.cells for error in cell.errors]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return f"invalid: {sides} cannot be judged: {errors[0]}{more}"
    if comparison.is_screening and verdict == "inconclusive":
        blocks = count_of(min(cell.num_blocks for cell in comparison.cells), "block")
        pairs = [(cell, metric) for cell in comparison.cells for metric in cell.deciding]
        cell, metric = max(pairs, key=lambda pair: _strength(pair[1]))
        largest = f"its largest change is {metric.metric.name} {change_text(metric)}{_where(comparison, cell)}"
        return f"inconclusive: {sides}: a screening of {blocks} gives no verdict; {largest}"
    deciding = _deciding_metrics(comparison.cells, verdict)
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
    if strongest.estimate is None and strongest.verdict == "unknown":
        unknown = f"{strongest.metric.name} is unknown{_where(comparison, cell)}"
        return f"inconclusive: {sides}: {unknown}: {'' if strongest.limits else 'it '}{strongest.reason}"
    tests = comparison.num_tests
    number = f"{len(deciding)} of {tests} comparisons" if tests > 1 else "the one comparison"
    return (
        f"{verdict}: {sides}: {number} {_OUTCOME[verdict]} {_margins_used([m for _, m in deciding], verdict)}, "
        f"foremost {strongest.metric.name} {change_text(strongest)}{_where(comparison, cell)}"
    )


def _where(comparison: Comparison, cell: CellComparison) -> str:
    return f" in {cell.label}" if len(comparison.cells) > 1 else ""


def cell_sentence(cell: CellComparison, num_looks: int) -> str:
    """One cell: its verdict, the strongest change that decided it, and where nothing was decided the reason and the
    blocks that would.
    """
    if cell.verdict == "invalid":
        return f"invalid: {cell.errors[0]}"
    if not _deciding_metrics([cell], cell.verdict):
        qualities = _deciding_qualities([cell], cell.verdict)
        return f"{cell.verdict}: {qualities[0] if qualities else 'nothing to judge'}"
    metric = foremost_metric(cell)
    reason = f": {metric.reason}" if metric.reason and cell.verdict == "inconclusive" else ""
    needed = blocks_of_cell(cell, num_looks) if reason and not metric.is_screening else None
    settles = "" if needed is None else f"; about {needed} blocks in all would settle it"
    return f"{cell.verdict}, {metric.metric.name} {change_text(metric)}{reason}{settles}"


_OUTCOME = {
    "regression": "worse by more than",
    "improvement": "better by more than",
    "equivalent": "inside",
    "inconclusive": "undecided at",
}


def _margins_used(metrics: Sequence[MetricComparison], verdict: str) -> str:
    """The margins that the verdict rests on: those of a change, of equivalence, or both where neither was left.

    Of a change: the threshold, the noise floors above it, or both where metrics differ in what decides them.
    """
    margins = [metric.margins for metric in metrics if metric.estimate is not None]
    equivalence = f"a margin of {_reach(m.equivalence_frac for m in margins)}"
    floors = [m.change_frac for m in margins if m.is_noise_floor]
    thresholds = [m.change_frac for m in margins if not m.is_noise_floor]
    changes = [] if floors and not thresholds else [f"a margin of {_reach(thresholds)}"]
    changes += [f"{'a' if len(set(floors)) > 1 else 'the'} noise floor of {_reach(floors)}"] if floors else []
    change = " or ".join(changes)
    if verdict == "equivalent":
        return equivalence
    if verdict != "inconclusive" or change == equivalence:
        return change
    return f"{equivalence} for equivalence and {change} for a change"


def _reach(margins_frac: Iterable[float]) -> str:
    """``1%``, or ``1% to 19%`` where metrics differ."""
    margins = list(margins_frac) or [0.0]
    return " to ".join(dict.fromkeys(percentage(margin) for margin in (min(margins), max(margins))))


def reasons_of(comparison: Comparison) -> tuple[str, ...]:
    """Reasons of the verdict: every error, or each deciding metric that has the verdict of the whole."""
    cells, verdict = comparison.cells, comparison.verdict
    if verdict == "invalid":
        return tuple(f"{cell.label}: {error}" for cell in cells for error in cell.errors)
    reasons = (
        f"{cell.label}: {metric.metric.name} {change_text(metric)} {metric.verdict}"
        + (f": {metric.reason}" if metric.reason else "")
        for cell, metric in _deciding_metrics(cells, verdict)
    )
    return (*reasons, *_deciding_qualities(cells, verdict))


def open_reasons(comparison: Comparison) -> list[str]:
    """Reasons that keep a comparison open or make it invalid; a reason that several metrics share stands once."""
    if comparison.verdict != "inconclusive":
        return list(dict.fromkeys(reasons_of(comparison))) if comparison.verdict == "invalid" else []
    sharing: dict[str, list[str]] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            if metric.verdict in {"inconclusive", "unknown"}:
                where = f"{metric.metric.name}{_where(comparison, cell)}"
                sharing.setdefault(metric.reason or metric.verdict, []).append(where)
    qualities = _deciding_qualities(comparison.cells, comparison.verdict)
    return [*(f"{first_of(wheres, 2)}: {reason}" for reason, wheres in sharing.items()), *qualities]


def _deciding_metrics(
    cells: Iterable[CellComparison], verdict: str
) -> list[tuple[CellComparison, MetricComparison]]:
    """Each deciding metric that has the verdict of the whole, with its cell."""
    of_metrics = {verdict, {"equivalent": "equal", "inconclusive": "unknown"}.get(verdict)}
    return [(cell, metric) for cell in cells for metric in cell.deciding if metric.verdict in of_metrics]


def _deciding_qualities(cells: Iterable[CellComparison], verdict: str) -> list[str]:
    """Accuracy of each cell whose deciding quality has the verdict of the whole."""
    return [
        f"{cell.label}: {accuracy_sentence(cell.quality)}"
        for cell in cells
        if cell.is_quality_deciding and cell.quality is not None and cell.quality.verdict == verdict
    ]


def _strength(metric: MetricComparison) -> float:
    return -1.0 if metric.estimate is None else math.fabs(metric.estimate.log_ratio)
