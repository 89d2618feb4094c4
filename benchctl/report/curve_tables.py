"""The curves over the load as a table, as lines about their knees, and as the values of files."""

from collections.abc import Iterator
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.columns import Value
from benchctl.analysis.experiment.curves import Curve, knee_ratio
from benchctl.analysis.experiment.pairing import is_reference
from benchctl.analysis.metrics.table import LATENCIES
from benchctl.report.table import Column, Table
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import percentage, percentage_change, range_of, short_number

_TITLES: Final = {
    "throughput": "output tokens/s",
    "ttft": "TTFT, ms",
    "tpot": "TPOT, ms",
    "speed": "output tokens/s of one user",
    "e2el": "E2EL, ms",
}


def quantity_title(quantity: str, curve: Curve) -> str:
    """The name of a quantity with its unit: ``p99 TTFT, ms``."""
    statistic = "p99 " if "p99" in curve.metrics[quantity] else "mean "
    return f"{statistic if quantity in LATENCIES else ''}{_TITLES[quantity]}"


def curves_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every size of every curve; None where no load was swept."""
    if not (curves := analysis.curves):
        return None
    quantities = {name: quantity_title(name, curves[0]) for name in curves[0].metrics}
    columns = (
        Column("arm", "arm", is_left=True),
        Column("workload", "workload", is_left=True),
        Column("size", curves[0].unit, "{:g}".format),
        *(Column(name, title, _with_interval, is_extra=name == "e2el") for name, title in quantities.items()),
    )
    rows = (
        {"arm": curve.label, "workload": curve.workload, "size": size, **levels}
        for curve in curves
        for size, levels in curve.levels.items()
    )
    blocks = range_of([len(cell.runs) for curve in curves for cell in curve.cells.values()])
    title = f"Over the load: centres of {blocks} blocks with {percentage(curves[0].confidence)} intervals"
    return Table(title, columns, tuple(rows))


def _with_interval(estimate: Estimate) -> str:
    ends = [short_number(end) for end in (estimate.low, estimate.high) if end is not None]
    return short_number(estimate.value) + (f" [{', '.join(ends)}]" if ends else "")


def knee_lines(analysis: AnalyzedExperiment) -> list[str]:
    """The knee of each curve, that of another arm against the baseline's; or the reason why there is none."""
    return [
        f"{f'{curve.label} {curve.workload}'.rstrip()}: {_knee_text(curve, analysis)}" for curve in analysis.curves
    ]


def _knee_text(curve: Curve, analysis: AnalyzedExperiment) -> str:
    if isinstance(curve.knee, str):
        return f"no knee, {curve.knee}; add such loads to sweep.{curve.factor}"
    tokens = short_number(curve.at(curve.knee.value)["throughput"])
    text = f"{_with_interval(curve.knee)} {curve.unit}, {tokens} output tokens/s"
    reference = next((other for other in analysis.curves if _is_reference(other, curve, analysis)), None)
    if reference is None or (ratio := knee_ratio(reference, curve)) is None:
        return text
    estimate = ratio.estimate
    change, *ends = (
        percentage_change(each - 1) for each in (estimate.ratio, estimate.ci_low, estimate.ci_high) if each
    )
    return f"{text}; {change} [{', '.join(ends)}] against {reference.label}".replace(" []", "")


def _is_reference(other: Curve, curve: Curve, analysis: AnalyzedExperiment) -> bool:
    """True for the baseline's curve that another arm is compared with."""
    pairs = ((a, b) for a in other.cells.values() for b in curve.cells.values() if other is not curve)
    baseline = analysis.results.manifest.baseline
    return any(a.variant == baseline and is_reference(a.cell, b.cell) for a, b in pairs)


def curve_rows(curve: Curve) -> Iterator[dict[str, Value]]:
    """One for each size, with quantities and the knee as centre and interval."""
    knee = None if isinstance(curve.knee, str) else curve.knee
    for size, levels in curve.levels.items():
        yield {
            "arm": curve.label,
            "workload": curve.workload,
            "factor": curve.factor,
            "size": size,
            "n_blocks": len(curve.blocks(size, "throughput")),
            **{
                f"{name}{end}": getattr(estimate, key, None)
                for name, estimate in {**levels, "knee": knee}.items()
                for key, end in (("value", ""), ("low", "_ci_low"), ("high", "_ci_high"))
            },
            "no_knee": curve.knee if isinstance(curve.knee, str) else None,
        }


def curve_document(curve: Curve) -> dict[str, Any]:
    """A curve in ``summary.json``: the metrics of its quantities, its sizes, and the knee of each block."""
    knees = [{"block": block, "knee": knee} for block, knee in curve.knees.items()]
    return {"metrics": dict(curve.metrics), "points": list(curve_rows(curve)), "knees": knees}
