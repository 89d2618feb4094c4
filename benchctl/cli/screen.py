"""What several commands print in the same way."""

from copy import copy
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from benchctl.analysis.analyzed import AnalyzedExperiment

TABLE_WIDTH: Final = 1000
"""No table is cut, whatever the terminal's width: numbers without their last digits would mislead."""


def wide_console() -> "Console":
    """Standard output for tables and sentences, as they are: nothing is cut, wrapped or taken for markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True, width=TABLE_WIDTH)


def in_one_row(table: "Table") -> "Table":
    """The same table with its rows as one row of many lines, which rich draws in a fraction of the time.

    As it is where that would look different: with cells of several lines, or rows that have a style of their own.
    """
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    if any("\n" in cell for cells in columns for cell in cells) or any(
        r.style or r.end_section for r in table.rows
    ):
        return table
    drawn = copy(table)
    drawn.columns, drawn.rows = [column.copy() for column in table.columns], []
    if table.rows:
        drawn.add_row(*map("\n".join, columns))
    return drawn


def print_notes(console: "Console", analysis: "AnalyzedExperiment") -> None:
    """What follows from a result directory, and what is to be doubted, each under its title."""
    from benchctl.report.text.tables import findings_lines, footnote_lines

    for title, lines in (("What follows", findings_lines(analysis)), ("Notes", footnote_lines(analysis))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(line)
