"""``benchctl import``: archives, and results of another project, as result directories."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from benchctl.interop.lenvm.import_directory import ImportResult

_ALTERED: Final = 4

app = typer.Typer(help="Import archives and results of other projects as result directories.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """One command for each kind of foreign results."""


@app.command("archive")
def archive(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Archive that 'benchctl export DIR --archive FILE' wrote, or tar."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Result directory to create; by default results/<profile>/<name>.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a result directory of an archive, and verify it.

    Commands that read results take the archive itself; this is for those that continue an experiment. Exit code: 0
    intact, 4 altered since the measurement, or a damaged archive.
    """
    from benchctl.cli.options.experiment import RESULTS
    from benchctl.cli.output.verification import print_verification
    from benchctl.cluster.arrival import import_archive
    from benchctl.records.integrity.verification import verify_directory

    path = import_archive(source, output, RESULTS)
    verified = verify_directory(path, is_fresh=True)
    print(f"results in {path}")
    print_verification(path, verified)
    if verified.alterations:
        raise typer.Exit(_ALTERED)


@app.command("lenvm")
def lenvm(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Output of the LenVM timing scripts: baseline.meta.json and the other files."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Result directory to create.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The served model, if the name of DIR does not contain it.")
    ] = None,
    value_model: Annotated[
        str | None, typer.Option("--value-model", help="The value model, if the name of DIR does not contain it.")
    ] = None,
) -> None:
    """Import one run of each arm as one block, with warnings about unreliable data.

    Usage is counted once per request; of several starts of a server, those that answered count; unreadable lines
    are left out and reported. 'benchctl show', 'report' and 'compare' read the result; its lenvm_summary.csv has
    the columns of the project. One block is a screening: comparing it exits with 3.
    """
    from benchctl.interop.lenvm.import_directory import import_lenvm

    argv = ("benchctl", *sys.argv[1:])
    _tell(import_lenvm(source, output, model=model, value_model=value_model, argv=argv))


def _tell(result: "ImportResult") -> None:
    from benchctl.interop.lenvm.summary import SUMMARY_NAME
    from benchctl.interop.lenvm.warnings import REPAIRS

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
