"""A comparison on the screen."""

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.table import Table

from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import verdict_sentence
from benchctl.report.text.comparison_table import footnotes_of, headings_of, rows_of
from benchctl.report.text.decomposition_table import decomposition_headings, decomposition_rows

_LEAST_WIDTH: Final = 150


def print_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """The verdict, the table, where the time went, then what must be known to trust it."""
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(verdict_sentence(comparison), style="bold", markup=False, soft_wrap=True)
    console.print()
    console.print(_table(headings_of(comparison), rows_of(comparison, show_all=show_all)))
    console.print()
    parts = list(decomposition_rows(comparison, show_all=show_all))
    if parts:
        console.print(_table(decomposition_headings(comparison), parts))
        console.print()
    for line in footnotes_of(comparison):
        console.print(line, markup=False, soft_wrap=True)


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
