"""A comparison on the screen."""

from typing import Final

from rich.console import Console
from rich.table import Table

from benchctl.analysis.comparison import Comparison
from benchctl.analysis.comparison_text import verdict_sentence
from benchctl.report.comparison_table import footnotes_of, headings_of, rows_of

_LEAST_WIDTH: Final = 150


def print_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """The verdict, the table, then what must be known to trust it."""
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(verdict_sentence(comparison), style="bold", markup=False, soft_wrap=True)
    console.print()
    console.print(_table(comparison, show_all=show_all))
    console.print()
    for line in footnotes_of(comparison):
        console.print(line, markup=False, soft_wrap=True)


def _table(comparison: Comparison, *, show_all: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings_of(comparison):
        table.add_column(heading, no_wrap=True)
    for row in rows_of(comparison, show_all=show_all):
        table.add_row(*row)
    return table
