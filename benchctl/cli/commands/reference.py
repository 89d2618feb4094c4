"""``benchctl reference``: print a page of ``docs/reference``, generated from the code that it describes."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final

import typer.main

_METRICS_INTRODUCTION: Final = """\
# Metrics

Every derived number, from `benchctl/analysis/metrics/table.py`. *Better* is the direction that counts as an
improvement; a dash means that neither does. A metric whose needs are not met is unknown (absent), never 0.

Durations that the client saw are multiplied by `time_scale` if the engine's clock is virtual, so that they
compare with its steps; `client_wall_s`, `ready_s` and `warmup_s` are not.

| metric | unit | formula | better | needs |
|---|---|---|---|---|
"""


class Topic(StrEnum):
    """Pages of the reference, as in ``docs/reference``."""

    COMMANDS = "commands"
    METRICS = "metrics"
    PROFILE = "profile"
    RESULT_FORMAT = "result-format"
    WARNINGS = "warnings"


def reference(topic: Annotated[Topic, typer.Argument(help="The page to print.")]) -> None:
    """Print a reference page as Markdown: commands, metrics, profile keys, warnings, or the result directory."""
    print(reference_page(topic), end="")


def reference_page(topic: Topic) -> str:
    """The text of a page of ``docs/reference``."""
    from benchctl.profile.reference import profile_reference
    from benchctl.records.reference import result_format_reference
    from benchctl.records.warning_codes import warnings_reference

    pages = {
        Topic.COMMANDS: command_reference,
        Topic.METRICS: metrics_reference,
        Topic.PROFILE: profile_reference,
        Topic.RESULT_FORMAT: result_format_reference,
        Topic.WARNINGS: warnings_reference,
    }
    return pages[topic]()


def command_reference() -> str:
    """Every command with its arguments and options, as ``--help`` prints them."""
    from benchctl.cli.app import app

    introduction = "# Commands\n\nWhat `benchctl COMMAND --help` prints, on one page.\n"
    return "\n".join([introduction, *_command_sections(typer.main.get_command(app), "benchctl")])


def _command_sections(command: Any, path: str) -> Iterator[str]:  # a click class, vendored by newer typer
    if hasattr(command, "commands"):
        for name, nested in sorted(command.commands.items()):
            yield from _command_sections(nested, f"{path} {name}")
        return
    context = typer.Context(command, info_name=path)
    usage = " ".join(["benchctl", *path.split()[1:], *command.collect_usage_pieces(context)])
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in filter(None, records)]
    yield f"## {path}\n"
    yield f"    {usage}\n"
    yield "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")) + "\n"
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def metrics_reference() -> str:
    """Every metric with unit, formula, better direction and needs."""
    from benchctl.analysis.metrics.table import METRICS

    rows = []
    for metric in METRICS.values():
        better = "-" if metric.direction == "none" else metric.direction
        rows.append(f"| `{metric.name}` | {metric.unit} | {_cell(metric.formula)} | {better} | {metric.needs} |")
    return _METRICS_INTRODUCTION + "\n".join(rows) + "\n"
