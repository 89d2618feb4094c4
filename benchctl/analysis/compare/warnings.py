"""The warnings of a comparison, collected from the experiments, their runs and the statistics."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import CellPair, unmatched_arms
from benchctl.analysis.quality.divergence import Divergence
from benchctl.analysis.statistics.fisher import Share, fisher_one_sided
from benchctl.analysis.summary.nodes import NodeResults, node_sentence
from benchctl.analysis.validity.comparability.machines import machine_warnings
from benchctl.analysis.validity.prefix_hits import prefix_warnings
from benchctl.analysis.validity.usability import decisive_warnings
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import ResultWarning

SURPRISING_P: Final = 0.01
"""Effects of the order are reported where their p-value, over all tests, is below it."""

WarningKind: TypeAlias = tuple[str, str]
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def warning_kind(warning: ResultWarning) -> WarningKind:
    """Key under which warnings are merged: code and message, the latter without numbers where it is of one run."""
    message = warning.message
    return warning.code, message if warning.where is None else _NUMBER.sub("#", message)


def measurement_warnings(
    a: LoadedResults, b: LoadedResults, cells: Sequence[PairedRuns]
) -> tuple[ResultWarning, ...]:
    """Warnings of the experiments, of their pairing and their machines, of failed checks and of the runs."""
    experiments = (a,) if a.path.resolve() == b.path.resolve() else (a, b)
    pairs = [cell.pair for cell in cells]
    runs = {id(run): run for pair in pairs for run in (*pair.a_runs, *pair.b_runs)}
    return _merge_warnings(
        [
            *(warning for results in experiments for warning in _experiment_warnings(results)),
            *_pairing_warnings(a, b, pairs),
            *_exclusion_warnings(cells),
            *(() if len(experiments) == 1 else machine_warnings(a, b)),
            *(
                ResultWarning(code=f"check-{check.name}", message=check.detail, where=run.record.run_id)
                for cell in cells
                for run, check in cell.checks()
                if check.ok is False and not check.is_fatal
            ),
            *(warning for run in runs.values() for warning in _run_warnings(run)),
            *(warning for cell in cells for warning in cell.prompt_warnings()),
            *(warning for pair in pairs for warning in prefix_warnings(pair.a_runs, pair.b_runs, pair.label)),
        ]
    )


def suspect_warnings(pairs: Sequence[CellPair], names: tuple[str, str]) -> tuple[ResultWarning, ...]:
    """One warning with the number of suspect runs that count on each side, and the codes of their warnings."""
    sides = ([run for pair in pairs for run in pair.a_runs], [run for pair in pairs for run in pair.b_runs])
    counts = [_describe_suspects(name, runs) for name, runs in zip(names, sides, strict=True)]
    if not any(counts):
        return ()
    message = (
        f"suspect runs are counted (--allow-suspect): {' and '.join(filter(None, counts))}; the verdict is only as "
        "good as they are"
    )
    return (ResultWarning(code="suspect-counted", message=message),)


def _describe_suspects(name: str, runs: Iterable[LoadedRun]) -> str:
    distinct = {id(run): run.record for run in runs}.values()
    suspect = [record for record in distinct if record.state == "suspect"]
    if not suspect:
        return ""
    codes = sorted({warning.code for record in suspect for warning in decisive_warnings(record)})
    return f"{len(suspect)} of {len(distinct)} runs of {name} ({', '.join(codes) or 'no reason recorded'})"


def statistical_warnings(cells: Sequence[CellComparison]) -> tuple[ResultWarning, ...]:
    """Warnings of the numbers: failed requests, no scatter at all, effects of the order, outlier blocks."""
    warnings = [
        ResultWarning(code="failed-requests", message=failure)
        for failure in dict.fromkeys(failure for cell in cells for failure in cell.failures)
    ]
    deciding = [(cell, m) for cell in cells for m in cell.deciding if m.estimate is not None]
    if any(m.estimate is not None and m.estimate.standard_error == 0 for _, m in deciding):
        message = (
            "all blocks are exactly equal, as of a simulator without noise or of copied runs; the interval says "
            "nothing about a real machine"
        )
        warnings.append(ResultWarning(code="no-scatter", message=message))
    warnings += [warning for cell in cells for warning in _answer_warnings(cell)]
    for cell, metric in deciding:
        warnings += _order_warnings(cell, metric, max(1, len(deciding)))
    return tuple(warnings)


def node_warnings(nodes: NodeResults | None) -> tuple[ResultWarning, ...]:
    """A warning where a node differs from the others beyond chance."""
    sentence = None if nodes is None else node_sentence(nodes)
    return () if sentence is None else (ResultWarning(code="node-differs", message=sentence),)


def _answer_warnings(cell: CellComparison) -> Iterable[ResultWarning]:
    """Greedy answers of drafting sides that differ from A's more often than A's from block to block.

    The same prompts part in every block, so the test (Fisher's, one-sided) counts the answers of one block.
    """
    divergence = cell.divergence
    if divergence is None or divergence.temperature != 0 or divergence.a_against_a is None or cell.num_blocks < 2:
        return
    has_drafts = cell.a_drafts is not None or cell.b_drafts is not None
    of_b, of_a = divergence.b_against_a, divergence.a_against_a
    p_value = fisher_one_sided(_parted(of_b, cell.num_blocks), _parted(of_a, cell.num_blocks - 1))
    if not has_drafts or of_b.identical_frac is None or of_a.identical_frac is None or p_value >= SURPRISING_P:
        return
    message = (
        f"draft tokens change greedy answers: {of_b.identical_frac:.1%} are identical on both sides, and "
        f"{of_a.identical_frac:.1%} on side A from block to block"
    )
    yield ResultWarning(code="greedy-answers-differ", message=message, where=cell.label)


def _parted(divergence: Divergence, num_blocks: int) -> Share:
    """Answers of a mean block that are not identical."""
    num_parted = divergence.num_pairs - divergence.num_identical
    return Share(round(num_parted / num_blocks), round(divergence.num_pairs / num_blocks))


def _order_warnings(cell: CellComparison, metric: MetricComparison, num_tests: int) -> Iterable[ResultWarning]:
    """Effects with p < 0.01 over all tests (Bonferroni), so that many tests do not raise false alarms."""
    where = f"{metric.metric.name} in {cell.label}"
    effects, limit = metric.order, SURPRISING_P / num_tests
    if effects is not None and effects.position is not None and effects.position.p_value < limit:
        per_position = math.expm1(effects.position.log_per_unit) * 100
        message = (
            f"a run takes {per_position:+.2g}% for each position later in its block; the estimate is that of equal "
            "positions"
        )
        yield ResultWarning(code="position-effect", message=message, where=where)
    if effects is not None and effects.ratio_drift is not None and effects.ratio_drift.p_value < limit:
        per_block = math.expm1(effects.ratio_drift.log_per_unit) * 100
        message = (
            f"the ratio itself moves by {per_block:+.2g}% per block, so one number does not describe it; look at "
            "the single blocks"
        )
        yield ResultWarning(code="ratio-drift", message=message, where=where)
    if metric.outlier_blocks:
        yield ResultWarning(code="outlier-block", message=_describe_outliers(metric), where=where)


def _describe_outliers(metric: MetricComparison) -> str:
    """The outlier blocks, their weight in the estimate, and the estimate without them."""
    blocks = ", ".join(str(block) for block in metric.outlier_blocks)
    weight = "little" if metric.estimate is not None and metric.estimate.estimator == "robust" else "in full"
    sentence, them = f"blocks {blocks} stand out and count {weight}", "them"
    if len(metric.outlier_blocks) == 1:
        sentence, them = f"block {blocks} stands out and counts {weight}", "it"
    estimate = metric.without_outliers
    if estimate is None or estimate.ci_low is None or estimate.ci_high is None:
        return f"{sentence}; without {them} nothing can be estimated"
    ends = (estimate.ratio, estimate.ci_low, estimate.ci_high)
    change, low, high = (f"{(end - 1) * 100:+.2f}%" for end in ends)
    return f"{sentence}; without {them} the change would be {change} [{low}, {high}]"


def _experiment_warnings(results: LoadedResults) -> Iterable[ResultWarning]:
    where, state = str(results.source), results.manifest.state
    if state != "done":
        message = f"the experiment is {state}; 'benchctl run --resume {where}' continues it"
        yield ResultWarning(code="experiment-unfinished", message=message, where=where)
    yield from results.manifest.warnings


def _pairing_warnings(a: LoadedResults, b: LoadedResults, pairs: Sequence[CellPair]) -> Iterable[ResultWarning]:
    pairing = pairs[0].pairing
    if pairing == "same-plan":
        yield ResultWarning(
            code="not-interleaved",
            message="blocks of two directories with the same plan are paired by index; they were not interleaved "
            "in time, so a drift of the machine between them looks like a change",
        )
    if pairing == "unpaired":
        yield ResultWarning(
            code="unpaired",
            message="the directories share no blocks, so Hodges-Lehmann shifts with Mann-Whitney intervals are "
            "used; these are wider than the intervals of one experiment",
        )
    if all(pair.a.key == pair.b.key for pair in pairs) and a.path.resolve() == b.path.resolve():
        yield ResultWarning(code="same-runs", message="both sides are the same runs")
    for arm in unmatched_arms(a, b, pairs):
        yield ResultWarning(code="unmatched", message=f"{arm} has no counterpart and is not compared")


def _exclusion_warnings(cells: Sequence[PairedRuns]) -> Iterable[ResultWarning]:
    for cell in cells:
        for arm, experiment in ((cell.pair.a, cell.a), (cell.pair.b, cell.b)):
            yield from experiment.block_warnings
            for block, reason in sorted(arm.excluded.items()):
                scattered = experiment.scattered_blocks.get(block)
                if scattered is None or not reason.endswith(scattered):
                    yield ResultWarning(code="excluded-block", message=f"block {block} is left out: {reason}")
            if arm.client_excluded:
                blocks = ", ".join(map(str, sorted(arm.client_excluded)))
                message = (
                    f"{arm.label}: times that the client measured in block {blocks} do not count, those of the "
                    f"server do; the first: {arm.client_excluded[min(arm.client_excluded)]}"
                )
                yield ResultWarning(code="client-times-excluded", message=message)


def _run_warnings(run: LoadedRun) -> Iterable[ResultWarning]:
    record, where = run.record, run.record.run_id
    if not record.effective_config:
        message = (
            "the server did not report its configuration: nothing proves that only the declared factor differs"
        )
        yield ResultWarning(code="configuration-unknown", message=message, where=where)
    if record.attempt > 1:
        yield ResultWarning(code="repeated-run", message="the run needed more than one attempt", where=where)
    yield from run.warnings


def _merge_warnings(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """One warning for each kind, with the message of the first and the runs or files that have it."""
    by_kind: dict[WarningKind, list[ResultWarning]] = {}
    for warning in warnings:
        by_kind.setdefault(warning_kind(warning), []).append(warning)
    merged = []
    for first, *others in by_kind.values():
        sources = list(dict.fromkeys(w.where for w in (first, *others) if w.where is not None))
        more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        where = f"{sources[0]}{more}" if sources else None
        merged.append(ResultWarning(code=first.code, message=first.message, where=where))
    return tuple(merged)
