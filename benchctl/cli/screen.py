"""What several commands print in the same way."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from benchctl.report.reading import Reading

TABLE_WIDTH: Final = 1000
"""No table is cut, whatever the terminal's width: numbers without their last digits would mislead."""


def wide_console() -> "Console":
    """Standard output for tables and sentences, as they are: nothing is cut, wrapped or taken for markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True, width=TABLE_WIDTH)


def print_notes(console: "Console", reading: "Reading") -> None:
    """What follows from a result directory, and what is to be doubted, each under its title."""
    from benchctl.report.tables import findings_lines, footnote_lines

    for title, lines in (("What follows", findings_lines(reading)), ("Notes", footnote_lines(reading))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(line)
