"""``benchctl list``: the result directories under a root."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.options.experiment import RESULTS
from benchctl.cli.output.screen import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.report.catalog import Entry

_COLUMNS: Final = ("directory", "created", "profile", "engine", "state", "runs", "remarks")
_GAP: Final = 2
"""Blanks between two columns."""
_LEAST_WIDTHS: Final = {0: 18, 2: 8, 6: 8}
"""Characters that are left of each column that a narrow terminal shortens, by the column's number."""


def list_results(
    root: Annotated[Path, typer.Argument(help="Parent of result directories.")] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """List result directories, newest first, with profile, engine, state and the number of runs."""
    from benchctl.report.catalog import list_directories

    entries = list_directories(root)
    if as_json:
        print_json({"root": str(root), "results": [entry.document() for entry in entries]})
    elif entries:
        _print_table(root, entries)
    else:
        print(f"{root} contains no results yet; 'benchctl run' creates them")


def _print_table(root: Path, entries: "Sequence[Entry]") -> None:
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console
    from benchctl.untrusted.text import visible_line

    rows = [[visible_line(field) for field in _row(root, entry)] for entry in entries]
    if sys.stdout.isatty():
        rows = _fitted(rows, shutil.get_terminal_size().columns)
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column == "runs" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)


def _row(root: Path, entry: "Entry") -> "list[str]":
    name = str(entry.path.relative_to(root)) if entry.path != root else str(root)
    if entry.problem is not None:
        return [name, "", "", "", entry.state or "unreadable", "", entry.problem]
    nodes = f"{len(entry.nodes)} nodes" if len(entry.nodes) > 1 else None
    remarks = " · ".join(filter(None, (_blocks(entry), nodes, entry.label, entry.damage, entry.altered)))
    fields = (entry.created_at, entry.profile, entry.engine, entry.state)
    return [name, *(field or "" for field in fields), f"{entry.num_done}/{entry.num_planned}", remarks]


def _blocks(entry: "Entry") -> str | None:
    """Blocks that are done of an experiment in progress."""
    if entry.state not in {"running", "interrupted"} or not entry.num_blocks:
        return None
    return f"{entry.num_blocks_done} of {entry.num_blocks} blocks done"


def _fitted(rows: "Sequence[list[str]]", width: int) -> "list[list[str]]":
    """The rows with the longest names and remarks shortened until the table has ``width`` columns, if that is
    possible.
    """
    from benchctl.formats import shortened, shortened_inside

    columns = list(zip(_COLUMNS, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(_LEAST_WIDTHS, key=lambda column: widths[column] - _LEAST_WIDTHS[column])
        if widths[widest] <= _LEAST_WIDTHS[widest]:
            break
        widths[widest] -= 1
    return [[shortened_inside(row[0], widths[0]), *map(shortened, row[1:], widths[1:])] for row in rows]
