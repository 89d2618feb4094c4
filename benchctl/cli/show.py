"""``benchctl show``: what a result directory holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.errors import RecordError

if TYPE_CHECKING:
    from benchctl.report.reading import Reading

TABLE_WIDTH = 1000
"""No table is cut, whatever the terminal's width: numbers without their last digits would mislead."""


def show(
    results: Annotated[Path, typer.Argument(metavar="DIR", help="A result directory, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Show runs, cells, where the time of a step sits, the cost against the baseline, and what follows from it.

    A damaged file is named on stderr and exits 4, after everything that can be read has been shown.
    """
    from benchctl.report.reading import read_results

    reading = read_results(results)
    if as_json:
        _print_json(reading)
    else:
        _print_tables(reading)
    if reading.damage:
        raise RecordError("\n".join(reading.damage))


def _print_json(reading: "Reading") -> None:
    import msgspec

    from benchctl.report.documents import show_document

    print(msgspec.json.format(msgspec.json.encode(show_document(reading)), indent=1).decode())


def _print_tables(reading: "Reading") -> None:
    from rich.console import Console

    from benchctl.report.tables import (
        breakdown_table,
        cells_table,
        findings_lines,
        flops_table,
        footnote_lines,
        headline,
        runs_table,
        sweep_table,
    )

    console = Console(highlight=False, markup=False, soft_wrap=True, width=TABLE_WIDTH)
    console.print(headline(reading))
    tables = (runs_table, cells_table, breakdown_table, flops_table, sweep_table)
    for table in (draw(reading) for draw in tables):
        if table is not None:
            console.print()
            console.print(table)
    for title, lines in (("What follows", findings_lines(reading)), ("Notes", footnote_lines(reading))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(line)
