"""The table of commands."""

from typing import Annotated

import typer

from benchctl import __version__
from benchctl.cli import micro
from benchctl.cli.commands import (
    compare,
    data,
    doctor,
    export,
    flops,
    import_results,
    list_results,
    load,
    models,
    noise,
    profiles,
    reference,
    report,
    run,
    show,
    simulate,
    simulate_sweep,
    steptime,
    verify,
    workloads,
)
from benchctl.cli.micro import bonus, forward, roofline
from benchctl.cli.speculation import speculation

app = typer.Typer(
    name="benchctl",
    help="What does a change to the decode path of an LLM server cost, where does the cost sit, and is it real?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"benchctl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


app.command("run")(run.run)
app.command("load")(load.load)
app.command("compare")(compare.compare)
app.command("show")(show.show)
app.command("list")(list_results.list_results)
app.command("verify")(verify.verify)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("flops")(flops.flops)
app.command("speculation")(speculation.speculation)
app.command("doctor")(doctor.doctor)
app.command("reference")(reference.reference)
simulate.app.command("sweep")(simulate_sweep.sweep)
app.add_typer(simulate.app, name="simulate")
app.add_typer(profiles.app, name="profiles")
app.add_typer(workloads.app, name="workloads")
app.add_typer(data.app, name="data")
app.add_typer(noise.app, name="noise")
app.add_typer(models.app, name="models")
micro.app.command("forward")(forward.forward)
micro.app.command("bonus")(bonus.bonus)
micro.app.command("roofline")(roofline.roofline)
app.add_typer(micro.app, name="micro")
app.add_typer(steptime.app, name="steptime")
app.add_typer(import_results.app, name="import")
