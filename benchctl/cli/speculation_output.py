"""Tables and sentences of ``benchctl speculation``."""

from typing import TYPE_CHECKING

from benchctl.cli.screen import wide_console

if TYPE_CHECKING:
    from benchctl.steptime.speculation.draft_length import SpeculationLaw
    from benchctl.steptime.speculation.served import ServedSpeculation


def print_speculation(law: "SpeculationLaw", served: "ServedSpeculation | None") -> None:
    """Print the law and, of a server, its goodput by batch and its latency by rate."""
    from benchctl.report.text.speculation import batch_lines, batch_table, law_lines, law_table, rate_table

    console = wide_console()
    console.print(law_table(law))
    for line in law_lines(law):
        console.print(line)
    if served is None:
        return
    console.print()
    console.print(batch_table(served))
    for line in batch_lines(served):
        console.print(line)
    if served.rates:
        console.print()
        console.print(rate_table(served))
