"""``benchctl show``: the contents of a result directory as tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.cli.output.screen import print_json, uncollected
from benchctl.errors import RecordError

if TYPE_CHECKING:
    from benchctl.analysis.analyzed import AnalyzedExperiment


@uncollected()
def show(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Result directory, finished or not, or an archive.", autocompletion=complete_results
        ),
    ],
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="Include suspect runs in means and ratios.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Show runs, cells, the breakdown of a step, the cost against the baseline, and findings.

    Damaged files are named on stderr, with exit code 4 after everything readable has been shown.
    """
    from benchctl.analysis.analyzed import analyze_directory

    analysis = analyze_directory(results, allow_suspect=allow_suspect)
    if as_json:
        from benchctl.report.documents.experiment import show_document

        print_json(show_document(analysis))
    else:
        _print_tables(analysis)
    if analysis.damage:
        raise RecordError("\n".join(analysis.damage))


def _print_tables(analysis: "AnalyzedExperiment") -> None:
    from benchctl.cli.output.screen import in_one_row, print_notes, wide_console
    from benchctl.report.text.acceptance_table import acceptance_table
    from benchctl.report.text.client_table import client_table
    from benchctl.report.text.floor_table import floor_table
    from benchctl.report.text.ladder_table import ladder_table
    from benchctl.report.text.node_table import nodes_table
    from benchctl.report.text.passes_table import launch_table, passes_table
    from benchctl.report.text.tables import (
        breakdown_table,
        cells_table,
        flops_table,
        headline,
        runs_table,
        sweep_table,
    )

    console = wide_console()
    console.print(headline(analysis))
    tables = (
        runs_table,
        cells_table,
        passes_table,
        launch_table,
        acceptance_table,
        breakdown_table,
        flops_table,
        sweep_table,
        floor_table,
        nodes_table,
        ladder_table,
        client_table,
    )
    for table in (draw(analysis) for draw in tables):
        if table is not None:
            console.print()
            console.print(in_one_row(table))
    print_notes(console, analysis)
