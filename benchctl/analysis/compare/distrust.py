"""What a run itself calls untrustworthy is shown in a comparison and decides nothing.

Tokens that come in bursts change ``ttft``, ``itl`` and ``tpot`` by multiples, and often in one variant more than in
the other: an interval over blocks would call that a change. The steps and the wall time of such runs still hold.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair
from benchctl.analysis.metrics.table import CLIENT_TIMED
from benchctl.analysis.validity.bunching import CLIENT_BUNCHING
from benchctl.records.directory import LoadedRun

_CLIENT_TIMED: Final = ("ttft_ms", "itl_ms", "tpot_ms")
"""Ends of the names of what only the client times, chunk by chunk."""


def mark_unreliable(compared: MetricComparison, runs: Sequence[LoadedRun]) -> MetricComparison:
    """``compared`` as it is, or inconclusive where tokens came in bursts in any of the ``runs`` behind it.

    Its numbers and its interval stay: they are what the client saw.
    """
    if compared.estimate is None or not compared.metric.name.endswith(_CLIENT_TIMED):
        return compared
    bunched = sum(any(warning.code == CLIENT_BUNCHING for warning in run.record.warnings) for run in runs)
    if not bunched:
        return compared
    reason = (
        f"tokens reached the client in bursts in {bunched} of {len(runs)} runs, so that it decides nothing; free "
        "processors and measure again, or let others decide (--metrics)"
    )
    return replace(compared, verdict="inconclusive", reason=reason, is_unreliable=True)


def mark_bounded(compared: MetricComparison, cell: PairedRuns) -> MetricComparison:
    """``compared`` with the number of runs whose value rests on bounds and is left out, and that as a reason."""
    name = compared.metric.name
    num_a = sum(name in cell.a.bounds(run) for run in cell.pair.a_runs)
    num_b = sum(name in cell.b.bounds(run) for run in cell.pair.b_runs)
    if not num_a and not num_b:
        return compared
    reason = (
        f"{num_a + num_b} of {len(cell.runs)} runs have it between bounds only, because the client was late to "
        "read, and do not count for it; free processors for the client and measure again"
    )
    if compared.verdict in {"inconclusive", "unknown"}:
        compared = replace(compared, reason=f"{reason}; {compared.reason}" if compared.reason else reason)
    return replace(compared, num_bounded=(num_a, num_b))


def explain_client_exclusions(compared: MetricComparison, pair: CellPair) -> MetricComparison:
    """``compared`` with what is missing where the client's times of some runs do not count."""
    excluded = {**pair.a.client_excluded, **pair.b.client_excluded}
    if not excluded or compared.metric.name not in CLIENT_TIMED:
        return compared
    num_runs = len(pair.a.client_excluded) + len(pair.b.client_excluded)
    message = (
        f"the client's times of {num_runs} of {len(pair.a.runs) + len(pair.b.runs)} runs do not count; metrics "
        "that the server measured do (step_ms), and --allow-suspect counts all"
    )
    if compared.verdict not in {"inconclusive", "unknown"}:
        return compared
    return replace(compared, reason=f"{message}; {compared.reason}" if compared.reason else message)
