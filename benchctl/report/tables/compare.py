"""A comparison as headings, rows and footnotes, for every form of table.

The decomposition of the wall time as rows of a table: factors that multiply, seconds that add up.
Text in Markdown: what comes from outside is shown as it is, on GitHub as well, where comments have mentions.
A comparison as Markdown, for the summary of a CI job or a comment on a change.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.splits import TIME_PER_STEP
from benchctl.analysis.attribution.text import added_text, factor_text, floor_line, sentence, unit_of, wall_line
from benchctl.analysis.compare.metric import MetricComparison, scatters_of
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import (
    change_text,
    difference_lines,
    floors_text,
    looks_lines,
    reasons_of,
    speed_line,
    threshold_text,
    unrecorded_lines,
    verdict_sentence,
)
from benchctl.analysis.metrics.bounds import MARK, marked
from benchctl.analysis.quality.accuracy import divergence_sentence, quality_lines
from benchctl.formats import NOT_AVAILABLE, p_value, percentage, percentage_change, range_of, scatter
from benchctl.report.tables.experiment import TITLE as NODES_TITLE
from benchctl.report.tables.experiment import node_headings, node_lines, node_rows
from benchctl.report.text.acceptance_table import TITLE, acceptance_headings, acceptance_rows, compared_drafts
from benchctl.untrusted.text import visible_line, visible_lines

SHOWN_EXPLORATORY: Final = frozenset(
    {"output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "output_tokens", "num_steps", "tokens_per_step"}
)
"""Exploratory metrics of the short table, in the terminal and on the page; the document has them all."""

SHOWN_WHERE_KNOWN: Final = frozenset({"acceptance_rate", "acceptance_length"})
"""Exploratory metrics of the short table that have a row where either side has a value."""

_OTHER_SERVER: Final = "noise-of-another-server"

_ORDER_P: Final = 0.05
"""Effects of order are significant below this p, corrected for all of them."""


def headings_of(comparison: Comparison) -> tuple[str, ...]:
    """The columns of the table."""
    change = f"change ({percentage(comparison.confidence)} CI)"
    return ("cell", "metric", comparison.a_name, comparison.b_name, change, "p", "verdict")


def rows_of(comparison: Comparison, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table; a cell is named in its first one."""
    for cell in comparison.cells:
        metrics = [metric for metric in cell.metrics if is_shown(metric, show_all=show_all)]
        for index, metric in enumerate(metrics):
            yield ("" if index else cell.label, *_row(metric))


def is_shown(metric: MetricComparison, *, show_all: bool) -> bool:
    """True for metrics that have a row: deciding ones, exact ones that differ, and some of general interest."""
    if metric.role == "deciding" or show_all:
        return True
    if metric.role == "exact":
        return metric.verdict == "different"
    if metric.metric.name in SHOWN_WHERE_KNOWN:
        return metric.a is not None or metric.b is not None
    return metric.metric.name in SHOWN_EXPLORATORY


def _row(metric: MetricComparison) -> tuple[str, ...]:
    probability = metric.estimate.p_value if metric.estimate and metric.verdict != "equal" else None
    exact = "exact" if metric.role == "exact" else ""
    verdict = f"({metric.verdict})" if metric.role == "exploratory" else metric.verdict
    a_scatter, b_scatter = scatters_of(metric)
    return (
        metric.metric.name,
        marked(_value(metric.a, a_scatter), metric.num_bounded[0]),
        marked(_value(metric.b, b_scatter), metric.num_bounded[1]),
        change_text(metric),
        exact if probability is None else p_value(probability),
        verdict,
    )


def _value(centre: float | None, scatter_frac: float | None) -> str:
    if centre is None:
        return NOT_AVAILABLE
    text = f"{centre:,.0f}" if abs(centre) >= 10_000 else f"{centre:.4g}"
    return f"{text} {scatter(scatter_frac)}".rstrip()


def footnotes_of(comparison: Comparison) -> Iterator[str]:
    """Conditions that a reader must know to trust the table."""
    for cell in comparison.cells:
        if cell.decomposition is not None:  # the wall time as a product, and what carries it
            yield f"{cell.label}: {wall_line(cell.decomposition)}"
            yield f"{cell.label}: {sentence(cell.decomposition)}"
            if (floor := floor_line(cell.decomposition)) is not None:
                yield f"{cell.label}: {floor}"
        if (line := speed_line(cell)) is not None:
            yield f"{cell.label}: {line}"
    yield from _answer_lines(comparison)
    yield _blocks_line(comparison)
    yield from unrecorded_lines(comparison)
    yield from _margin_lines(comparison)
    yield from looks_lines(comparison)
    yield from _order_lines(comparison)
    if comparison.nodes is not None:
        yield from (f"by node: {line}" for line in node_lines([comparison.nodes]))
    yield from bounds_lines(comparison)
    if equal := _equal_everywhere(comparison):
        yield f"equal in every block: {', '.join(equal)}"
    yield "verdicts in parentheses are exploratory and decide nothing"
    yield from (f"declared difference: {line}" for line in difference_lines(comparison.allowed))
    if comparison.verdict in {"invalid", "inconclusive"}:
        yield from (f"reason: {reason}" for reason in reasons_of(comparison))
    for warning in comparison.warnings:
        if warning.code == _OTHER_SERVER:
            continue  # told with the noise floor
        yield f"warning: {warning.message}" + (f" [{warning.where}]" if warning.where else "")


def _answer_lines(comparison: Comparison) -> Iterator[str]:
    """Quality and divergence of each cell; the reason for no judgement once."""
    for cell in comparison.cells:
        if cell.quality is not None:
            decides = "" if cell.is_quality_deciding else " (decides nothing without --quality-margin)"
            first, *more = quality_lines(cell.quality)
            yield f"{cell.label}: {first}{decides}"
            yield from (f"{cell.label}: {line}" for line in more)
        if cell.divergence is not None:
            yield f"{cell.label}: {divergence_sentence(cell.divergence)}"
    for note in dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note):
        yield f"answers are not judged: {note}"


def _margin_lines(comparison: Comparison) -> Iterator[str]:
    """The margins, the correction, the estimator, and where noise is larger than the threshold."""
    yield f"{threshold_text(comparison)} · {correction_text(comparison)}"
    estimators = {m.estimate.estimator for c in comparison.cells for m in c.deciding if m.estimate is not None}
    if comparison.pairing == "unpaired":
        yield (
            "means are geometric means of the runs as measured, each counting the same; a change is the "
            "Hodges-Lehmann shift of the logarithms, not their quotient"
        )
    if "robust" in estimators:
        yield "estimator: robust; outlying blocks count little, in centres and their scatter (±) as in the change"
    elif "mean" in estimators:
        yield "estimator: mean; every block counts the same, in centres and their scatter (±) as in the change"
    if not comparison.noise:
        others = [warning.message for warning in comparison.warnings if warning.code == _OTHER_SERVER]
        nothing = "no A/A experiment of this machine is on file (benchctl run NAME --aa)"
        yield f"no noise floor: {others[0] if others else nothing}"
        return
    yield f"noise floor A/A: {floors_text(comparison)}"


def bounds_lines(comparison: Comparison) -> Iterator[str]:
    """The meaning of the mark beside a value, for the metrics that have one."""
    bounded = [(cell, metric) for cell in comparison.cells for metric in cell.metrics if any(metric.num_bounded)]
    if bounded:
        names = ", ".join(dict.fromkeys(metric.metric.name for _, metric in bounded))
        num_runs = max(sum(metric.num_bounded) for _, metric in bounded)
        yield (
            f"{MARK} in up to {num_runs} runs the client read late and {names} is known only within bounds; these "
            "values do not count (times-bounded)"
        )


def correction_text(comparison: Comparison) -> str:
    """The number of deciding tests, and their correction."""
    tests = comparison.num_tests
    if tests <= 1:
        return "one deciding comparison"
    if comparison.pairing == "unpaired":
        return f"{tests} deciding comparisons, corrected by Holm"
    levels = {m.judged_confidence for c in comparison.cells for m in c.deciding if m.judged_confidence is not None}
    level = f", at up to {percentage(max(levels), 4)} each" if levels else ""
    return f"{tests} deciding comparisons, judged together{level}"


def _order_lines(comparison: Comparison) -> Iterator[str]:
    """Effects of order and time on the deciding metrics that are significant over all tests."""
    kinds = {"position": ("a run", "position later in its block"), "machine_drift": ("the machine", "block")}
    kinds |= {"ratio_drift": ("the ratio", "block")}
    effects = []
    num_tests = 0
    for kind, (subject, unit) in kinds.items():
        slopes = [
            (slope.p_value, slope.log_per_unit, cell.label, metric.metric.name)
            for cell in comparison.cells
            for metric in cell.deciding
            if metric.order is not None and (slope := getattr(metric.order, kind)) is not None
        ]
        num_tests += len(slopes)
        effects += [(*min(slopes), subject, unit)] if slopes else []
    significant = [effect for effect in effects if effect[0] * num_tests < _ORDER_P]
    for probability, log, label, name, subject, unit in significant:
        yield (
            f"{subject} changes by {percentage_change(math.expm1(log))} per {unit} ({name} in {label}; p "
            f"{probability * num_tests:.2g}, corrected for {num_tests} tests)"
        )
    if num_tests and not significant:
        yield f"no effect of position or drift is significant ({num_tests} tests)"


def _blocks_line(comparison: Comparison) -> str:
    line = f"n = {range_of([cell.num_blocks for cell in comparison.cells])} blocks, {comparison.pairing}"
    first = [cell for cell in comparison.cells if cell.num_a_first is not None]
    if first:
        ran_first, blocks = sum(c.num_a_first or 0 for c in first), sum(c.num_blocks for c in first)
        line += f", {comparison.a_name} ran first in {ran_first} of {blocks}"
    detectable = _detectable(comparison)
    return line + (f" · detectable: {detectable}" if detectable else "")


def _detectable(comparison: Comparison) -> str:
    """The smallest change that would show in each deciding metric, in the cell where it is largest."""
    worst: dict[str, float] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            effect = metric.estimate.minimum_detectable_effect if metric.estimate else None
            if effect is not None:
                worst[metric.metric.name] = max(effect, worst.get(metric.metric.name, 0.0))
    texts = {name: f"{e * 100:.0f}%" if e >= 0.1 else percentage(e, 2) for name, e in worst.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _equal_everywhere(comparison: Comparison) -> list[str]:
    verdicts: dict[str, set[str]] = {}
    for cell in comparison.cells:
        for metric in cell.metrics:
            if metric.role == "exact":
                verdicts.setdefault(metric.metric.name, set()).add(metric.verdict)
    return [name for name, words in verdicts.items() if words == {"equal"}]


SHOWN_SECTIONS: Final = 3
"""Sections of a step in the short form: those that add most, as far as they can be told from nothing."""


def decomposition_headings(comparison: Comparison) -> tuple[str, ...]:
    """The columns of the table."""
    factor = f"factor ({percentage(comparison.confidence)} CI)"
    return ("cell", "where the time went", comparison.a_name, comparison.b_name, factor, "adds", "share")


def decomposition_rows(comparison: Comparison, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table; a cell is named in its first one.

    The wall time with its factors, below the time per step its sections, in all detail also what no model of the
    work explains.
    """
    for cell in comparison.cells:
        decomposition = cell.decomposition
        if decomposition is None or (decomposition.wall is not None and not decomposition.wall.factors):
            continue
        for index, row in enumerate(_rows(decomposition, show_all=show_all)):
            yield ("" if index else cell.label, *row)


def _rows(decomposition: Decomposition, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    wall = decomposition.wall
    if wall is None:
        if decomposition.step is not None:
            yield _part_row(decomposition.step, None)
        yield from _step_rows(decomposition, show_all=show_all)
        return
    whole = Contribution(name="wall time", added_s=wall.b_s - wall.a_s, a_s=wall.a_s, b_s=wall.b_s)
    yield ("wall time", *_levels(whole), factor_text(wall.total), added_text(whole), "")
    for factor in wall.factors:
        added = Contribution(name=factor.name, added_s=factor.added_s)
        share = factor.share_of(wall.total)
        yield (f"  {factor.name}", "", "", factor_text(factor.estimate), added_text(added, whole), _percent(share))
        if factor.name == TIME_PER_STEP:
            yield from _step_rows(decomposition, show_all=show_all)


def _step_rows(decomposition: Decomposition, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    split = decomposition.sections
    if split is not None:
        clear = [section for section in split.sections if section.is_significant]
        largest = sorted(clear, key=lambda section: -abs(section.added_s))[:SHOWN_SECTIONS]
        rows = split.sections if show_all else [section for section in split.sections if section in largest]
        yield from (_part_row(section, split.whole, of=" of the step") for section in rows)
    if not show_all:
        return
    if not isinstance(decomposition.model, str):
        for part in (*decomposition.model.shown_factors, decomposition.model.rest):
            yield _part_row(part, decomposition.model.whole, of=" of the step (step-time model)")
    if not isinstance(decomposition.work, str):
        for part in decomposition.work.parts:
            yield _part_row(part, decomposition.work.whole, of=" of the step (model)")


def _part_row(part: Contribution, whole: Contribution | None, of: str = "") -> tuple[str, ...]:
    share = None if whole is None else part.share_of(whole)
    indent = "" if whole is None else "    " if of else "  "
    return (
        f"{indent}{part.name}",
        *_levels(part),
        "",
        added_text(part),
        _percent(share) + of if share is not None else "",
    )


def _levels(part: Contribution) -> tuple[str, str]:
    unit, factor = unit_of(part)
    a, b = (None if value is None else f"{value * factor:.4g} {unit}" for value in (part.a_s, part.b_s))
    return a or "", b or ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f}%"


_SPECIAL: Final = re.compile(r"[\\|*_`<~&]|\](?=[(\[:])")
"""Signs that begin or end an element, and the bracket that could end the text of a link: intervals have others."""
_ACTIVE: Final = re.compile(r"@|(?<!&)#(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)
"""Behind an ``@``, and in ``#12``, ``://`` and ``www.`` a blank without width keeps GitHub from making a link."""
_NO_WIDTH: Final = "&#8203;"


def markdown_text(text: str) -> str:
    """A text as one line of Markdown that shows it."""
    escaped = _SPECIAL.sub(r"\\\g<0>", visible_line(text)).replace("$", "&#36;")
    return _ACTIVE.sub(rf"\g<0>{_NO_WIDTH}", escaped)


def fenced(text: str) -> str:
    """A text of several lines as a block of code, between more backticks than it has in a row."""
    escaped = visible_lines(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", escaped)), default=0))
    return f"{fence}text\n{escaped}\n{fence}"


def markdown_of(comparison: Comparison, *, show_all: bool = False) -> str:
    """The verdict, the table, then what must be known to trust it."""
    headings = headings_of(comparison)
    lines = [
        f"**{markdown_text(verdict_sentence(comparison))}**",
        "",
        _comparison_markdown_row(headings),
        _ruler(headings),
    ]
    lines += [_comparison_markdown_row(row) for row in rows_of(comparison, show_all=show_all)]
    lines += _decomposition(comparison, show_all=show_all)
    if arms := compared_drafts(comparison):
        lines += ["", f"{TITLE}:", "", *_table(acceptance_headings(arms), acceptance_rows(arms))]
    if comparison.nodes is not None:
        rows = node_rows(comparison.nodes, show_all=show_all)
        lines += ["", f"{NODES_TITLE}:", "", *_table(node_headings(comparison.confidence), rows)]
    lines += ["", *(f"- {markdown_text(line)}" for line in footnotes_of(comparison))]
    return "\n".join(lines)


def _decomposition(comparison: Comparison, *, show_all: bool) -> list[str]:
    """A second table, where there is anything to divide; leading blanks would be lost in Markdown."""
    rows = list(decomposition_rows(comparison, show_all=show_all))
    if not rows:
        return []
    return ["", *_table(decomposition_headings(comparison), rows)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_comparison_markdown_row(headings), _ruler(headings), *(_comparison_markdown_row(row) for row in rows)]


def _comparison_markdown_row(fields: Sequence[str]) -> str:
    return f"| {' | '.join(markdown_text(field).replace('  ', '&nbsp;&nbsp;') for field in fields)} |"


def _ruler(headings: Sequence[str]) -> str:
    return f"| {' | '.join(['---'] * len(headings))} |"
