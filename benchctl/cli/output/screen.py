"""Output that several commands share, and the garbage collector while they read."""

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Final

from benchctl.untrusted.text import visible_line, visible_lines

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from benchctl.analysis.analyzed import AnalyzedExperiment
    from benchctl.cli.output.console import TextConsole

TABLE_WIDTH: Final = 10_000
"""Wide enough that no table is cut: numbers without their last digits would mislead."""
_LEAST_FOLDED: Final = 80
"""Narrower columns could not be read; a narrower terminal breaks the lines by itself."""
_FILE_WIDTH: Final = 200

_NOT_PLAIN: Final = re.compile(r"[^\n -~]+")
_FIRST_WORD: Final = re.compile(r"\s*(\w+)")
_VERDICT_COLOURS: Final = {
    "regression": "red",
    "invalid": "red",
    "improvement": "green",
    "equivalent": "green",
    "inconclusive": "yellow",
}


def wide_console() -> "TextConsole":
    """A console that prints tables and sentences as they are: not cut, wrapped or interpreted as markup."""
    from benchctl.cli.output.console import TextConsole

    return TextConsole(soft_wrap=True, width=TABLE_WIDTH)


def folding_console(width_of_files: int | None = _FILE_WIDTH) -> "TextConsole":
    """A console whose tables fold their cells to the width of the terminal, but not to one that cannot be read.

    ``width_of_files`` is the width without a terminal; by None as at one.
    """
    from benchctl.cli.output.console import TextConsole

    console = TextConsole(width=None if width_of_files is None or sys.stdout.isatty() else width_of_files)
    console.width = max(console.width, _LEAST_FOLDED)
    return console


def verdict_text(text: str, style: str = "") -> "Text":
    """A text whose first word is in the colour of the verdict that it names, where the terminal has colours.

    Without a terminal, or with NO_COLOR, the same text is printed plain.
    """
    from rich.text import Text

    drawn = Text(text := visible_lines(text), style=style)
    if (word := _FIRST_WORD.match(text)) and (colour := _VERDICT_COLOURS.get(word[1])):
        drawn.stylize(colour, *word.span(1))
    return drawn


def print_json(document: object) -> None:
    """Print a document as JSON in ASCII, which every stream can hold and which has no control characters."""
    print(_json_text(document, indent=1))


def json_line(document: object) -> str:
    """A document as JSON in ASCII, in one line."""
    return _json_text(document, indent=-1)


def _json_text(document: object, indent: int) -> str:
    import msgspec

    from benchctl.records.jsonl import encodable

    text = msgspec.json.format(msgspec.json.encode(encodable(document)), indent=indent).decode()
    return _NOT_PLAIN.sub(lambda match: json.dumps(match.group())[1:-1], text)


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


def print_notes(console: "TextConsole", analysis: "AnalyzedExperiment") -> None:
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
                console.print(visible_line(line))


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
