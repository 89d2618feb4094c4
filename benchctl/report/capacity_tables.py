"""Capacities as a table with notes, as a document, and as rows of CSV."""

from collections.abc import Iterator
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.capacity import ArmCapacity, censored_text
from benchctl.profile.sizes import capacity_text
from benchctl.report.table import Column, Table
from benchctl.units import percentage, three_digits

CAPACITY_COLUMNS: Final = ("arm", "block", "size", "holds", "breaks", "is_between", "elasticity")
_LEAST_ELASTICITY: Final = 0.5
"""Below it a scatter in latency is more than twice as large in the capacity."""


def capacity_table(analysis: AnalyzedExperiment) -> Table | None:
    """The capacity of each arm with its interval; None where the profile asks for none."""
    profile = analysis.profile
    if profile is None or profile.slo is None or not analysis.capacities:
        return None
    columns = (
        Column("arm", "arm", is_left=True),
        Column("level", "capacity", three_digits),
        Column("interval", "95% interval", lambda ends: f"{three_digits(ends[0])} to {three_digits(ends[1])}"),
        Column("scatter", "servers scatter", lambda frac: percentage(frac, 2)),
        Column("blocks", "blocks"),
        Column("elasticity", "elasticity", lambda number: f"{number:.2f}"),
    )
    rows = tuple(
        {
            "arm": arm.label,
            "level": arm.level,
            "interval": arm.interval,
            "scatter": arm.scatter_frac,
            "blocks": len(arm.blocks),
            "elasticity": arm.elasticity,
        }
        for arm in analysis.capacities
    )
    return Table(f"Capacity: {capacity_text(profile)}", columns, rows)


def capacity_lines(analysis: AnalyzedExperiment) -> list[str]:
    """Limits of the capacities: censored blocks, overload between two sizes, a latency that hardly rises."""
    lines = [line for arm in analysis.capacities for line in _lines_of(arm)]
    if any(arm.level is not None for arm in analysis.capacities):
        lines.append(
            "levels are those of these requests, which another seed changes; the ratio less, whose sides share them"
        )
    return lines


def _lines_of(arm: ArmCapacity) -> Iterator[str]:
    if (censored := censored_text(arm.label, arm.blocks)) is not None:
        yield censored
    for block, each in arm.blocks.items():
        if each.crossing.is_between:
            ends = f"{each.crossing.holds:g} and {each.crossing.breaks:g}"
            yield f"{arm.label}, block {block}: between {ends}, where a backlog grows"
    if arm.elasticity is not None and arm.elasticity < _LEAST_ELASTICITY:
        yield (
            f"{arm.label}: latency rises by {arm.elasticity:.2g}% for 1% of load, so 1% of scatter in latency is "
            f"{three_digits(1 / arm.elasticity)}% of capacity; an objective on ttft, or goodput, is known better"
        )


def capacity_document(arm: ArmCapacity) -> dict[str, Any]:
    """An arm with its blocks; sizes in the unit of the metric, of these requests."""
    return {
        "arm": arm.label,
        "level": arm.level,
        "interval": arm.interval,
        "scatter_frac": arm.scatter_frac,
        "elasticity": arm.elasticity,
        "of": "these requests",
        "blocks": [
            {**row, "why_censored": each.why_censored, "points": [point._asdict() for point in each.points]}
            for row, each in zip(capacity_rows(arm), arm.blocks.values(), strict=True)
        ],
    }


def capacity_rows(arm: ArmCapacity) -> list[dict[str, Any]]:
    """A row of ``CAPACITY_COLUMNS`` for each block."""
    return [
        {
            "arm": arm.label,
            "block": block,
            "size": each.size,
            "holds": each.crossing.holds,
            "breaks": each.crossing.breaks,
            "is_between": each.crossing.is_between,
            "elasticity": each.crossing.elasticity,
        }
        for block, each in arm.blocks.items()
    ]
