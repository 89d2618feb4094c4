"""``benchctl import``: results that another project measured, as a result directory."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchctl.interop.lenvm.imported import ImportResult

app = typer.Typer(help="Turn results of other projects into result directories.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """One command for each kind of foreign results."""


@app.command("lenvm")
def lenvm(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What the LenVM timing scripts wrote: baseline.meta.json and beside it."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The result directory to make.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The served model, where the name of DIR does not say it.")
    ] = None,
    value_model: Annotated[
        str | None, typer.Option("--value-model", help="The value model, where the name of DIR does not say it.")
    ] = None,
) -> None:
    """Import one run of each arm as one block, with what cannot be trusted of it.

    Usage is counted once for each request; of several lives of a server those count that answered; what cannot be
    read is left out and told. 'benchctl show', 'report' and 'compare' read the result; lenvm_summary.csv in it has
    the project's own columns. One block is a screening: a comparison of it ends with 3.
    """
    from benchctl.interop.lenvm.imported import import_lenvm

    argv = ("benchctl", *sys.argv[1:])
    _tell(import_lenvm(source, output, model=model, value_model=value_model, argv=argv))


def _tell(result: "ImportResult") -> None:
    from benchctl.interop.lenvm.doubts import REPAIRS
    from benchctl.interop.lenvm.summary import SUMMARY_NAME

    faults = [warning for warning in result.warnings if warning.code in REPAIRS]
    limits = [warning for warning in result.warnings if warning.code not in REPAIRS]
    for title, warnings in (("mended or left out", faults), ("to bear in mind", limits)):
        if warnings:
            print(f"{title}:")
        for warning in warnings:
            print(f"  {warning.code}: {warning.message}" + (f" ({warning.where})" if warning.where else ""))
    for run in result.runs:
        reasons = "".join(f"\n  {warning.code}: {warning.message}" for warning in run.warnings)
        print(f"{run.run_id}: {run.state}{reasons}")
    print(f"results in {result.path}")
    print(f"their columns: {result.path / SUMMARY_NAME}")
