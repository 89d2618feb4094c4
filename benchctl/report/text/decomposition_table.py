"""The decomposition of the wall time as rows of a table: factors that multiply, seconds that add up."""

from collections.abc import Iterator
from typing import Final

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.factors import TIME_PER_STEP
from benchctl.analysis.attribution.text import added_text, factor_text, unit_of
from benchctl.analysis.compare.result import Comparison
from benchctl.formats import percentage

SHOWN_SECTIONS: Final = 3
"""Sections of a step in the short form: those that add most, as far as they can be told from nothing."""


def decomposition_headings(comparison: Comparison) -> tuple[str, ...]:
    """The columns of the table."""
    factor = f"factor ({percentage(comparison.confidence)} CI)"
    return ("cell", "where the time went", comparison.a_name, comparison.b_name, factor, "adds", "share")


def decomposition_rows(comparison: Comparison, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table; a cell is named in its first one.

    The wall time with its factors, below the time per step its sections, in all detail also what no model of the
    work explains, what the batches do, and the latency of a request.
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
        if decomposition.batches is not None:
            yield _part_row(decomposition.batches.whole, None)
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
    if show_all:
        if wall.phases is not None:
            yield from (_part_row(part, wall.phases.whole) for part in wall.phases.parts)
        if decomposition.latency is not None:
            yield _part_row(decomposition.latency.whole, None)
            yield from (_part_row(part, decomposition.latency.whole) for part in decomposition.latency.parts)


def _step_rows(decomposition: Decomposition, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    split = decomposition.sections
    if split is not None:
        clear = [section for section in split.sections if section.is_significant]
        largest = sorted(clear, key=lambda section: -abs(section.added_s))[:SHOWN_SECTIONS]
        rows = split.sections if show_all else [section for section in split.sections if section in largest]
        yield from (_part_row(section, split.whole, of=" of the step") for section in rows)
    if not show_all:
        return
    if decomposition.batches is not None:
        for part in (decomposition.batches.batches, decomposition.batches.same_batch):
            yield _part_row(part, decomposition.batches.whole, of=" of the step")
    if decomposition.model is not None:
        for part in (*decomposition.model.shown_factors, decomposition.model.rest):
            yield _part_row(part, decomposition.model.whole, of=" of the step (step-time model)")
    if decomposition.work is not None:
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
