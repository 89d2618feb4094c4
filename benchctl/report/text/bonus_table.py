"""Both ways of backfill as a table, and what follows in sentences. Times are in ms."""

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.bonus.sentences import context_in_words, verdict_sentences
from benchctl.analysis.bonus.verdict import BackfillVerdict, Comparison, Cost
from benchctl.formats import UNKNOWN, three_digits
from benchctl.profile.sections.forward_pass import Mode
from benchctl.units import ms_from_ns

HEADINGS: Final = (
    "batch",
    "tokens m",
    "T(B)",
    "expansion: T(B+m) - T(B)",
    "prefill of m",
    "expansion - prefill",
    "cheaper",
)


def bonus_table(verdict: BackfillVerdict, modes: tuple[Mode, Mode]) -> Table:
    """The rows of one pair of modes."""
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[-1] else "right", no_wrap=True)
    for row in verdict.rows(*modes):
        table.add_row(*row_cells(row))
    return table


def row_cells(row: Comparison) -> list[str]:
    """The texts of a row, in the order of ``HEADINGS``."""
    costs = (row.decode, row.expansion, row.prefill, row.difference)
    return [str(row.batch_size), str(row.bonus_tokens), *map(cost_text, costs), row.cheaper or "inconclusive"]


def cost_text(cost: Cost | None) -> str:
    """``1.23 [1.20, 1.26]``, in milliseconds."""
    if cost is None:
        return UNKNOWN
    centre = _ms(cost.centre_ns)
    if cost.low_ns is None or cost.high_ns is None:
        return centre
    return f"{centre} [{_ms(cost.low_ns)}, {_ms(cost.high_ns)}]"


def _ms(duration_ns: float) -> str:
    """Three digits, and at most four behind the point: a tenth of a microsecond."""
    text = three_digits(ms_from_ns(duration_ns))
    return text if abs(ms_from_ns(duration_ns)) >= 0.1 else f"{ms_from_ns(duration_ns):.4f}"


def bonus_notes(analysis: AnalyzedExperiment) -> Iterator[tuple[str, list[str]]]:
    """The verdict of each context as a title and its sentences; nothing where no ways of backfill are compared."""
    if analysis.bonus is None:
        return
    for design, verdict in analysis.bonus.verdicts:
        yield f"Backfill of bonus tokens, {context_in_words(design)}", verdict_sentences(verdict)
    if analysis.bonus.missing:
        yield "Backfill of bonus tokens, missing", list(analysis.bonus.missing)
