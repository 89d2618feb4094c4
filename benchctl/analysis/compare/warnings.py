"""What a reader of a comparison should doubt: warnings as data, gathered from the runs and from the statistics."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.pairing import CellPair, unmatched_arms
from benchctl.analysis.validity.comparability import machine_warnings
from benchctl.analysis.validity.reconcile import Check
from benchctl.analysis.validity.usability import suspect_warnings
from benchctl.records.directory import LoadedResults, LoadedRun
from benchctl.records.run import ResultWarning, RunRecord

SURPRISING_P: Final = 0.01

WarningKind: TypeAlias = tuple[str, str]
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def warning_kind(warning: ResultWarning) -> WarningKind:
    """Key under which warnings are merged: the code and the message, without its numbers where it is about one run
    or file.
    """
    if warning.where is None:
        return warning.code, warning.message
    return warning.code, _NUMBER.sub("#", warning.message)


def measurement_warnings(
    a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair], checks: Iterable[tuple[LoadedRun, Check]]
) -> tuple[ResultWarning, ...]:
    """Doubts about what was measured: gaps, machines, order, and what the runs themselves said."""
    experiments = (a,) if a.path.resolve() == b.path.resolve() else (a, b)
    runs = {id(run): run for pair in pairs for run in (*pair.a_runs, *pair.b_runs)}
    return _collected(
        [
            *(warning for results in experiments for warning in _experiment_warnings(results)),
            *_pairing_warnings(a, b, pairs),
            *_excluded(pairs),
            *(() if len(experiments) == 1 else machine_warnings(a, b)),
            *(
                ResultWarning(code=f"check-{check.name}", message=check.detail, where=run.record.run_id)
                for run, check in checks
                if check.ok is False and not check.is_fatal
            ),
            *(warning for run in runs.values() for warning in _run_warnings(run)),
        ]
    )


def counted_suspects(pairs: Sequence[CellPair], names: tuple[str, str]) -> tuple[ResultWarning, ...]:
    """How many runs of each side are suspect and part of the comparison all the same, with the codes of why."""
    sides = ([run for pair in pairs for run in pair.a_runs], [run for pair in pairs for run in pair.b_runs])
    told = [_suspects_of(name, runs) for name, runs in zip(names, sides, strict=True)]
    if not any(told):
        return ()
    message = (
        f"suspect runs are counted, as --allow-suspect asks: {' and '.join(filter(None, told))}; the verdict is no "
        "better than they are"
    )
    return (ResultWarning(code="suspect-counted", message=message),)


def _suspects_of(name: str, runs: Iterable[LoadedRun]) -> str:
    distinct = {id(run): run.record for run in runs}.values()
    suspect = [record for record in distinct if record.state == "suspect"]
    if not suspect:
        return ""
    why = sorted({code for record in suspect for code in _codes_of(record)})
    return f"{len(suspect)} of {len(distinct)} runs of {name} ({', '.join(why) or 'no reason recorded'})"


def _codes_of(record: RunRecord) -> set[str]:
    return {warning.code for warning in suspect_warnings(record)}


def statistical_warnings(cells: Sequence[CellComparison]) -> tuple[ResultWarning, ...]:
    """Doubts about the numbers: failed requests, no scatter at all, effects of the order, blocks that stand out."""
    found = [
        ResultWarning(code="failed-requests", message=failure)
        for failure in dict.fromkeys(failure for cell in cells for failure in cell.failures)
    ]
    deciding = [(cell, m) for cell in cells for m in cell.deciding if m.estimate is not None]
    if any(m.estimate is not None and m.estimate.standard_error == 0 for _, m in deciding):
        found.append(
            ResultWarning(
                code="no-scatter",
                message="blocks are exactly alike: a simulator without noise, or copied runs; "
                "the interval says nothing of a real machine",
            )
        )
    for cell, metric in deciding:
        found += _order_warnings(cell, metric, max(1, len(deciding)))
    return tuple(found)


def _order_warnings(cell: CellComparison, compared: MetricComparison, num_tests: int) -> Iterable[ResultWarning]:
    """Told where p < 0.01 over all tests (Bonferroni), so that a long list of tests makes no alarms of its own."""
    where = f"{compared.metric.name} in {cell.label}"
    effects, limit = compared.order, SURPRISING_P / num_tests
    if effects is not None and effects.position is not None and effects.position.p_value < limit:
        per_position = math.expm1(effects.position.log_per_unit) * 100
        yield ResultWarning(
            code="position-effect",
            message=f"a run takes {per_position:+.2g}% for each position later in its block; the estimate is "
            "that of equal positions",
            where=where,
        )
    if effects is not None and effects.ratio_drift is not None and effects.ratio_drift.p_value < limit:
        per_block = math.expm1(effects.ratio_drift.log_per_unit) * 100
        yield ResultWarning(
            code="ratio-drift",
            message=f"the ratio itself moves by {per_block:+.2g}% per block, so one number does not describe it; "
            "look at the single blocks",
            where=where,
        )
    if compared.outlier_blocks:
        yield ResultWarning(
            code="outlier-block",
            message=f"{_outliers_sentence(compared)}; {_without_outliers(compared)}",
            where=where,
        )


def _outliers_sentence(compared: MetricComparison) -> str:
    """Which blocks stand out, and how much the estimator lets them count."""
    blocks = ", ".join(str(block) for block in compared.outlier_blocks)
    weight = "little" if compared.estimate is not None and compared.estimate.estimator == "robust" else "in full"
    if len(compared.outlier_blocks) == 1:
        return f"block {blocks} stands out and counts {weight}"
    return f"blocks {blocks} stand out and count {weight}"


def _without_outliers(compared: MetricComparison) -> str:
    estimate, them = compared.without_outliers, "it" if len(compared.outlier_blocks) == 1 else "them"
    if estimate is None or estimate.ci_low is None or estimate.ci_high is None:
        return f"without {them} nothing can be estimated"
    ends = (estimate.ratio, estimate.ci_low, estimate.ci_high)
    change, low, high = (f"{(end - 1) * 100:+.2f}%" for end in ends)
    return f"without {them} the change would be {change} [{low}, {high}]"


def _experiment_warnings(results: LoadedResults) -> Iterable[ResultWarning]:
    where = str(results.path)
    if results.manifest.state != "done":
        yield ResultWarning(
            code="experiment-unfinished",
            message=f"the experiment is {results.manifest.state}; 'benchctl run --resume {where}' goes on with it",
            where=where,
        )
    yield from results.manifest.warnings


def _pairing_warnings(a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair]) -> Iterable[ResultWarning]:
    pairing = pairs[0].pairing
    if pairing == "same-plan":
        yield ResultWarning(
            code="not-interleaved",
            message="blocks are paired by index across two directories of the same plan; they were not interleaved "
            "in time, so a drift of the machine between them looks like a change",
        )
    if pairing == "unpaired":
        yield ResultWarning(
            code="unpaired",
            message="the directories share no blocks: Hodges-Lehmann shifts with Mann-Whitney intervals, unpaired "
            "and wider than those of one experiment",
        )
    if all(pair.a.key == pair.b.key for pair in pairs) and a.path.resolve() == b.path.resolve():
        yield ResultWarning(code="same-runs", message="both sides are the same runs")
    for arm in unmatched_arms(a, b, pairs):
        yield ResultWarning(code="unmatched", message=f"{arm} has no counterpart and is not compared")


def _excluded(pairs: Sequence[CellPair]) -> Iterable[ResultWarning]:
    for pair in pairs:
        for arm in (pair.a, pair.b):
            for block, reason in sorted(arm.excluded.items()):
                yield ResultWarning(code="excluded-block", message=f"block {block} is left out: {reason}")
            if arm.client_excluded:
                blocks = ", ".join(map(str, sorted(arm.client_excluded)))
                first = arm.client_excluded[min(arm.client_excluded)]
                yield ResultWarning(
                    code="client-times-excluded",
                    message=f"{arm.label}: what the client timed in block {blocks} does not count, what the server "
                    f"measured does; the first: {first}",
                )


def _run_warnings(run: LoadedRun) -> Iterable[ResultWarning]:
    record = run.record
    if not record.effective_config:
        yield ResultWarning(
            code="configuration-unknown",
            message="the server did not say how it was configured: nothing proves that only the declared factor "
            "differs",
            where=record.run_id,
        )
    if record.attempt > 1:
        yield ResultWarning(
            code="repeated-run", message="the run needed more than one attempt", where=record.run_id
        )
    yield from run.warnings


def _collected(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """One warning for each code and message, with the places where it was seen.

    Messages about runs that differ in their numbers alone are one as well: that of the first is shown.
    """
    first: dict[WarningKind, str] = {}
    places: dict[WarningKind, list[str]] = {}
    for warning in warnings:
        key = warning_kind(warning)
        first.setdefault(key, warning.message)
        seen = places.setdefault(key, [])
        if warning.where is not None and warning.where not in seen:
            seen.append(warning.where)
    return tuple(
        ResultWarning(code=key[0], message=message, where=_where(places[key])) for key, message in first.items()
    )


def _where(places: Sequence[str]) -> str | None:
    if not places:
        return None
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
