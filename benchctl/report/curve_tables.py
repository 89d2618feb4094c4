"""The curves over the load as a table, as lines about their knees, and as the values of files."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.columns import Value
from benchctl.analysis.experiment.curves import Curve
from benchctl.report.table import Column, Table
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import percentage, range_of, short_number

TITLES: Final = {
    "throughput": "output tokens/s",
    "ttft": "mean TTFT, ms",
    "tpot": "mean TPOT, ms",
    "speed": "output tokens/s of one user",
    "e2el": "mean E2EL, ms",
}
"""The quantities of a curve with their units."""


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
    return [f"{curve.label}: {_knee_text(curve)}" for curve in analysis.curves]


def _knee_text(curve: Curve) -> str:
    if isinstance(curve.knee, str):
        return f"no knee, {curve.knee}"
    tokens = short_number(curve.at(curve.knee.value, "throughput"))
    return f"{_with_interval(curve.knee)} {curve.unit}, {tokens} output tokens/s"


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


def curve_document(curve: Curve) -> dict[str, Any]:
    """A curve in ``summary.json``: the metrics of its quantities, its sizes, and the knee of each block."""
    knees = [{"block": block, "knee": knee} for block, knee in curve.knees.items()]
    return {"metrics": curve.metrics, "points": list(curve_rows(curve)), "knees": knees}
