"""The table of commands. The module of a command is imported when the command is called: ``--help`` stays fast."""

from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from benchctl import __version__


class Entry(NamedTuple):
    """A command, or a group of commands, as ``benchctl --help`` lists it."""

    panel: str
    target: str
    """Module below ``benchctl.cli``, and the name in it of a function, or of a Typer application for a group."""
    help: str
    """The first sentence of its own help."""


_SET_UP: Final = "Set up"
_MEASURE: Final = "Measure"
_JUDGE: Final = "Judge"
_EXPLAIN: Final = "Explain"

COMMANDS: Final[dict[str, Entry]] = {
    "init": Entry(
        _SET_UP,
        "commands.setup:init",
        "Write a profile that measures one change, and print the command that runs it.",
    ),
    "doctor": Entry(
        _SET_UP,
        "commands.setup:doctor",
        "Check this machine: processor, clock, disk space, GPUs, measured peaks, memory, engines, datasets, Slurm.",
    ),
    "run": Entry(
        _MEASURE,
        "commands.run:run",
        "Measure an experiment: every variant in every cell, in blocks, each run on a fresh server.",
    ),
    "watch": Entry(
        _MEASURE,
        "commands.watch:watch",
        "Show how far an experiment is: blocks, nodes, time left, and problems. It only reads files.",
    ),
    "load": Entry(
        _MEASURE, "commands.load:app", "Send a load to a running server and report latencies and throughput."
    ),
    "compare": Entry(
        _JUDGE,
        "commands.compare:compare",
        "Compare two sides block by block. The verdict is regression, improvement, equivalent or inconclusive.",
    ),
    "show": Entry(
        _JUDGE,
        "commands.results:show",
        "Show the verdict, the cost against the baseline, findings, notes, the breakdown of a step, and runs.",
    ),
    "list": Entry(
        _JUDGE,
        "commands.results:list_results",
        "List result directories, newest first, with profile, engine, state and the number of runs.",
    ),
    "report": Entry(
        _JUDGE,
        "commands.results:report",
        "Write report.html, summary and sweep (CSV, JSON), result.json of each finished run, and plots.",
    ),
    "verify": Entry(
        _JUDGE,
        "commands.results:verify",
        "Read every file of a result directory, and report alterations since the measurement.",
    ),
    "export": Entry(
        _JUDGE,
        "commands.results:export",
        "Write an archive, or each finished run in the format of another tool, one directory for each arm.",
    ),
    "speculation": Entry(
        _EXPLAIN,
        "commands.speculation:speculation",
        "Compute tokens per step, speed-up and goodput of speculative decoding.",
    ),
    "flops": Entry(
        _EXPLAIN,
        "commands.flops:flops",
        "Compute the FLOPs of a run from its numbers of tokens. The defaults are those of a published run.",
    ),
    "simulate": Entry(
        _MEASURE, "commands.simulate:app", "Simulate an experiment in virtual time, without servers and HTTP."
    ),
    "micro": Entry(
        _MEASURE,
        "commands.micro:app",
        "Measure single forward passes, and the peaks of a device, with torch and without a server.",
    ),
    "noise": Entry(
        _JUDGE, "commands.noise:app", "List, show and store noise floors of this machine, from A/A experiments."
    ),
    "import": Entry(
        _JUDGE, "commands.results:app", "Import archives and results of other projects as result directories."
    ),
    "steptime": Entry(
        _EXPLAIN,
        "commands.steptime:app",
        "Fit a model of step time to step logs, judge it on unseen runs, and predict with it.",
    ),
    "workloads": Entry(
        _EXPLAIN,
        "commands.workloads:app",
        "Calibration workloads and datasets: list, show, export; lint of other tools' loads.",
    ),
    "profiles": Entry(_SET_UP, "commands.profiles:app", "List, show and validate profiles."),
    "engines": Entry(
        _SET_UP, "commands.setup:engines", "Install engines, each into an environment of its own, and list them."
    ),
    "models": Entry(
        _SET_UP, "commands.models:app", "Make small models with random weights, to try real engines with."
    ),
    "data": Entry(_SET_UP, "commands.workloads:data", "List, fetch and verify dataset files."),
}


class Group(TyperGroup):
    """Lists its commands in sections, each with the whole first paragraph of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as of Typer
        """Write the sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            section = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(section, []).append((name, (command.help or "").partition("\n\n")[0]))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


class LazyGroup(Group):
    """Lists the commands of the table, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=entry.help, rich_help_panel=entry.panel)
            for name, entry in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that ``args`` begin with, and the other arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed if name is None else load_command(name), rest


def load_command(name: str) -> Any:
    """The command of that name, or the group, with its arguments and options."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = getattr(import_module(f"benchctl.cli.{module}"), attribute)
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(add_completion=False)
        command.command(name)(function)
    command.info.cls = Group
    command.rich_markup_mode = None
    return typer.main.get_command(command)


_NOT_ASKED: Final = {"help": False, "install_completion": False, "show_completion": False}
"""Typer's own flags where they are not given. Without it they are None, which Typer imports pydantic to read."""

app = typer.Typer(
    name="benchctl",
    cls=LazyGroup,
    help="What does a change to the decode path of an LLM server cost, where does the cost sit, and is it real?",
    no_args_is_help=True,
    epilog="First steps, each of which prints the next one:\n\n"
    "benchctl init mine --change flag --engine sim --value max_num_seqs=4\n\n"
    "Exit codes: 0 ok, 1 regression or failed gate, 2 usage or a limit of the machine, 3 inconclusive, 4 not "
    "comparable or invalid, 5 a run failed, 70 a mistake of benchctl, 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than all else of --help
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "default_map": {**_NOT_ASKED, "profiles": {**_NOT_ASKED, "list": _NOT_ASKED}},
    },
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
