"""A comparison as tables and footnotes, for every form of output."""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from benchctl.analysis.attribution.decomposition import (
    TIME_PER_STEP,
    Decomposition,
    added_text,
    factor_text,
    unit_of,
)
from benchctl.analysis.attribution.estimate import Part
from benchctl.analysis.compare.accuracy import divergence_sentence, quality_lines
from benchctl.analysis.compare.answer import (
    answer_lines,
    foremost_cells,
    foremost_metric,
    open_reasons,
    verdict_sentence,
)
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import (
    change_text,
    difference_lines,
    looks_lines,
    speed_line,
    threshold_text,
    unrecorded_lines,
)
from benchctl.analysis.metrics.run import ArmDrafts
from benchctl.records.warning_codes import severity_of
from benchctl.report.experiment_tables import nodes_table
from benchctl.report.model_tables import acceptance_table
from benchctl.report.table import Column, Table, markdown_text, table_of
from benchctl.units import NOT_AVAILABLE, count_of, p_value, percentage, percentage_change, range_of, scatter
from benchctl.untrusted.text import visible_line

MOST_CHARACTERS: Final = 200
"""Of a field: one with a longer label would push the numbers away."""
SHOWN_EXPLORATORY: Final = frozenset(
    {"output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "output_tokens", "num_steps", "tokens_per_step"}
)
"""Exploratory metrics of the short table, in the terminal and on the page; the document has them all."""

SHOWN_WHERE_KNOWN: Final = frozenset({"acceptance_rate", "acceptance_length", "goodput", "slo_attained_frac"})
"""Exploratory metrics of the short table that have a row where either side has a value."""

MOST_ROWS: Final = 16
_MOST_WARNINGS: Final = 3
"""Of the short form, which fits on a screen."""

_ORDER: Final = {
    "a run changes by {} per position later in its block": attrgetter("position"),
    "the machine changes by {} per block": attrgetter("machine_drift"),
    "the ratio changes by {} per block": attrgetter("ratio_drift"),
}


def comparison_tables(comparison: Comparison, *, show_all: bool = False) -> list[Table]:
    """The metrics and the nodes; of one cell, and in all detail of each, where the time went and the drafts.

    Nothing where no block counts on both sides.
    """
    nodes = () if comparison.nodes is None else (comparison.nodes,)
    if not any(cell.num_blocks for cell in comparison.cells):
        return []
    tables: list[Table | None] = [metrics_table(comparison, show_all=show_all)]
    if show_all or len(comparison.cells) == 1:
        tables += [
            decomposition_table(comparison, show_all=show_all),
            acceptance_table(compared_drafts(comparison)),
        ]
    tables.append(nodes_table(nodes, show_all=show_all))
    if show_all and comparison.noise:
        tables.append(_floors_table(comparison))
    return [table for table in tables if table is not None]


def _floors_table(comparison: Comparison) -> Table:
    """The noise floor of each deciding metric, and whether it decides instead of the threshold."""
    margin = comparison.rules.margin_frac
    rows = (
        (name, percentage(noise.floor_frac, 2), "floor" if noise.floor_frac > margin else "threshold")
        for name, noise in comparison.noise.items()
    )
    return table_of(("metric", "noise floor", "a change is called beyond its"), rows, left=("metric",))


def metrics_table(comparison: Comparison, *, show_all: bool) -> Table:
    """Every metric with a row; a cell is named in its first one."""
    rows: list[dict[str, str]] = []
    for cell, metrics in _metrics_with_rows(comparison, show_all=show_all):
        of_cell = map(metric_row, metrics)
        rows += [{"cell": "" if index else cell.label, **row} for index, row in enumerate(of_cell)]
    change = f"change ({percentage(comparison.rules.confidence)} CI)"
    return _table(comparison, {"metric": "metric"}, {"change": change, "p": "p", "verdict": "verdict"}, rows)


def _metrics_with_rows(
    comparison: Comparison, *, show_all: bool
) -> list[tuple[CellComparison, list[MetricComparison]]]:
    """The metrics of each cell that have a row: as many as fit, first those that decide."""
    cells = [(cell, [m for m in cell.metrics if is_shown(m, show_all=show_all)]) for cell in comparison.cells]
    if show_all or sum(len(metrics) for _, metrics in cells) <= MOST_ROWS:
        return cells
    cells = [(cell, [m for m in metrics if m.role != "exploratory"]) for cell, metrics in cells]
    if sum(len(metrics) for _, metrics in cells) <= MOST_ROWS:
        return cells
    foremost = foremost_cells(comparison)[:MOST_ROWS]
    return [(cell, [foremost_metric(cell)]) for cell in comparison.cells if cell in foremost and cell.deciding]


def _table(
    comparison: Comparison, before: Mapping[str, str], behind: Mapping[str, str], rows: Sequence[Mapping[str, str]]
) -> Table:
    """The cell and the columns ``before`` the sides a and b, and ``behind`` them, by key and heading."""
    headings = {"cell": "cell", **before, "a": comparison.a_name, "b": comparison.b_name, **behind}
    columns = [
        Column(key, visible_line(name, MOST_CHARACTERS), is_left=True, is_extra=key == "p")
        for key, name in headings.items()
    ]
    return Table("", tuple(columns), tuple(rows))


def metric_row(metric: MetricComparison) -> dict[str, str]:
    """The texts of a metric in the order of the columns."""
    probability = metric.estimate.p_value if metric.estimate and metric.verdict != "equal" else None
    exact = "exact" if metric.role == "exact" else ""
    a, b = (
        NOT_AVAILABLE if centre is None else f"{_number(centre)} {scatter(scatter_frac)}".rstrip()
        for centre, scatter_frac in zip((metric.a, metric.b), metric.scatters, strict=True)
    )
    return {
        "metric": metric.metric.name,
        "a": a,
        "b": b,
        "change": change_text(metric),
        "p": exact if probability is None else p_value(probability),
        "verdict": f"({metric.verdict})" if metric.role == "exploratory" else metric.verdict,
    }


def _number(centre: float) -> str:
    return f"{centre:,.0f}" if abs(centre) >= 10_000 else f"{centre:.4g}"


def is_shown(metric: MetricComparison, *, show_all: bool) -> bool:
    """True for metrics that have a row: deciding ones, exact ones that differ, and some of general interest."""
    is_known = metric.a is not None or metric.b is not None
    of_interest = {
        "deciding": True,
        "exact": metric.verdict == "different",
        "exploratory": metric.metric.name in SHOWN_EXPLORATORY
        or (metric.metric.name in SHOWN_WHERE_KNOWN and is_known),
    }
    return show_all or of_interest[metric.role]


def compared_drafts(comparison: Comparison) -> dict[str, ArmDrafts]:
    """The arms of a comparison that drafted tokens, each once, by label."""
    arms: dict[str, ArmDrafts] = {}
    for cell in comparison.cells:
        is_named = cell.a_label == cell.b_label  # of two directories
        a, b = (f"{name}: " if is_named else "" for name in (comparison.a_name, comparison.b_name))
        sides = {a + cell.a_label: cell.a_drafts, b + cell.b_label: cell.b_drafts}
        arms |= {label: each for label, each in sides.items() if each is not None and label not in arms}
    return arms


def decomposition_table(comparison: Comparison, *, show_all: bool) -> Table | None:
    """The wall time with its factors, below the time per step its sections; None where nothing can be divided.

    In all detail also what models say of the work, and what none explains. A cell is named in its first row.
    """
    rows: list[dict[str, str]] = []
    for cell in comparison.cells:
        decomposition = cell.decomposition
        if decomposition is None or (decomposition.wall is not None and not decomposition.wall.parts):
            continue
        of_cell = _rows(decomposition, show_all=show_all)
        rows += [{"cell": "" if index else cell.label, **row} for index, row in enumerate(of_cell)]
    factor = f"factor ({percentage(comparison.rules.confidence)} CI)"
    behind = {"factor": factor, "adds": "adds", "share": "share"}
    return _table(comparison, {"part": "where the time went"}, behind, rows) if rows else None


def _rows(decomposition: Decomposition, *, show_all: bool) -> Iterator[dict[str, str]]:
    wall = decomposition.wall
    if wall is None:
        if decomposition.step is not None:
            yield _part_row(decomposition.step)
        yield from _step_rows(decomposition, show_all=show_all)
        return
    yield _part_row(wall.whole) | {"factor": factor_text(wall.whole.estimate)}
    for factor in wall.parts:
        share = factor.share_of(wall.whole)
        yield {
            "part": f"  {factor.name}",
            "factor": factor_text(factor.estimate),
            "adds": added_text(Part(name=factor.name, added_s=factor.added_s), like=wall.whole),
            "share": "" if share is None else f"{share:z.0%}",
        }
        if factor.name == TIME_PER_STEP:
            yield from _step_rows(decomposition, show_all=show_all)


def _step_rows(decomposition: Decomposition, *, show_all: bool) -> Iterator[dict[str, str]]:
    """The sections of a step; in the short form the three that add most, as far as they are told from nothing."""
    split, model, work = decomposition.sections, decomposition.model, decomposition.work
    if split is not None:
        clear = [section for section in split.parts if section.is_significant]
        largest = sorted(clear, key=lambda section: -abs(section.added_s))[:3]
        rows = split.parts if show_all else [section for section in split.parts if section in largest]
        yield from (_part_row(section, split.whole, of=" of the step") for section in rows)
    if show_all and not isinstance(model, str):
        for part in model.shown_parts:
            yield _part_row(part, model.whole, of=" of the step (step-time model)")
    if show_all and not isinstance(work, str):
        yield from (_part_row(part, work.whole, of=" of the step (model)") for part in work.parts)


def _part_row(part: Part, whole: Part | None = None, of: str = "") -> dict[str, str]:
    """A whole, or below one a part ``of`` it."""
    share = None if whole is None else part.share_of(whole)
    unit, factor = unit_of(part)
    return {
        "part": part.name if whole is None else f"    {part.name}",
        "a": "" if part.a_s is None else f"{part.a_s * factor:.4g} {unit}",
        "b": "" if part.b_s is None else f"{part.b_s * factor:.4g} {unit}",
        "adds": added_text(part),
        "share": "" if share is None else f"{share:z.0%}{of}",
    }


def markdown_of(comparison: Comparison, *, show_all: bool = False) -> str:
    """The verdict, the answer, the tables, then what must be known to trust them."""
    parts = [f"**{markdown_text(verdict_sentence(comparison))}**"]
    parts.append("\n".join(f"- {markdown_text(line)}" for line in answer_lines(comparison)))
    for table in comparison_tables(comparison, show_all=show_all):
        parts += [*([f"{markdown_text(table.title)}:"] if table.title else []), table.markdown()]
    parts.append("\n".join(f"- {markdown_text(line)}" for line in footnotes_of(comparison, show_all=show_all)))
    return "\n\n".join(filter(None, parts))


def footnotes_of(comparison: Comparison, *, show_all: bool = False) -> Iterator[str]:
    """Conditions that a reader must know to trust the tables; in all detail also those that hold as a rule."""
    for cell in comparison.cells if show_all or len(comparison.cells) == 1 else ():
        lines = [cell.cause if show_all else None, speed_line(cell)]
        yield from (f"{cell.label}: {line}" for line in lines if line is not None)
    yield from _answer_lines(comparison)
    for lines_of in (unrecorded_lines, looks_lines, open_reasons):
        yield from lines_of(comparison)
    yield from _order_lines(comparison, show_all=show_all)
    if show_all:
        yield from _details(comparison)
    rows_of_cells = _metrics_with_rows(comparison, show_all=show_all)
    if any(metric.role == "exploratory" for _, metrics in rows_of_cells for metric in metrics):
        yield "verdicts in parentheses are exploratory and decide nothing"
    warnings = [
        f"{'note' if severity_of(warning.code) == 'note' else 'warning'}: {warning.message}"
        + (f" [{warning.where}]" if warning.where else "")
        for warning in comparison.warnings
    ]
    yield from warnings if show_all else warnings[:_MOST_WARNINGS]
    num_rows = sum(len(metrics) for _, metrics in rows_of_cells)
    left = {
        "row": sum(is_shown(m, show_all=False) for c in comparison.cells for m in c.metrics) - num_rows,
        "warning": len(warnings) - _MOST_WARNINGS,
    }
    more = [count_of(number, f"more {what}") for what, number in left.items() if number > 0 and not show_all]
    if more:
        yield f"{' and '.join(more)} with --all"


def _details(comparison: Comparison) -> Iterator[str]:
    """Order, margins, estimator and noise floor, exact metrics that are equal, and every declared difference."""
    yield _blocks_line(comparison)
    yield from _margin_lines(comparison)
    exact = [metric for cell in comparison.cells for metric in cell.metrics if metric.role == "exact"]
    unequal = {metric.metric.name for metric in exact if metric.verdict != "equal"}
    if equal := dict.fromkeys(metric.metric.name for metric in exact if metric.metric.name not in unequal):
        yield f"equal in every block: {', '.join(equal)}"
    yield from (f"declared difference: {line}" for line in difference_lines(comparison.allowed))


def _answer_lines(comparison: Comparison) -> Iterator[str]:
    """Quality and divergence of each cell; the reason for no judgement once."""
    for cell in comparison.cells:
        if cell.quality is not None:
            decides = "" if cell.is_quality_deciding else " (decides nothing without --quality-margin)"
            first, *more = quality_lines(cell.quality)
            yield from (f"{cell.label}: {line}" for line in (f"{first}{decides}", *more))
        if cell.divergence is not None:
            yield f"{cell.label}: {divergence_sentence(cell.divergence)}"
    for note in dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note):
        yield f"answers are not judged: {note}"


def _margin_lines(comparison: Comparison) -> Iterator[str]:
    """The margins, the estimator, and the origin of the noise floors."""
    yield threshold_text(comparison)
    estimators = {m.estimate.estimator for c in comparison.cells for m in c.deciding if m.estimate is not None}
    if comparison.pairing == "unpaired":
        yield (
            "means are geometric means of the runs as measured, each counting the same; a change is the "
            "Hodges-Lehmann shift of the logarithms, not their quotient"
        )
    for name, counts in (("robust", "outlying blocks count little"), ("mean", "every block counts the same")):
        if name in estimators:
            yield f"estimator: {name}; {counts}, in centres and their scatter (±) as in the change"
    if comparison.noise:
        yield f"noise floors from {comparison.rules.noise_source}"
    else:
        yield "no noise floor: no A/A experiment of this machine is on file (benchctl run NAME --aa)"


def _order_lines(comparison: Comparison, *, show_all: bool) -> Iterator[str]:
    """Effects of order and time on the deciding metrics that are significant over all tests."""
    effects: list[tuple[float, str]] = []
    num_tests = 0
    for words, slope_of in _ORDER.items():
        slopes = [
            (slope.p_value, slope.log_per_unit, f"({metric.metric.name} in {cell.label}; p ")
            for cell in comparison.cells
            for metric in cell.deciding
            if metric.order is not None and (slope := slope_of(metric.order)) is not None
        ]
        num_tests += len(slopes)
        for probability, log, where in sorted(slopes)[:1]:
            effects.append((probability, f"{words.format(percentage_change(math.expm1(log)))} {where}"))
    significant = [(probability, line) for probability, line in effects if probability * num_tests < 0.05]
    for probability, line in significant:
        yield f"{line}{probability * num_tests:.2g}, corrected for {num_tests} tests)"
    if show_all and num_tests and not significant:
        yield f"no effect of position or drift is significant ({num_tests} tests)"


def _blocks_line(comparison: Comparison) -> str:
    """Blocks and order, and the smallest change that would show in each deciding metric, where it is largest."""
    line = f"n = {range_of([cell.num_blocks for cell in comparison.cells])} blocks, {comparison.pairing}"
    first = [cell for cell in comparison.cells if cell.num_a_first is not None]
    if first:
        ran_first, blocks = sum(c.num_a_first or 0 for c in first), sum(c.num_blocks for c in first)
        line += f", {comparison.a_name} ran first in {ran_first} of {blocks}"
    worst: dict[str, float] = {}
    for metric in (metric for cell in comparison.cells for metric in cell.deciding):
        effect = metric.estimate.minimum_detectable_effect if metric.estimate else None
        if effect is not None:
            worst[metric.metric.name] = max(effect, worst.get(metric.metric.name, 0.0))
    texts = {name: f"{e * 100:.0f}%" if e >= 0.1 else percentage(e, 2) for name, e in worst.items()}
    detectable = ", ".join(f"{name} {text}" for name, text in texts.items())
    return line + (f" · detectable: {detectable}" if detectable else "")
