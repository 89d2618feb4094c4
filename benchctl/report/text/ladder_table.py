"""The ladders of controls as a table: what each step costs, and that the steps make up the whole."""

from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.ladder import Difference, Price
from benchctl.formats import UNKNOWN
from benchctl.report.text.plain_table import plain_table

_COLUMNS: Final = {"wall s": "wall_s", "step ms": "step_ms"}


def ladder_table(analysis: AnalyzedExperiment) -> Table | None:
    """Differences of neighbours, ± half of the 95 % interval over blocks; None where nothing has controls."""
    if not analysis.ladders:
        return None
    title = "Ladder of controls: what each step adds to the one before it, ± half of the 95 % interval over blocks"
    columns = ("blocks", *(f"{name}{suffix}" for name in _COLUMNS for suffix in ("", ", share")))
    table = plain_table(title, ("cell", "price of", "step"), columns)
    for ladder in analysis.ladders:
        for i, price in enumerate((*ladder.prices, ladder.whole)):
            step = f"{price.lower} > {price.upper}"
            table.add_row(ladder.label if i == 0 else "", price.what, step, *_numbers(price, ladder.whole))
    return table


def _numbers(price: Price, whole: Price) -> list[str]:
    blocks = max((difference.num_blocks for difference in price.differences.values()), default=0)
    cells = [str(blocks)]
    for name in _COLUMNS.values():
        difference, total = price.differences.get(name), whole.differences.get(name)
        cells += [_amount(difference), _share(difference, total)]
    return cells


def _amount(difference: Difference | None) -> str:
    if difference is None:
        return UNKNOWN
    interval = "" if difference.half_width is None else f" ± {difference.half_width:.2g}"
    return f"{difference.mean:+.4g}{interval}"


def _share(difference: Difference | None, whole: Difference | None) -> str:
    """Part of the whole, where the whole is more than its own scatter."""
    if difference is None or whole is None or abs(whole.mean) <= (whole.half_width or 0.0):
        return UNKNOWN
    return f"{difference.mean / whole.mean:.0%}"
