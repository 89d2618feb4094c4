"""The floor of guided steps as a table: what guidance costs at the peaks of the device, beside what it did cost."""

from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.text import factor_interval
from benchctl.analysis.attribution.work_split import StepFloor
from benchctl.formats import signed_four_digits, signed_three_digits, three_digits
from benchctl.report.text.plain_table import plain_table
from benchctl.units import MS_PER_S

_CAUSES: Final = ("weights", "prefixes", "arithmetic", "sampling", "other work")


def floor_table(analysis: AnalyzedExperiment) -> Table | None:
    """Each guided arm against the baseline: measured ratio, that of the floors and its parts; None without any."""
    floors = {row.label: row.floor for row in analysis.sweep if isinstance(row.floor, StepFloor)}
    if not floors:
        return None
    devices = " and ".join(sorted({floor.hardware for floor in floors.values()}))
    title = (
        "Guided step over the baseline's, and the floor of that ratio: 1 plus what guidance adds with all bytes "
        f"and FLOPs at the peaks of {devices}"
    )
    columns = (
        "step time",
        "floor",
        *_CAUSES,
        "times floor",
        "adds ms",
        "floor adds ms",
        "baseline, times its floor",
    )
    table = plain_table(title, ["cell"], columns)
    for label, floor in floors.items():
        causes = (signed_three_digits(floor.causes[cause]) for cause in _CAUSES)
        added = (signed_four_digits(time_s * MS_PER_S) for time_s in (floor.added_s, floor.floor_added_s))
        excess = (three_digits(floor.times_floor), *added, three_digits(floor.a_times_floor))
        table.add_row(
            label, factor_interval(floor.measured, floor.interval), f"{floor.ratio:.3f}", *causes, *excess
        )
    return table
