"""One table: its columns and the values of its rows, and their forms for a terminal, Markdown, the page and CSV.

Text in Markdown: what comes from outside is shown as it is, on GitHub as well, where comments have mentions.
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from benchctl.units import UNKNOWN
from benchctl.untrusted.text import csv_cell, visible_line, visible_lines


@dataclass(frozen=True, slots=True)
class Column:
    """``format`` turns a value that is known into text."""

    key: str
    heading: str
    format: Callable[[Any], str] = str
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows are values by the key of their column: None is unknown; a key that is absent leaves a field empty."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    def texts(self) -> list[list[str]]:
        """Every row as text."""
        return [[_text(column, row) for column in self.columns] for row in self.rows]

    def drawn(self, paint: Callable[[str], Text] | None = None, *, folds: bool = False) -> Group:
        """The table for a terminal; ``paint`` gives a text its style, ``folds`` breaks fields that are too wide.

        Rows that do not fold are drawn as one row of many lines, which takes rich a fraction of the time.
        """
        drawn = RichTable(
            box=None,
            pad_edge=False,
            show_header=any(column.heading for column in self.columns),
        )
        for column in self.columns:
            drawn.add_column(
                visible_lines(column.heading),
                justify="left" if column.is_left else "right",
                no_wrap=not folds,
                overflow="fold",
            )
        rows = [[visible_line(text) for text in row] for row in self.texts()]
        painted: list[list[Any]] = rows if paint is None else [[paint(text) for text in row] for row in rows]
        if rows and not folds:
            glue: Any = "\n" if paint is None else Text("\n")
            painted = [[glue.join(column) for column in zip(*painted, strict=True)]]
        for row in painted:
            drawn.add_row(*row)
        title = [Text(visible_lines(self.title), style="bold")] if self.title else []
        return Group(*title, drawn)  # a title of rich is broken where the table ends

    def __rich__(self) -> Group:
        return self.drawn()

    def markdown(self) -> str:
        """The table in Markdown, where leading blanks would be lost."""
        lines = [[column.heading for column in self.columns], ["---"] * len(self.columns), *self.texts()]
        fields = [[markdown_text(field).replace("  ", "&nbsp;&nbsp;") for field in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in fields)


def _text(column: Column, row: Mapping[str, Any]) -> str:
    if column.key not in row:
        return ""
    value = row[column.key]
    return UNKNOWN if value is None else column.format(value)


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Collection[str] = (), title: str = ""
) -> Table:
    """A table whose rows are in the order of its headings; the columns ``left`` are aligned left."""
    columns = tuple(Column(heading, heading, is_left=heading in left) for heading in headings)
    return Table(title, columns, tuple(dict(zip(headings, row, strict=False)) for row in rows))


def csv_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """RFC 4180 with a header line and numbers at full precision; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row[column] is None else csv_cell(row[column]) for column in columns])
    return text.getvalue().encode()


_SPECIAL: Final = re.compile(r"[\\|*_`<~&]|\](?=[(\[:])")
"""Signs that begin or end an element, and the bracket that could end the text of a link: intervals have others."""
_ACTIVE: Final = re.compile(r"@|(?<!&)#(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)
"""Behind an ``@``, and in ``#12``, ``://`` and ``www.`` a blank without width keeps GitHub from making a link."""
_NO_WIDTH: Final = "&#8203;"


def markdown_text(text: str) -> str:
    """A text as one line of Markdown that shows it."""
    escaped = _SPECIAL.sub(r"\\\g<0>", visible_line(text)).replace("$", "&#36;")
    return _ACTIVE.sub(rf"\g<0>{_NO_WIDTH}", escaped)


def fenced(text: str) -> str:
    """A text of several lines as a block of code, between more backticks than it has in a row."""
    escaped = visible_lines(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", escaped)), default=0))
    return f"{fence}text\n{escaped}\n{fence}"
