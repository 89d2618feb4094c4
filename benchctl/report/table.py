"""One table: its columns and the values of its rows, and their forms for a terminal, Markdown, the page and CSV.

Text in Markdown: what comes from outside is shown as it is, on GitHub as well, where comments have mentions.
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from benchctl.units import UNKNOWN, folded
from benchctl.untrusted.text import csv_cell, visible_line, visible_lines


@dataclass(frozen=True, slots=True)
class Column:
    """``format`` turns a value that is known into text; a wide table leaves extra columns out."""

    key: str
    heading: str
    format: Callable[[Any], str] = str
    is_left: bool = False
    is_extra: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows are values by the key of their column: None is unknown; a key that is absent leaves a field empty.

    A column that has no value in any row is shown nowhere.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    @property
    def used_columns(self) -> tuple[Column, ...]:
        """The first column, and those that have a value."""
        first, *others = self.columns
        nothing = {"", UNKNOWN} if self.rows else set()
        return (first, *(each for each in others if not nothing.issuperset(_text(each, row) for row in self.rows)))

    def texts(self) -> list[list[str]]:
        """Every row as text."""
        columns = self.used_columns
        return [[_text(column, row) for column in columns] for row in self.rows]

    def drawn(self, width: int, paint: Callable[[str], Text] | None = None, *, is_all: bool = False) -> Group:
        """The table for a terminal with ``width`` columns; ``paint`` gives a text its style.

        Where it is too wide, extra columns are left out and named, unless it ``is_all``; then headings are folded,
        then texts; at last columns continue below the others. No number or word is cut.
        """
        columns = [_Drawn.of(column, self.rows) for column in self.used_columns]
        extra = [] if is_all else [each for each in columns if each.column.is_extra]
        left_out: list[str] = []
        while extra and _total(columns, _AS_IT_IS) > width:
            columns.remove(last := extra.pop())
            left_out.insert(0, last.column.heading)
        title = [Text(visible_lines(folded(self.title, width)), style="bold")] if self.title else []
        more = [Text(folded(f"no room for the columns {', '.join(left_out)}", width))] if left_out else []
        return Group(*title, *(_side_by_side(block, width, paint) for block in _blocks(columns, width)), *more)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.drawn(options.max_width)

    def markdown(self) -> str:
        """The table in Markdown, where leading blanks would be lost."""
        headings = [column.heading for column in self.used_columns]
        lines = [headings, ["---"] * len(headings), *self.texts()]
        fields = [[markdown_text(field).replace("  ", "&nbsp;&nbsp;") for field in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in fields)


_GAP: Final = 2
"""Blanks between two columns."""
_LEAST_SENTENCE: Final = 30
"""Characters of a text that is not folded further: names and intervals stay whole."""
_AS_IT_IS, _HEADING_FOLDED, _FOLDED = range(3)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A column with its fields as text, and the characters that it takes as it is, with its heading folded, and
    with its texts folded, too.
    """

    column: Column
    heading: str
    fields: list[str]
    widths: tuple[int, int, int]

    @classmethod
    def of(cls, column: Column, rows: Iterable[Mapping[str, Any]]) -> "_Drawn":
        heading, fields = visible_lines(column.heading), [visible_line(_text(column, row)) for row in rows]
        below = max([0, *map(cell_len, heading.split())])
        cells = max([below, *map(cell_len, fields)])
        words = max([below, _LEAST_SENTENCE, *(cell_len(word) for field in fields for word in field.split())])
        whole = max([cells, *map(cell_len, heading.split("\n"))])
        return cls(column, heading, fields, (whole, cells, min(words, cells) if column.is_left else cells))


def _total(columns: Sequence[_Drawn], level: int) -> int:
    return sum(each.widths[level] + _GAP for each in columns) - _GAP


def _blocks(columns: Sequence[_Drawn], width: int) -> list[list[_Drawn]]:
    """The columns as far as they stand side by side; the first begins each block."""
    first, *others = columns
    blocks = [[first]]
    for each in others:
        if len(blocks[-1]) > 1 and _total([*blocks[-1], each], _FOLDED) > width:
            blocks.append([first])
        blocks[-1].append(each)
    return blocks


def _side_by_side(columns: Sequence[_Drawn], width: int, paint: Callable[[str], Text] | None) -> RichTable:
    """Columns in one table. Rows that do not fold are one row of many lines, which rich draws in little time."""
    level = next((level for level in (_AS_IT_IS, _HEADING_FOLDED) if _total(columns, level) <= width), _FOLDED)
    widths = [each.widths[level] for each in columns]
    for _ in range(width - _total(columns, level) if level else 0):  # to those that are short of most
        missing = [each.widths[level - 1] - own for each, own in zip(columns, widths, strict=True)]
        widths[missing.index(max(missing))] += 1
    table = RichTable(
        box=None,
        pad_edge=False,
        show_header=any(each.heading for each in columns),
        width=sum(widths) + _GAP * (len(widths) - 1),
    )
    for each, own in zip(columns, widths, strict=True):
        justify: Any = "left" if each.column.is_left else "right"
        table.add_column(Text(each.heading, no_wrap=False), justify=justify, width=own, overflow="fold")
    fields = [[Text(field) if paint is None else paint(field) for field in each.fields] for each in columns]
    rows = zip(*fields, strict=True) if level == _FOLDED else [[Text("\n").join(column) for column in fields]]
    for row in rows if fields[0] else ():
        table.add_row(*row)
    return table


def _text(column: Column, row: Mapping[str, Any]) -> str:
    if column.key not in row:
        return ""
    value = row[column.key]
    return UNKNOWN if value is None else column.format(value)


def table_of(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Collection[str] = (),
    extra: Collection[str] = (),
    title: str = "",
) -> Table:
    """A table whose rows are in the order of its headings; the columns ``left`` are aligned left."""
    columns = tuple(
        Column(heading, heading, is_left=heading in left, is_extra=heading in extra) for heading in headings
    )
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
