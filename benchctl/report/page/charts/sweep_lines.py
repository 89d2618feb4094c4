"""How the cells of a sweep become lines: one factor along the axis, a line for each value of the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.summary.sweep import SweepRow
from benchctl.records.directory import arm_label, cell_name
from benchctl.report.page.charts.chart import Trace, axis, color, dash

_MAX_TICKS: Final = 12
_MAX_UPRIGHT: Final = 4
"""The names of more cells do not stand side by side on a phone."""
_LOG_FROM: Final = 10.0
"""A factor whose largest value is this many times the smallest stands on a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The rows of one variant that differ in the factor alone, in its order."""

    label: str
    color: str
    dash: str
    rows: tuple[SweepRow, ...]
    x: tuple[float | str, ...]


def swept_factor(rows: Sequence[SweepRow]) -> str | None:
    """The numeric factor with the most values, the first of equals; None where none has two."""
    values = {name: {row.cell.get(name) for row in rows} for row in rows for name in row.cell}
    numeric = {name: found for name, found in values.items() if len(found) > 1 and all(map(_is_number, found))}
    return max(numeric, key=lambda name: len(numeric[name]), default=None)


def lines_of(rows: Sequence[SweepRow], factor: str | None) -> tuple[Line, ...]:
    """A line for each variant and each combination of the other factors; without a factor, one for each variant."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        others = {name: value for name, value in row.cell.items() if factor is not None and name != factor}
        groups.setdefault(arm_label(row.variant, others), []).append(row)
    found = []
    for i, (label, group) in enumerate(groups.items(), start=1):
        ordered = group if factor is None else sorted(group, key=lambda row: _number(row.cell[factor]))
        x = [_cell_lines(row) if factor is None else _number(row.cell[factor]) for row in ordered]
        found.append(Line(label=label, color=color(i), dash=dash(i), rows=tuple(ordered), x=tuple(x)))
    return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no value of a numeric factor")
    return float(value)


def _cell_lines(row: SweepRow) -> str:
    """The cell as the label of a tick: the bare value where there is but one factor."""
    values = [str(value) for value in row.cell.values()]
    return values[0] if len(values) == 1 else "<br>".join(cell_name(row.cell).split(", "))


def x_axis(rows: Sequence[SweepRow], factor: str | None) -> Trace:
    """The factor at its values, logarithmic where they span much; without one, the cells side by side."""
    if factor is None:
        return axis(" and ".join(rows[0].cell), type="category", tickangle=0 if len(rows) <= _MAX_UPRIGHT else None)
    values = sorted({_number(row.cell[factor]) for row in rows})
    is_log = values[0] > 0 and values[-1] / values[0] >= _LOG_FROM
    few = {"tickvals": values, "ticktext": [f"{value:g}" for value in values]} if len(values) <= _MAX_TICKS else {}
    return axis(factor, type="log" if is_log else "linear", **few)
