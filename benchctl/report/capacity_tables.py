"""Capacities as a table with notes, and as a document."""

from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.capacity import ArmCapacity
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.estimate import scatter_of
from benchctl.profile.sizes import capacity_text
from benchctl.report.table import Column, Table
from benchctl.units import percentage, three_digits

_LEAST_ELASTICITY: Final = 0.5
"""Below it a scatter in latency is more than twice as large in the capacity."""


def capacity_table(analysis: AnalyzedExperiment) -> Table | None:
    """The capacity of each arm with its interval; None where the profile asks for none."""
    if analysis.profile is None or not analysis.capacities:
        return None
    columns = (
        Column("arm", "arm", is_left=True),
        Column("level", "capacity", three_digits),
        Column("interval", "95% interval", lambda ends: f"{three_digits(ends[0])} to {three_digits(ends[1])}"),
        Column("scatter_frac", "servers scatter", lambda frac: percentage(frac, 2)),
        Column("blocks", "blocks", lambda blocks: str(len(blocks))),
        Column("elasticity", "elasticity", lambda number: f"{number:.2f}"),
    )
    title = f"Capacity: {capacity_text(analysis.profile)}"
    return Table(title, columns, tuple(map(capacity_document, analysis.capacities)))


def capacity_lines(analysis: AnalyzedExperiment) -> list[str]:
    """Limits of the capacities: censored blocks, overload between two sizes, a latency that hardly rises."""
    lines = [limit for arm in analysis.capacities for limit in arm.limits]
    lines += [
        f"{arm.arm.label}: latency rises by {arm.elasticity:.2g}% for 1% of load, so 1% of scatter in latency is "
        f"{three_digits(1 / arm.elasticity)}% of capacity; an objective on ttft, or goodput, is known better"
        for arm in analysis.capacities
        if arm.elasticity is not None and arm.elasticity < _LEAST_ELASTICITY
    ]
    if any(arm.level is not None for arm in analysis.capacities):
        lines.append(
            "levels are those of these requests, which another seed changes; the ratio less, whose sides share them"
        )
    return lines


def capacity_document(arm: ArmCapacity) -> dict[str, Any]:
    """An arm with its blocks; sizes in the unit of the metric, of these requests."""
    return {
        "arm": arm.arm.label,
        "level": arm.level,
        "interval": arm.interval,
        "scatter_frac": scatter_of(known_values(arm.sizes)),
        "elasticity": arm.elasticity,
        "blocks": [
            {
                "block": block,
                **each.crossing._asdict(),
                "size": each.size,
                "limit": each.limit,
                "points": [point._asdict() for point in each.points],
            }
            for block, each in arm.blocks.items()
        ],
    }
