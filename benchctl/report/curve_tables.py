"""Curves over the load and capacities: as tables, as lines about knees and limits, and as values of files."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.capacity import ArmCapacity
from benchctl.analysis.experiment.columns import Value
from benchctl.analysis.experiment.curves import Curve
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.estimate import scatter_of
from benchctl.profile.sizes import capacity_text
from benchctl.report.table import Column, Table
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import percentage, range_of, short_number, three_digits

TITLES: Final = {
    "throughput": "output tokens/s",
    "ttft": "mean TTFT, ms",
    "tpot": "mean TPOT, ms",
    "speed": "output tokens/s of one user",
    "e2el": "mean E2EL, ms",
}
"""The quantities of a curve with their units."""
_LEAST_ELASTICITY: Final = 0.5
"""Below it a scatter in latency is more than twice as large in the capacity."""


def curves_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every size of every curve; None where no load was swept."""
    if not (curves := analysis.curves):
        return None
    columns = (
        Column("arm", "arm", is_left=True),
        Column("size", curves[0].unit, "{:g}".format),
        *(Column(name, title, _with_interval, is_extra=name == "e2el") for name, title in TITLES.items()),
    )
    rows = (
        {"arm": curve.label, "size": size, **levels} for curve in curves for size, levels in curve.levels.items()
    )
    title = f"Over the load: centres of {blocks_text(curves)} with {percentage(curves[0].confidence)} intervals"
    return Table(title, columns, tuple(rows))


def blocks_text(curves: Sequence[Curve]) -> str:
    """``6 blocks``, those of a point."""
    return f"{range_of([len(cell.runs) for curve in curves for cell in curve.cells.values()])} blocks"


def _with_interval(estimate: Estimate) -> str:
    ends = [short_number(end) for end in (estimate.low, estimate.high) if end is not None]
    return short_number(estimate.value) + (f" [{', '.join(ends)}]" if ends else "")


def knee_lines(analysis: AnalyzedExperiment) -> list[str]:
    """The knee of each curve, or the reason why there is none."""
    lines = []
    for curve in analysis.curves:
        text = f"no knee, {curve.knee}"
        if not isinstance(curve.knee, str):
            tokens = short_number(curve.at(curve.knee.value, "throughput"))
            text = f"{_with_interval(curve.knee)} {curve.unit}, {tokens} output tokens/s"
        lines.append(f"{curve.label}: {text}")
    return lines


def curve_rows(curve: Curve) -> Iterator[dict[str, Value]]:
    """One for each size, with quantities and the knee as centre and interval."""
    for size, levels in curve.levels.items():
        yield {
            "arm": curve.label,
            "factor": curve.factor,
            "size": size,
            "n_blocks": curve.cells[size].spreads[curve.metrics["throughput"]].n,
            **{
                f"{name}{end}": getattr(estimate, key, None)
                for name, estimate in {**levels, "knee": curve.knee}.items()
                for key, end in (("value", ""), ("low", "_ci_low"), ("high", "_ci_high"))
            },
            "no_knee": curve.knee if isinstance(curve.knee, str) else None,
        }


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
        f"{three_digits(1 / arm.elasticity)}% of capacity; an objective on ttft, or goodput, is more certain"
        for arm in analysis.capacities
        if arm.elasticity is not None and arm.elasticity < _LEAST_ELASTICITY
    ]
    if any(arm.level is not None for arm in analysis.capacities):
        lines.append(
            "capacities are those of these requests, and another seed changes them; their ratio changes less, "
            "because both arms get the same requests"
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
