"""Tables of times: percentiles of latencies, single forward passes, their launches, and ways of backfill; in ms."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from benchctl.analysis.analyzed import LATENCY_NAMES, AnalyzedExperiment, PercentileLevel
from benchctl.analysis.bonus import BackfillVerdict
from benchctl.analysis.metrics.latency import PERCENTS, smallest_sample
from benchctl.analysis.statistics.intervals import Interval
from benchctl.profile.choices import Mode
from benchctl.report.experiment_tables import blocks_that_count
from benchctl.report.table import Column, Table
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import UNKNOWN, four_digits, ms_from_ns, percentage, three_digits


def interval_text(interval: Interval) -> str:
    """``[0.228, 0.231]``."""
    return f"[{four_digits(interval[0])}, {four_digits(interval[1])}]"


def percentile_table(
    rows: Iterable[tuple[str, str, Sequence[PercentileLevel | None]]], confidence: float, unit: str
) -> Table | None:
    """``rows`` are latency, arm and its percentiles; None where none is known. ``unit`` is the word for a block."""
    values = tuple(
        {"latency": LATENCY_NAMES[latency], "arm": arm}
        | {f"p{percent}": level for percent, level in zip(PERCENTS, levels, strict=True)}
        for latency, arm, levels in rows
        if any(level is not None for level in levels)
    )
    if not values:
        return None
    fewest = ", ".join(f"p{percent} {smallest_sample(percent)}" for percent in PERCENTS if percent > 50)
    title = (
        f"In ms: {'centre' if unit == 'block' else 'geometric mean'} over {unit}s of the percentile of each, in "
        f"brackets its {percentage(confidence)} interval with {unit}s as units. {UNKNOWN}: too few completed "
        f"requests in a {unit} ({fewest}). In virtual time the percentile of so few is shown, with their number: "
        "of these requests alone, near the slowest of them."
    )
    columns = (
        Column("latency", "latency", is_left=True),
        Column("arm", "arm", is_left=True),
        *(Column(f"p{percent}", f"p{percent}", _level) for percent in PERCENTS),
    )
    return Table(title, columns, values)


def _level(level: PercentileLevel) -> str:
    """Value and interval, with the number of requests where these are too few."""
    interval = "" if level.interval_ms is None else f" {interval_text(level.interval_ms)}"
    few = "" if level.num_requests is None else f" of {level.num_requests}"
    return f"{four_digits(level.level_ms)}{interval}{few}"


_PASSES: Final = (
    Column("label", "pass", is_left=True),
    Column("blocks", "blocks"),
    Column("num_replays", "replays"),
    Column("median_ms", "median", four_digits),
    Column("interval_ms", "interval", interval_text),
    Column("p5_ms", "p5", four_digits),
    Column("p95_ms", "p95", four_digits),
    Column("floor_ms", "floor", four_digits),
    Column("times_floor", "times floor", three_digits),
)


def passes_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every point in every mode; None where no pass was measured."""
    if not analysis.passes:
        return None
    title = "Forward passes, ms: median with its 95 % interval over blocks, p5 to p95 of all replays"
    if analysis.floor_peaks is not None:
        title += f"\nNo pass can be faster than its floor at the peaks of {analysis.floor_peaks}"
    rows = (
        {"label": times.cell.label, "blocks": blocks_that_count(times.cell)}
        | {column.key: getattr(times, column.key) for column in _PASSES[2:]}
        for times in analysis.passes
    )
    return Table(title, _PASSES, tuple(rows))


def launch_table(analysis: AnalyzedExperiment) -> Table | None:
    """The launch cost of every point; None where only one mode was measured."""
    if not analysis.launches:
        return None
    baseline = analysis.results.manifest.baseline
    columns = (
        Column("label", "pass", is_left=True),
        Column("num_blocks", "blocks"),
        Column("baseline_ms", baseline, four_digits),
        Column("other_ms", "other", four_digits),
        Column("saved_ms", "less", four_digits),
        Column("interval_ms", "interval", interval_text),
        Column("ratio", "ratio", three_digits),
        Column("num_operators", "operators"),
        Column("us_per_operator", "µs each", three_digits),
    )
    title = (
        f"Launch cost, ms: {baseline} less the other mode, the part of a pass that only its launches take, with "
        "its 95 % interval over blocks"
    )
    rows = ({column.key: getattr(cost, column.key) for column in columns} for cost in analysis.launches)
    return Table(title, columns, tuple(rows))


def cost_text(cost_ns: Estimate) -> str:
    """``1.23 [1.20, 1.26]``, in milliseconds."""
    centre = _ms(cost_ns.value)
    if cost_ns.low is None or cost_ns.high is None:
        return centre
    return f"{centre} [{_ms(cost_ns.low)}, {_ms(cost_ns.high)}]"


def _ms(duration_ns: float) -> str:
    """Three digits, and at most four behind the point: a tenth of a microsecond."""
    time_ms = ms_from_ns(duration_ns)
    return three_digits(time_ms) if abs(time_ms) >= 0.1 else f"{time_ms:.4f}"


_BACKFILL: Final = (
    Column("batch_size", "batch"),
    Column("bonus_tokens", "tokens m"),
    Column("decode_ns", "T(B)", cost_text),
    Column("expansion_ns", "expansion: T(B+m) - T(B)", cost_text),
    Column("prefill_ns", "prefill of m", cost_text),
    Column("difference_ns", "expansion - prefill", cost_text),
    Column("cheaper", "cheaper", is_left=True),
)


def bonus_table(verdict: BackfillVerdict, modes: tuple[Mode, Mode]) -> Table:
    """Both ways of backfill in one pair of modes."""
    rows: Iterable[dict[str, Any]] = (
        {column.key: getattr(row, column.key) for column in _BACKFILL} | {"cheaper": row.cheaper or "inconclusive"}
        for row in verdict.rows(*modes)
    )
    return Table("", _BACKFILL, tuple(rows))
