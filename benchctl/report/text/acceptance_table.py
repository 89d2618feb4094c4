"""Acceptance of draft tokens as a table: one arm a row, one position of the drafts a column.

Forward passes as tables: the time of one pass, and the cost of its launches. Times are in ms.
The load generator as a table: share of the load kept up, delays, origin of timestamps, processor time.
The ladders of controls as a table: what each step costs, and that the steps make up the whole.
The floor of guided steps as a table: what guidance costs at the peaks of the device, beside what it did cost.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from rich.table import Table

from benchctl.analysis.attribution.estimate import StepFloor
from benchctl.analysis.attribution.text import factor_interval
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.ladder import Difference, Price
from benchctl.analysis.metrics.speculation import ArmDrafts, PositionOverBlocks
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, floor_peaks
from benchctl.formats import UNKNOWN, four_digits, signed_four_digits, signed_three_digits, three_digits, whole
from benchctl.report.text.plain_table import plain_table
from benchctl.units import MS_PER_S

TITLE: Final = (
    "Acceptance of draft tokens; by position: share of all drafts accepted up to it (in brackets of those accepted "
    "up to the position before)"
)


def acceptance_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every arm that drafted tokens; None where none did."""
    arms = {cell.label: drafts for cell in analysis.cells if (drafts := cell.drafts()) is not None}
    if not arms:
        return None
    label, *numbers = acceptance_headings(arms)
    table = plain_table(TITLE, [label], numbers)
    for row in acceptance_rows(arms):
        table.add_row(*row)
    return table


def compared_drafts(comparison: Comparison) -> dict[str, ArmDrafts]:
    """The arms of a comparison that drafted tokens, each once, by label."""
    arms: dict[str, ArmDrafts] = {}
    for cell in comparison.cells:
        labels = (cell.a_label, cell.b_label)
        if cell.a_label == cell.b_label:  # of two directories
            labels = (f"{comparison.a_name}: {cell.a_label}", f"{comparison.b_name}: {cell.b_label}")
        for label, drafts in zip(labels, (cell.a_drafts, cell.b_drafts), strict=True):
            if drafts is not None:
                arms.setdefault(label, drafts)
    return arms


def acceptance_headings(arms: Mapping[str, ArmDrafts]) -> tuple[str, ...]:
    """The columns of the table: as many positions as the longest drafts have."""
    num_positions = max((len(drafts.positions) for drafts in arms.values()), default=0)
    positions = (f"position {position}" for position in range(1, num_positions + 1))
    return ("cell", "drafts", "draft tokens", "accepted", "rate", "length", *positions)


def acceptance_rows(arms: Mapping[str, ArmDrafts]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    num_columns = len(acceptance_headings(arms))
    for label, drafts in arms.items():
        counts = drafts.counts
        row = (
            label,
            *(whole(count) for count in (counts.drafts, counts.draft_tokens, counts.accepted_tokens)),
            *(UNKNOWN if share is None else three_digits(share) for share in _rates(drafts)),
            *map(_share, drafts.positions),
        )
        yield (*row, *[""] * (num_columns - len(row)))


def _rates(drafts: ArmDrafts) -> tuple[float | None, float | None]:
    return drafts.acceptance_rate, drafts.acceptance_length


def _share(position: PositionOverBlocks) -> str:
    """``0.512 (0.800)``; the first position has no other before it."""
    pooled = position.pooled
    survival = UNKNOWN if pooled.survival is None else three_digits(pooled.survival)
    if pooled.position == 1 or pooled.conditional is None:
        return survival
    return f"{survival} ({three_digits(pooled.conditional)})"


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


_TITLE: Final = "The client, ms of its own clock; of a cell the centre over blocks"
_COLUMNS: Final = {
    "load": "offered_load_frac",
    "slots idle": "slot_idle_frac",
    "refill p50": "p50_refill_gap_ms",
    "refill p99": "p99_refill_gap_ms",
    "connect p99": "p99_refill_connect_ms",
    "send lag p50": "p50_send_lag_ms",
    "p99": "p99_send_lag_ms",
    "max": "max_send_lag_ms",
    "kernel stamps": "kernel_stamp_frac",
    "bounds": "coalesced_chunk_frac",
    "read late p99": "p99_read_delay_ms",
    "loop late max": "max_loop_lag_ms",
    "cores": "client_cpu_cores",
}


def client_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every cell as the centre over its blocks, then every run, in the columns that a run fills.

    None where nothing was sent, as in a simulation, which has no client.
    """
    cells = [cell for cell in analysis.cells if "max_send_lag_ms" in cell.spreads]
    runs = [
        run for run in analysis.runs if run.values["max_send_lag_ms"] is not None and not run.record.is_simulated
    ]
    if not runs:
        return None
    columns = {
        title: column for title, column in _COLUMNS.items() if any(run.number(column) is not None for run in runs)
    }
    table = plain_table(_TITLE, ["cell, run"], list(columns))
    for cell in cells:
        table.add_row(cell.label, *(_text(column, cell.centre(column)) for column in columns.values()))
    for run in runs:
        table.add_row(f"  {run.record.run_id}", *(_text(column, run.number(column)) for column in columns.values()))
    return table


def _text(column: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if column == "slot_idle_frac":
        return f"{value:.2%}"
    return f"{value:.1%}" if column.endswith("_frac") else f"{value:.3g}"


_LADDER_TABLE_COLUMNS: Final = {"wall s": "wall_s", "step ms": "step_ms"}


def ladder_table(analysis: AnalyzedExperiment) -> Table | None:
    """Differences of neighbours, ± half of the 95 % interval over blocks; None where nothing has controls."""
    if not analysis.ladders:
        return None
    title = "Ladder of controls: what each step adds to the one before it, ± half of the 95 % interval over blocks"
    columns = ("blocks", *(f"{name}{suffix}" for name in _LADDER_TABLE_COLUMNS for suffix in ("", ", share")))
    table = plain_table(title, ("cell", "price of", "step"), columns)
    for ladder in analysis.ladders:
        for i, price in enumerate((*ladder.prices, ladder.whole)):
            step = f"{price.lower} > {price.upper}"
            table.add_row(ladder.label if i == 0 else "", price.what, step, *_numbers(price, ladder.whole))
    return table


def _numbers(price: Price, whole: Price) -> list[str]:
    blocks = max((difference.num_blocks for difference in price.differences.values()), default=0)
    cells = [str(blocks)]
    for name in _LADDER_TABLE_COLUMNS.values():
        difference, total = price.differences.get(name), whole.differences.get(name)
        cells += [_amount(difference), _ladder_table_share(difference, total)]
    return cells


def _amount(difference: Difference | None) -> str:
    if difference is None:
        return UNKNOWN
    interval = "" if difference.half_width is None else f" ± {difference.half_width:.2g}"
    return f"{difference.mean:+.4g}{interval}"


def _ladder_table_share(difference: Difference | None, whole: Difference | None) -> str:
    """Part of the whole, where the whole is more than its own scatter."""
    if difference is None or whole is None or abs(whole.mean) <= (whole.half_width or 0.0):
        return UNKNOWN
    return f"{difference.mean / whole.mean:.0%}"


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
