"""One cell of a comparison: its metrics, those that must not decide, and the errors that make the cell invalid.

Tokens that arrive in bursts change ``ttft``, ``itl`` and ``tpot`` by multiples, often in one variant more than in
the other, and an interval over blocks would call that a change. Such metrics are shown and decide nothing; the
steps and the wall time of the same runs still count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchctl.analysis.compare.metric_comparison import MetricComparison, Role, Rules, compare_metrics
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair
from benchctl.analysis.metrics.request_timing import is_completed, measured
from benchctl.analysis.metrics.table import CLIENT_TIMED
from benchctl.analysis.summary.arm_drafts import arm_drafts
from benchctl.analysis.validity.bunching import num_bunched
from benchctl.records.loaded import LoadedRun


def compare_cell(
    cell: PairedRuns, roles: Mapping[str, Role], rules: Rules, *, allow_failed: bool
) -> CellComparison:
    """Compare two arms metric by metric, without a correction for several tests."""
    pair, runs = cell.pair, cell.runs
    comparisons = compare_metrics(*cell.metrics(), roles, replace(rules, slopes=cell.slopes()), cell.design)
    metrics = tuple(
        mark_bounded(explain_client_exclusions(mark_unreliable(metric, runs), pair), cell) for metric in comparisons
    )
    failures = tuple(failure for run in runs if (failure := _describe_failed_requests(run)))
    errors = [] if pair.a_runs and pair.b_runs else ["no block has a usable run on both sides"]
    errors += metric_errors(metrics, failures, allow_failed=allow_failed)
    errors += (
        f"{run.record.run_id}: check {check.name} failed: {check.detail}"
        for run, check in cell.checks()
        if check.ok is False and check.is_fatal
    )
    return CellComparison(
        label=pair.label,
        a_label=pair.a.label,
        b_label=pair.b.label,
        num_blocks=min(len(pair.a_runs), len(pair.b_runs)),
        metrics=metrics,
        errors=tuple(errors),
        failures=failures,
        a_drafts=arm_drafts(pair.a_runs),
        b_drafts=arm_drafts(pair.b_runs),
        design=cell.design,
    )


def metric_errors(
    metrics: Sequence[MetricComparison], failures: Sequence[str], *, allow_failed: bool
) -> Iterator[str]:
    """Failed requests, unless they are allowed; without any, the exact metrics whose sides differ."""
    if failures and not allow_failed:
        yield from (f"INCOMPLETE: {failure}" for failure in failures)
    elif not failures:
        for metric in metrics:
            if metric.verdict == "different":
                yield f"{metric.metric.name} must be equal and is {metric.a:.6g} against {metric.b:.6g}"


def _describe_failed_requests(run: LoadedRun) -> str | None:
    """Number and kinds of a run's failed requests; None where all were answered."""
    requests = measured(run.requests)
    failed = [request for request in requests if not is_completed(request)]
    if not failed:
        return None
    counts = Counter(request.error.kind if request.error else "unanswered" for request in failed)
    kinds = ", ".join(f"{count} {kind}" if len(counts) > 1 else kind for kind, count in sorted(counts.items()))
    return f"{len(failed)} of {len(requests)} requests failed in {run.record.run_id} ({kinds})"


def mark_unreliable(metric: MetricComparison, runs: Sequence[LoadedRun]) -> MetricComparison:
    """``metric``, made inconclusive where it times chunks and tokens came in bursts in any of its ``runs``.

    Its numbers and its interval stay: they are what the client measured.
    """
    number = 0 if metric.estimate is None else num_bunched(metric.metric.name, runs)
    if not number:
        return metric
    reason = (
        f"tokens reached the client in bursts in {number} of {len(runs)} runs, so it decides nothing; free "
        "processors and measure again, or let other metrics decide (--metrics)"
    )
    return replace(metric, verdict="inconclusive", reason=reason, is_unreliable=True)


def mark_bounded(metric: MetricComparison, cell: PairedRuns) -> MetricComparison:
    """``metric`` with the number of runs that know it only between bounds and do not count for it."""
    name = metric.metric.name
    num_a = sum(name in cell.a.bounds(run) for run in cell.pair.a_runs)
    num_b = sum(name in cell.b.bounds(run) for run in cell.pair.b_runs)
    if not num_a and not num_b:
        return metric
    reason = (
        f"{num_a + num_b} of {len(cell.runs)} runs know it between bounds only, because chunks were read or "
        "written together, and do not count for it; free processors and measure again"
    )
    return replace(_limited(metric, reason), num_bounded=(num_a, num_b))


def explain_client_exclusions(metric: MetricComparison, pair: CellPair) -> MetricComparison:
    """``metric`` with the number of runs whose client times do not count, where it lacks them for a verdict."""
    num_excluded = len(pair.a.client_excluded) + len(pair.b.client_excluded)
    if not num_excluded or metric.metric.name not in CLIENT_TIMED:
        return metric
    return _limited(
        metric,
        f"the client's times of {num_excluded} of {len(pair.a.runs) + len(pair.b.runs)} runs do not count; metrics "
        "that the server measured do (step_ms), and --allow-suspect counts all",
    )


def _limited(metric: MetricComparison, limit: str) -> MetricComparison:
    """A metric with one more limit, which comes first in the reason where it has no verdict."""
    is_open = metric.verdict in {"inconclusive", "unknown"}
    reason = "; ".join(filter(None, (limit, metric.reason))) if is_open else metric.reason
    return replace(metric, limits=(limit, *metric.limits), reason=reason)
