"""Output that several commands share, and the garbage collector while they read."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from benchctl.analysis.analyzed import AnalyzedExperiment

TABLE_WIDTH: Final = 1000
"""Wide enough that no table is cut: numbers without their last digits would mislead."""

_FIRST_WORD: Final = re.compile(r"\s*(\w+)")
_VERDICT_COLOURS: Final = {
    "regression": "red",
    "invalid": "red",
    "improvement": "green",
    "equivalent": "green",
    "inconclusive": "yellow",
}


def wide_console() -> "Console":
    """A console that prints tables and sentences as they are: not cut, wrapped or interpreted as markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True, width=TABLE_WIDTH)


def verdict_text(text: str, style: str = "") -> "Text":
    """A text whose first word is in the colour of the verdict that it names, where the terminal has colours.

    Without a terminal, or with NO_COLOR, the same text is printed plain.
    """
    from rich.text import Text

    drawn = Text(text, style=style)
    if (word := _FIRST_WORD.match(text)) and (colour := _VERDICT_COLOURS.get(word[1])):
        drawn.stylize(colour, *word.span(1))
    return drawn


def print_json(document: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


def in_one_row(table: "Table") -> "Table":
    """The same table with its rows as one row of many lines, which rich draws in a fraction of the time.

    Unchanged where that would look different: with cells of several lines, or rows that have a style of their own.
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
    """Print the verdicts on backfill, the findings and the notes of a result directory, each under its title."""
    from benchctl.report.text.bonus_table import bonus_notes
    from benchctl.report.text.tables import footnote_lines

    backfill = [(title, [f"* {sentence}" for sentence in sentences]) for title, sentences in bonus_notes(analysis)]
    findings = [f"* {finding.sentence} [{finding.code}]" for finding in analysis.findings]
    for title, lines in (*backfill, ("What follows", findings), ("Notes", footnote_lines(analysis))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(line)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside, or in the function that this decorates.

    Commands that only read create many records, none of which is part of a cycle: to search them takes time and
    frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
