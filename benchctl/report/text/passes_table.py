"""Forward passes as tables: the time of one pass, and the cost of its launches. Times are in ms."""

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.passes import floor_peaks
from benchctl.formats import UNKNOWN, four_digits, three_digits
from benchctl.report.text.plain_table import plain_table


def passes_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every point in every mode; None where no pass was measured."""
    if analysis.passes is None or not analysis.passes.times:
        return None
    title = "Forward passes, ms: median with its 95 % interval over blocks, p5 to p95 of all replays"
    peaks = floor_peaks(analysis.passes, analysis.results, analysis.experiment.hardware)
    title += "" if peaks is None else f"\nFloor at the peaks of {peaks}"
    columns = ["blocks", "replays", "median", "interval", "p5", "p95", "floor", "times floor"]
    table = plain_table(title, ["pass"], columns)
    for times in analysis.passes.times:
        left_out = f" ({times.cell.num_unusable} left out)" if times.cell.num_unusable else ""
        table.add_row(
            times.cell.label,
            f"{len(times.cell.runs)}{left_out}",
            str(times.num_replays),
            four_digits(times.median_ms),
            interval_text(times.interval_ms),
            four_digits(times.p5_ms),
            four_digits(times.p95_ms),
            four_digits(times.floor_ms),
            UNKNOWN if times.times_floor is None else three_digits(times.times_floor),
        )
    return table


def launch_table(analysis: AnalyzedExperiment) -> Table | None:
    """The launch cost of every point; None where only one mode was measured."""
    if analysis.passes is None or not analysis.passes.launches:
        return None
    baseline = analysis.results.manifest.baseline
    title = f"Launch cost, ms: {baseline} less the other mode, with its 95 % interval over blocks"
    table = plain_table(
        title, ["pass"], ["blocks", baseline, "other", "less", "interval", "ratio", "operators", "µs each"]
    )
    for cost in analysis.passes.launches:
        numbers = (cost.baseline_ms, cost.other_ms, cost.saved_ms)
        table.add_row(
            cost.label,
            str(cost.num_blocks),
            *map(four_digits, numbers),
            interval_text(cost.interval_ms),
            three_digits(cost.ratio),
            UNKNOWN if cost.num_operators is None else str(cost.num_operators),
            UNKNOWN if cost.us_per_operator is None else three_digits(cost.us_per_operator),
        )
    return table


def interval_text(interval: Interval | None) -> str:
    """``[0.228, 0.231]``."""
    return UNKNOWN if interval is None else f"[{four_digits(interval[0])}, {four_digits(interval[1])}]"
