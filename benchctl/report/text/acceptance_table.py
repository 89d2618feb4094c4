"""Acceptance of draft tokens as a table: one arm a row, one position of the drafts a column."""

from collections.abc import Iterator, Mapping
from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.summary.arm_drafts import ArmDrafts, PositionOverBlocks
from benchctl.formats import UNKNOWN, three_digits, whole
from benchctl.report.text.plain_table import plain_table

TITLE: Final = (
    "Acceptance of draft tokens; by position: share of all drafts accepted up to it (in brackets of those accepted "
    "up to the position before)"
)


def acceptance_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every arm that drafted tokens; None where none did."""
    arms = {cell.label: drafts for cell in analysis.cells if (drafts := cell.drafts()) is not None}
    if not arms:
        return None
    label, *numbers = acceptance_headings(arms)
    table = plain_table(TITLE, [label], numbers)
    for row in acceptance_rows(arms):
        table.add_row(*row)
    return table


def compared_drafts(comparison: Comparison) -> dict[str, ArmDrafts]:
    """The arms of a comparison that drafted tokens, each once, by label."""
    arms: dict[str, ArmDrafts] = {}
    for cell in comparison.cells:
        labels = (cell.a_label, cell.b_label)
        if cell.a_label == cell.b_label:  # of two directories
            labels = (f"{comparison.a_name}: {cell.a_label}", f"{comparison.b_name}: {cell.b_label}")
        for label, drafts in zip(labels, (cell.a_drafts, cell.b_drafts), strict=True):
            if drafts is not None:
                arms.setdefault(label, drafts)
    return arms


def acceptance_headings(arms: Mapping[str, ArmDrafts]) -> tuple[str, ...]:
    """The columns of the table: as many positions as the longest drafts have."""
    num_positions = max((len(drafts.positions) for drafts in arms.values()), default=0)
    positions = (f"position {position}" for position in range(1, num_positions + 1))
    return ("cell", "drafts", "draft tokens", "accepted", "rate", "length", *positions)


def acceptance_rows(arms: Mapping[str, ArmDrafts]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    num_columns = len(acceptance_headings(arms))
    for label, drafts in arms.items():
        counts = drafts.counts
        row = (
            label,
            *(whole(count) for count in (counts.drafts, counts.draft_tokens, counts.accepted_tokens)),
            *(UNKNOWN if share is None else three_digits(share) for share in _rates(drafts)),
            *map(_share, drafts.positions),
        )
        yield (*row, *[""] * (num_columns - len(row)))


def _rates(drafts: ArmDrafts) -> tuple[float | None, float | None]:
    return drafts.acceptance_rate, drafts.acceptance_length


def _share(position: PositionOverBlocks) -> str:
    """``0.512 (0.800)``; the first position has no other before it."""
    pooled = position.pooled
    survival = UNKNOWN if pooled.survival is None else three_digits(pooled.survival)
    if pooled.position == 1 or pooled.conditional is None:
        return survival
    return f"{survival} ({three_digits(pooled.conditional)})"
