"""``summary.csv`` in the columns that the LenVM project publishes: a row per run, to lay beside its own tables.

Names are theirs and definitions benchctl's, which differ in three: ``wall_clock_s`` leaves the client's start out,
``n_requests`` counts requests and not choices, and ``n_steps`` includes greedy steps.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Final

from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS, Value, number_of
from benchctl.analysis.experiment.summary import RunSummary
from benchctl.units import MS_PER_S
from benchctl.untrusted.text import csv_cell

_OUR_NAMES: Final[Mapping[str, str]] = {
    "tag": "variant",
    "wall_clock_s": "wall_s",
    "throughput_output_tokens_per_s": "output_throughput",
    "total_output_tokens": "output_tokens",
    "total_prompt_tokens": "prompt_tokens",
    "n_requests": "num_requests",
    "n_steps": "num_steps",
    "batch_size_mean": "mean_batch_size",
    "latency_s_mean": "e2el_ms",
    "latency_s_p95": "p95_e2el_ms",
}
"""Published columns that benchctl calls otherwise."""
_SHARED: Final = (
    "n_steps_with_lvm",
    "batch_size_p",
    "output_tokens_",
    "t_",
    "base_",
    "lvm_",
    "theoretical_",
    "achieved_",
)
LENVM_COLUMNS: Final = (
    *_OUR_NAMES,
    *(column for column in SUMMARY_COLUMNS if column.startswith(_SHARED)),
    "top_k",
    "value_scale",
)


def lenvm_csv(runs: Iterable[RunSummary]) -> bytes:
    """The table, a row per run; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, LENVM_COLUMNS)
    writer.writeheader()
    writer.writerows({column: csv_cell(_value(run, column)) for column in LENVM_COLUMNS} for run in runs)
    return text.getvalue().encode()


def _value(run: RunSummary, column: str) -> Value:
    value = run.values[_OUR_NAMES.get(column, column)]
    if column.startswith("latency_s_"):
        latency_ms = number_of(value)
        return None if latency_ms is None else latency_ms / MS_PER_S
    return value
