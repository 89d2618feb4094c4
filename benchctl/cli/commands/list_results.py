"""``benchctl list``: the result directories under a root."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.screen import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.report.catalog import Entry


def list_results(
    root: Annotated[Path, typer.Argument(help="Parent of result directories.")] = Path("results"),
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

    from benchctl.cli.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for column in ("directory", "created", "profile", "engine", "state", "runs", "remarks"):
        table.add_column(column, justify="right" if column == "runs" else "left", no_wrap=True)
    for entry in entries:
        name = str(entry.path.relative_to(root)) if entry.path != root else str(root)
        if entry.problem is not None:
            table.add_row(name, "", "", "", "unreadable", "", entry.problem)
            continue
        runs = f"{entry.num_done}/{entry.num_planned}"
        remarks = " · ".join(filter(None, (entry.label, entry.altered)))
        fields = (entry.created_at, entry.profile, entry.engine, entry.state, runs, remarks)
        table.add_row(name, *(field or "" for field in fields))
    wide_console().print(table)
