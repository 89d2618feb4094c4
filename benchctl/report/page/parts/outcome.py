"""What the other side answers: is it as good, and is it the same text?"""

from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.quality.text import divergence_sentence, quality_lines
from benchctl.formats import capitalized, minus_in_numbers
from benchctl.report.page.html import Html, el, join
from benchctl.report.page.parts.icon import badge


def outcome(comparison: Comparison) -> Html | None:
    """Quality and divergence of every cell; None where neither is known and nothing is to be said of that."""
    shown = [part for cell in comparison.cells if (part := _cell(cell)) is not None]
    notes = dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note)
    if not shown and not notes:
        return None
    return join(*shown, *(el("p", f"Answers are not judged: {note}", class_="quiet") for note in notes))


def _cell(cell: CellComparison) -> Html | None:
    said: list[str | Html] = []
    title: list[str | Html] = [el("b", cell.label)]
    if cell.quality is not None:
        title += [" ", badge(cell.quality.verdict)]
        title += [] if cell.is_quality_deciding else [el("small", " decides nothing: no margin of quality was set")]
        said += [capitalized(minus_in_numbers(line)) for line in quality_lines(cell.quality)]
    if cell.divergence is not None:
        said.append(capitalized(divergence_sentence(cell.divergence)))
    if not said:
        return None
    return el(
        "div", el("p", *title), el("ul", *(el("li", line) for line in said), class_="notes"), class_="outcome"
    )
