"""Tables, sentences and picture of ``benchctl speculation``."""

from dataclasses import dataclass
from pathlib import Path

from benchctl.analysis.drafts import MeasuredSpeculation
from benchctl.cli.screen import print_json, wide_console
from benchctl.formats import capitalized
from benchctl.records.schema import ResultWarning
from benchctl.report.charts.figure import picture_bytes
from benchctl.report.charts.models import draw_speculation
from benchctl.report.model_documents import speculation_document
from benchctl.report.tables.models import (
    acceptance_words,
    batch_lines,
    batch_table,
    law_lines,
    law_table,
    measured_lines,
    measured_table,
    rate_table,
)
from benchctl.steptime.speculation.draft_length import SpeculationLaw
from benchctl.steptime.speculation.served import ServedSpeculation


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationAnswer:
    """The law, with the load of a server and the measurement where they were asked for."""

    law: SpeculationLaw
    served: ServedSpeculation | None
    measured: MeasuredSpeculation | None
    warnings: tuple[ResultWarning, ...] = ()


def show_answer(answer: SpeculationAnswer, picture: Path | None, *, as_json: bool) -> None:
    """Print the answer as tables or as one JSON document, and write the picture where one is asked for."""
    if as_json:
        print_json(speculation_document(answer.law, answer.served, answer.measured, answer.warnings))
    else:
        print_answer(answer)
    if picture is not None:
        draw_answer(picture, answer)
        if not as_json:
            print(f"picture: {picture}")


def print_answer(answer: SpeculationAnswer) -> None:
    """Print the measurement, the law and, of a server, its goodput by batch and its latency by rate."""
    console = wide_console()
    if answer.measured is not None:
        console.print(measured_table(answer.measured))
        for line in measured_lines(answer.measured):
            console.print(line)
        console.print()
    console.print(law_table(answer.law))
    for line in law_lines(answer.law):
        console.print(line)
    if answer.served is not None:
        _print_served(answer.served)
    for warning in answer.warnings:
        print(f"warning: {warning.message}")


def _print_served(served: ServedSpeculation) -> None:

    console = wide_console()
    console.print()
    console.print(batch_table(served))
    for line in batch_lines(served):
        console.print(line)
    if served.rates:
        console.print()
        console.print(rate_table(served))


def draw_answer(path: Path, answer: SpeculationAnswer) -> None:
    """Write the picture, whose title names the acceptance and the origin of step times."""
    words = capitalized(acceptance_words(answer.law.acceptance))
    title = words if answer.served is None else f"{words}; {answer.served.origin}"
    spec = draw_speculation(answer.law, answer.served, answer.measured)
    path.write_bytes(picture_bytes(spec, title, suffix=path.suffix))
