"""The load generator as a table: share of the load kept up, delays, origin of timestamps, processor time."""

from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.formats import UNKNOWN
from benchctl.report.text.plain_table import plain_table

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
