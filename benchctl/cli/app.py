"""The table of commands."""

from typing import Annotated, Final

import typer

from benchctl import __version__
from benchctl.cli.cluster import watch
from benchctl.cli.commands import (
    compare,
    data,
    flops,
    load,
    micro,
    models,
    noise,
    profiles,
    reference,
    run,
    show,
    simulate,
    steptime,
    workloads,
)
from benchctl.cli.commands import micro as roofline
from benchctl.cli.commands import results as export
from benchctl.cli.commands import results as import_results
from benchctl.cli.commands import results as list_results
from benchctl.cli.commands import results as pull
from benchctl.cli.commands import results as report
from benchctl.cli.commands import setup as doctor
from benchctl.cli.commands import setup as engines
from benchctl.cli.commands import setup as init
from benchctl.cli.commands import show as verify
from benchctl.cli.commands import simulate as simulate_sweep
from benchctl.cli.commands.load import LoadCommand
from benchctl.cli.micro import bonus
from benchctl.cli.micro import bonus as forward
from benchctl.cli.speculation import speculation

app = typer.Typer(
    name="benchctl",
    help="What does a change to the decode path of an LLM server cost, where does the cost sit, and is it real?",
    no_args_is_help=True,
    epilog="First steps, each of which prints the next one:\n\n"
    "benchctl init mine --change flag --engine sim --value max_num_seqs=4\n\n"
    "Exit codes: 0 ok, 1 regression or failed gate, 2 usage or a limit of the machine, 3 inconclusive, 4 not "
    "comparable or invalid, 5 a run failed, 70 a mistake of benchctl, 130 interrupted.",
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


_SET_UP: Final = "Set up"
_MEASURE: Final = "Measure"
_JUDGE: Final = "Judge"
_EXPLAIN: Final = "Explain"

app.command("init", rich_help_panel=_SET_UP)(init.init)
app.command("doctor", rich_help_panel=_SET_UP)(doctor.doctor)
app.command("run", rich_help_panel=_MEASURE)(run.run)
app.command("watch", rich_help_panel=_MEASURE)(watch.watch)
app.command("load", cls=LoadCommand, rich_help_panel=_MEASURE)(load.load)
simulate.app.command("sweep")(simulate_sweep.sweep)
app.add_typer(simulate.app, name="simulate", rich_help_panel=_MEASURE)
micro.app.command("forward")(forward.forward)
micro.app.command("bonus")(bonus.bonus)
micro.app.command("roofline")(roofline.roofline)
app.add_typer(micro.app, name="micro", rich_help_panel=_MEASURE)

app.command("compare", rich_help_panel=_JUDGE)(compare.compare)
app.command("show", rich_help_panel=_JUDGE)(show.show)
app.command("list", rich_help_panel=_JUDGE)(list_results.list_results)
app.command("report", rich_help_panel=_JUDGE)(report.report)
app.add_typer(noise.app, name="noise", rich_help_panel=_JUDGE)
app.command("verify", rich_help_panel=_JUDGE)(verify.verify)
app.command("pull", rich_help_panel=_JUDGE)(pull.pull)
app.command("export", rich_help_panel=_JUDGE)(export.export)
app.add_typer(import_results.app, name="import", rich_help_panel=_JUDGE)

app.add_typer(steptime.app, name="steptime", rich_help_panel=_EXPLAIN)
app.command("speculation", rich_help_panel=_EXPLAIN)(speculation.speculation)
app.command("flops", rich_help_panel=_EXPLAIN)(flops.flops)
app.add_typer(workloads.app, name="workloads", rich_help_panel=_EXPLAIN)
app.command("reference", rich_help_panel=_EXPLAIN)(reference.reference)

app.add_typer(profiles.app, name="profiles", rich_help_panel=_SET_UP)
app.add_typer(engines.app, name="engines", rich_help_panel=_SET_UP)
app.add_typer(models.app, name="models", rich_help_panel=_SET_UP)
app.add_typer(data.app, name="data", rich_help_panel=_SET_UP)
