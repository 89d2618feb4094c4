"""The layout that the tables of the terminal share, in its own file: ``benchctl load`` imports no analysis."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchctl.untrusted.text import visible_lines


def plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines; columns of ``left`` are aligned left, those of ``right`` right."""
    table = Table(
        title=Text(visible_lines(title)), title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table
