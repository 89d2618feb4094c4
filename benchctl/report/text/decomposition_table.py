"""Where the time went as rows of a table and as a document: factors that multiply, seconds that add up."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution
from benchctl.analysis.attribution.factors import TIME_PER_STEP, WallSplit
from benchctl.analysis.attribution.text import (
    added_text,
    batch_line,
    factor_text,
    latency_line,
    sentence,
    unit_of,
    wall_line,
)
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.statistics.block_ratio import RatioEstimate
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
        found = cell.decomposition
        if found is None or (found.wall is not None and not found.wall.factors):
            continue
        for index, row in enumerate(_rows(found, show_all=show_all)):
            yield ("" if index else cell.label, *row)


def _rows(found: Decomposition, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    wall = found.wall
    if wall is None:
        if found.batches is not None:
            yield _part_row(found.batches.whole, None)
        yield from _step_rows(found, show_all=show_all)
        return
    whole = Contribution(name="wall time", added_s=wall.b_s - wall.a_s, a_s=wall.a_s, b_s=wall.b_s)
    yield ("wall time", *_levels(whole), factor_text(wall.total), added_text(whole), "")
    for factor in wall.factors:
        added = Contribution(name=factor.name, added_s=factor.added_s)
        share = factor.share_of(wall.total)
        yield (f"  {factor.name}", "", "", factor_text(factor.estimate), added_text(added, whole), _percent(share))
        if factor.name == TIME_PER_STEP:
            yield from _step_rows(found, show_all=show_all)
    if show_all:
        if wall.phases is not None:
            yield from (_part_row(part, wall.phases.whole) for part in wall.phases.parts)
        if found.latency is not None:
            yield _part_row(found.latency.whole, None)
            yield from (_part_row(part, found.latency.whole) for part in found.latency.parts)


def _step_rows(found: Decomposition, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    split = found.sections
    if split is not None:
        told = [section for section in split.sections if section.is_told]
        largest = sorted(told, key=lambda section: -abs(section.added_s))[:SHOWN_SECTIONS]
        shown = split.sections if show_all else [section for section in split.sections if section in largest]
        yield from (_part_row(section, split.whole, of=" of the step") for section in shown)
    if not show_all:
        return
    if found.batches is not None:
        for part in (found.batches.batches, found.batches.same_batch):
            yield _part_row(part, found.batches.whole, of=" of the step")
    if found.work is not None:
        for part in found.work.parts:
            yield _part_row(part, found.work.whole, of=" of the step (model)")


def _part_row(part: Contribution, whole: Contribution | None, of: str = "") -> tuple[str, ...]:
    share = None if whole is None else part.share_of(whole)
    said = "" if share is None else f"{_percent(share)}{of}"
    indent = "" if whole is None else "    " if of else "  "
    return (f"{indent}{part.name}", *_levels(part), "", added_text(part), said)


def _levels(part: Contribution) -> tuple[str, str]:
    unit, factor = unit_of(part)
    a, b = (None if value is None else f"{value * factor:.4g} {unit}" for value in (part.a_s, part.b_s))
    return a or "", b or ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f}%"


def decomposition_lines(cell: CellComparison) -> Iterator[str]:
    """The wall time as a product, and what carries it."""
    if cell.decomposition is not None:
        yield wall_line(cell.decomposition)
        yield sentence(cell.decomposition)


def decomposition_document(found: Decomposition | None) -> dict[str, Any] | None:
    """Everything of a decomposition; times in seconds, factors and shares as numbers."""
    if found is None:
        return None
    lines = (latency_line(found), batch_line(found))
    return {
        "sentence": sentence(found),
        "lines": [wall_line(found), *(line for line in lines if line is not None)],
        "blocks": found.num_blocks,
        "wall": None if found.wall is None else _wall_document(found.wall),
        "latency": _latency_document(found),
        "sections": _sections_document(found),
        "batches": _batches_document(found),
        "work": _work_document(found),
        "work_missing": found.work_missing,
    }


def _wall_document(wall: WallSplit) -> dict[str, Any]:
    return {
        "a_s": wall.a_s,
        "b_s": wall.b_s,
        **_ratio_document(wall.total),
        "factors": [
            {
                "name": factor.name,
                "meaning": factor.meaning,
                **_ratio_document(factor.estimate),
                "added_s": factor.added_s,
                "share": factor.share_of(wall.total),
            }
            for factor in wall.factors
        ],
        "phases": None if wall.phases is None else _parts_document(wall.phases.whole, wall.phases.parts),
    }


def _ratio_document(estimate: RatioEstimate) -> dict[str, float | None]:
    return {"ratio": estimate.ratio, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def _part_document(part: Contribution) -> dict[str, Any]:
    return {
        "name": part.name,
        "added_s": part.added_s,
        "ci_low_s": part.ci_low_s,
        "ci_high_s": part.ci_high_s,
        "a_s": part.a_s,
        "b_s": part.b_s,
    }


def _parts_document(whole: Contribution, parts: Iterable[Contribution]) -> dict[str, Any]:
    return {"whole": _part_document(whole), "parts": [_part_document(part) for part in parts]}


def _latency_document(found: Decomposition) -> dict[str, Any] | None:
    split = found.latency
    if split is None:
        return None
    parts = _parts_document(split.whole, split.parts)
    return {**parts, "requests": split.num_requests, "doubt": split.doubt}


def _sections_document(found: Decomposition) -> dict[str, Any] | None:
    split = found.sections
    if split is None:
        return None
    return {
        **_parts_document(split.whole, split.sections),
        "clock": split.clock_note,
        "unplaced": list(split.unplaced),
    }


def _batches_document(found: Decomposition) -> dict[str, Any] | None:
    split = found.batches
    if split is None:
        return None
    return {
        **_parts_document(split.whole, (split.batches, split.same_batch)),
        "bins": [
            {
                "bin": bin_.label,
                "a_share": bin_.a_share,
                "b_share": bin_.b_share,
                "a_step_s": bin_.a_step_s,
                "b_step_s": bin_.b_step_s,
                "batches_s": bin_.batches_s,
                "same_batch_s": bin_.same_batch_s,
            }
            for bin_ in split.bins
        ],
    }


def _work_document(found: Decomposition) -> dict[str, Any] | None:
    split = found.work
    if split is None:
        return None
    return {
        "model": f"roofline of {split.hardware}",
        **_parts_document(split.whole, split.parts),
        "unexplained_frac": split.unexplained_frac,
        "a_compute_frac": split.a_compute_frac,
        "b_compute_frac": split.b_compute_frac,
    }
