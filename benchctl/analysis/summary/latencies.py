"""Latencies of the requests of an arm: all values for a distribution, and percentiles with their intervals.

The percentile of an arm is the centre over blocks of each block's percentile, as in a comparison; the
blocks, not the requests, are the units of its interval. The percentiles of a block are its metrics, such as
``p95_ttft_ms``. Where too few requests support them they are unknown, and on a virtual clock marked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.metrics.percentile import PERCENTS
from benchctl.analysis.metrics.request_timing import is_completed, latencies_ns, measured
from benchctl.analysis.metrics.table import LATENCIES
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.statistics.side_ratio import level_interval
from benchctl.analysis.summary.runs import CellSummary, RunSummary
from benchctl.units import NS_PER_MS

LATENCY_NAMES: Final = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "gap between chunks (ITL)",
    "e2el": "end-to-end latency (E2EL)",
}
Sorted: TypeAlias = NDArray[np.float64]
"""Values in ms that ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileLevel:
    """One percentile of an arm, in ms."""

    percent: int
    level_ms: float
    interval_ms: Interval | None
    """None for one block."""
    num_blocks: int
    num_requests: int | None = None
    """Fewest requests of a block, where they are too few for this percentile; None where they are not."""


def few_requests(runs: Iterable[RunSummary], percent: int) -> int | None:
    """The fewest requests of which a percentile is shown although it needs more; None where no run shows one."""
    few = (run.number("num_completed") for run in runs if f"p{percent}" in str(run.values["few_requests"]))
    return min((int(number) for number in few if number is not None), default=None)


def percentile_name(latency: str, percent: int) -> str:
    """The metric of a run: ``p95_ttft_ms``."""
    return f"p{percent}_{latency}_ms"


def percentile_levels(cell: CellSummary, latency: str, confidence: float) -> tuple[PercentileLevel | None, ...]:
    """Those of ``PERCENTS`` over the blocks of an arm; None where no block knows one."""
    levels = []
    for percent in PERCENTS:
        name = percentile_name(latency, percent)
        values = [run.counted(name) for run in cell.runs]
        level = level_of_blocks(values, cell.centre(name), percent, confidence)
        levels.append(level and replace(level, num_requests=few_requests(cell.runs, percent)))
    return tuple(levels)


def level_of_blocks(
    values: Sequence[float | None], level_ms: float | None, percent: int, confidence: float
) -> PercentileLevel | None:
    """The percentile at ``level_ms`` with the interval of the blocks' values; None where it is unknown."""
    if level_ms is None:
        return None
    return PercentileLevel(
        percent=percent,
        level_ms=level_ms,
        interval_ms=level_interval(values, level_ms, confidence),
        num_blocks=sum(value is not None for value in values),
    )


def run_latencies(run: RunSummary) -> Mapping[str, Sorted]:
    """Every latency of the completed requests of a run, without warm-up; only latencies that count."""
    completed = [request for request in measured(run.run.requests) if is_completed(request)]
    durations_ns = {name: values for name, values in latencies_ns(completed).items() if len(values)}
    factor = run.record.clock_factor / NS_PER_MS
    return {
        name: np.sort(np.asarray(durations_ns[name], dtype=np.float64)) * factor
        for name in LATENCIES
        if name in durations_ns and run.counted(f"{name}_ms") is not None
    }
