"""Both ways of backfill on the screen, beside the published numbers."""

from typing import TYPE_CHECKING

from benchctl.analysis.bonus.published import SOURCE
from benchctl.analysis.bonus.sentences import (
    context_in_words,
    modes_in_words,
    published_limits,
    verdict_sentences,
)
from benchctl.report.text.bonus_table import bonus_table, cost_text

if TYPE_CHECKING:
    from rich.console import Console

    from benchctl.analysis.bonus.results import MeasuredBonus


def print_bonus(measured: "MeasuredBonus") -> None:
    """Print a table for each context and pair of modes, what follows, and the published numbers."""
    from benchctl.cli.output.screen import wide_console

    console = wide_console()
    for design, verdict in measured.verdicts:
        console.print(f"{measured.where}, {context_in_words(design)}; ms")
        for modes in verdict.mode_pairs:
            console.print()
            console.print(modes_in_words(*modes), style="bold")
            console.print(bonus_table(verdict, modes))
        console.print()
        for sentence in verdict_sentences(verdict):
            console.print(f"* {sentence}")
        console.print()
    for sentence in measured.missing:
        console.print(f"* {sentence}")
    _print_published(console, measured)


def _print_published(console: "Console", measured: "MeasuredBonus") -> None:
    from rich.table import Table

    console.print(
        f"Published ({SOURCE}) beside the same passes here; another device, so only signs and shares compare"
    )
    table = Table(box=None, pad_edge=False)
    for head in ("pass", "batch", "published, ms", "here, ms"):
        table.add_column(head, justify="left" if head == "pass" else "right", no_wrap=True)
    for each in measured.published:
        table.add_row(
            f"{each.phase} {each.mode}", str(each.batch_size), f"{each.published_ms:.2f}", cost_text(each.cost)
        )
    console.print(table)
    console.print("What the published numbers could not show:")
    for sentence in published_limits():
        console.print(f"* {sentence}")
