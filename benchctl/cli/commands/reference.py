"""``benchctl reference``: print a reference page, generated from the installed version."""

from enum import StrEnum
from typing import Annotated

import typer


class Topic(StrEnum):
    """Pages of the reference, as in ``docs/reference``."""

    COMMANDS = "commands"
    METRICS = "metrics"
    PROFILE = "profile"
    RESULT_FORMAT = "result-format"


def reference(
    topic: Annotated[Topic, typer.Argument(help="The page to print.")],
) -> None:
    """Print a reference page as Markdown: commands, metrics, profile keys, warnings, or the result directory."""
    from benchctl.cli.reference import TOPICS

    print(TOPICS[topic](), end="")
