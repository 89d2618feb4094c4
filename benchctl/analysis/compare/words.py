"""A comparison in words: the warnings that limit it, its margins, and the settings that differ."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeAlias

import numpy as np

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.experiment.carry_over import carry_over_of, carry_over_warnings
from benchctl.analysis.experiment.pairing import ArmPair, unmatched_arms, unrecorded_text
from benchctl.analysis.statistics.estimate import SURPRISING_P
from benchctl.analysis.validity.checks import prefix_warnings
from benchctl.analysis.validity.comparable import Difference
from benchctl.analysis.validity.machines import ABSENT, machine_warnings
from benchctl.analysis.validity.usable import decisive_warnings
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.schema import ResultWarning
from benchctl.units import count_of, percentage, percentage_change

WarningKind: TypeAlias = tuple[str, str]
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def warning_kind(warning: ResultWarning) -> WarningKind:
    """Key under which warnings are merged: code and message, the latter without numbers where it is of one run."""
    message = warning.message
    return warning.code, message if warning.where is None else _NUMBER.sub("#", message)


def measurement_warnings(a: LoadedResults, b: LoadedResults, pairs: Sequence[ArmPair]) -> tuple[ResultWarning, ...]:
    """Warnings of the experiments, of their pairing and their machines, of failed checks and of the runs."""
    experiments = (a,) if a.path.resolve() == b.path.resolve() else (a, b)
    sides = {side.path: side for pair in pairs for side in pair.sides}
    runs = {
        id(run): (side, run)
        for pair in pairs
        for side, of_side in zip(pair.sides, (pair.a_runs, pair.b_runs), strict=True)
        for run in of_side
    }
    return _merge_warnings(
        [
            *(warning for results in experiments for warning in _experiment_warnings(results)),
            *_pairing_warnings(a, b, pairs),
            *_exclusion_warnings(pairs),
            *(() if len(experiments) == 1 else machine_warnings(a, b)),
            *(
                ResultWarning(code=f"check-{check.name}", message=check.detail, where=run.record.run_id)
                for pair in pairs
                for run, check in pair.checks()
                if check.ok is False and not check.is_fatal
            ),
            *(each for side, run in runs.values() for each in (*_run_warnings(run), *side.unsteadiness(run))),
            *(warning for pair in pairs for warning in pair.prompt_differences()),
            *(each for side in sides.values() for each in carry_over_warnings(carry_over_of(side))),
            *(warning for pair in pairs for warning in prefix_warnings(pair.a_runs, pair.b_runs, pair.label)),
        ]
    )


def suspect_warnings(pairs: Sequence[ArmPair], names: tuple[str, str]) -> tuple[ResultWarning, ...]:
    """One warning with the number of suspect runs that count on each side, and the codes of their warnings."""
    counts = []
    for name, runs in zip(names, ([pair.a_runs for pair in pairs], [pair.b_runs for pair in pairs]), strict=True):
        records = {run.record.run_id: run.record for run in chain.from_iterable(runs)}.values()
        if suspect := [record for record in records if record.state == "suspect"]:
            codes = sorted({warning.code for record in suspect for warning in decisive_warnings(record)})
            reasons = ", ".join(codes) or "no reason recorded"
            counts.append(f"{len(suspect)} of {len(records)} runs of {name} ({reasons})")
    if not counts:
        return ()
    suspects = " and ".join(counts)
    message = f"suspect runs are counted (--allow-suspect): {suspects}; the verdict is only as good as they are"
    return (ResultWarning(code="suspect-counted", message=message),)


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


def _answer_warnings(cell: CellComparison) -> Iterator[ResultWarning]:
    """Greedy answers of drafting sides that differ from A's more often than A's from block to block.

    The same prompts part in every block, so the test (Fisher's, one-sided) counts the answers of one block.
    """
    divergence, has_drafts = cell.divergence, cell.a_drafts is not None or cell.b_drafts is not None
    if divergence is None or divergence.temperature != 0 or not has_drafts or cell.num_blocks < 2:
        return
    of_b, of_a = divergence.b_against_a, divergence.a_against_a
    if of_a is None or of_a.identical_frac is None or of_b.identical_frac is None:
        return
    table = []
    for side, blocks in ((of_b, cell.num_blocks), (of_a, cell.num_blocks - 1)):
        num_parted = round((side.num_pairs - side.num_identical) / blocks)
        table.append([num_parted, round(side.num_pairs / blocks) - num_parted])
    from scipy.stats import fisher_exact  # noqa: PLC0415 - 0.3 s, and few sides draft

    if fisher_exact(np.array(table), alternative="greater").pvalue < SURPRISING_P:
        message = (
            f"draft tokens change greedy answers: {of_b.identical_frac:.1%} are identical on both sides, and "
            f"{of_a.identical_frac:.1%} on side A from block to block"
        )
        yield ResultWarning(code="greedy-answers-differ", message=message, where=cell.label)


def _order_warnings(cell: CellComparison, metric: MetricComparison, num_tests: int) -> Iterator[ResultWarning]:
    """Effects with p < 0.01 over all tests (Bonferroni), so that many tests do not raise false alarms."""
    where = f"{metric.metric.name} in {cell.label}"
    effects = (
        {}
        if metric.order is None
        else {
            "position-effect": (
                metric.order.position,
                "a run takes {} for each position later in its block; the estimate is that of equal positions",
            ),
            "ratio-drift": (
                metric.order.ratio_drift,
                "the ratio itself moves by {} per block, so one number does not describe it; look at single blocks",
            ),
        }
    )
    for code, (effect, message) in effects.items():
        if effect is not None and effect.p_value < SURPRISING_P / num_tests:
            change = f"{math.expm1(effect.log_per_unit) * 100:+.2g}%"
            yield ResultWarning(code=code, message=message.format(change), where=where)
    if metric.outlier_blocks:
        yield ResultWarning(code="outlier-block", message=_describe_outliers(metric), where=where)


def _describe_outliers(metric: MetricComparison) -> str:
    """The outlier blocks, their weight in the estimate, and the estimate without them."""
    blocks = ", ".join(str(block) for block in metric.outlier_blocks)
    weight = "little" if metric.estimate is not None and metric.estimate.estimator == "robust" else "in full"
    is_one, estimate = len(metric.outlier_blocks) == 1, metric.without_outliers
    stands = f"block {blocks} stands out and counts" if is_one else f"blocks {blocks} stand out and count"
    without = f"{stands} {weight}; without {'it' if is_one else 'them'}"
    if estimate is None or estimate.ci_low is None or estimate.ci_high is None:
        return f"{without} nothing can be estimated"
    ends = (estimate.ratio, estimate.ci_low, estimate.ci_high)
    change, low, high = (f"{(end - 1) * 100:+.2f}%" for end in ends)
    return f"{without} the change would be {change} [{low}, {high}]"


def _experiment_warnings(results: LoadedResults) -> Iterable[ResultWarning]:
    where, state = str(results.path), results.manifest.state
    if state != "done":
        message = f"the experiment is {state}; 'benchctl run --resume {where}' continues it"
        yield ResultWarning(code="experiment-unfinished", message=message, where=where)
    yield from results.manifest.warnings


def _pairing_warnings(a: LoadedResults, b: LoadedResults, pairs: Sequence[ArmPair]) -> Iterable[ResultWarning]:
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


def _exclusion_warnings(pairs: Sequence[ArmPair]) -> Iterable[ResultWarning]:
    for pair in pairs:
        for arm, experiment in ((pair.a, pair.sides[0]), (pair.b, pair.sides[1])):
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


def change_text(metric: MetricComparison) -> str:
    """``+14.3% [+13.1%, +15.4%]``; the reason where there is no interval."""
    estimate = metric.estimate
    if estimate is None or metric.verdict == "equal":
        return {"equal": "=", "different": "differs"}.get(metric.verdict, "?")
    change = percentage_change(estimate.ratio - 1)
    if estimate.ci_low is None or estimate.ci_high is None:
        num_a, num_b = (sum(value is not None for value in side) for side in (metric.a_blocks, metric.b_blocks))
        few = count_of(num_a, "block") if estimate.is_paired else f"{num_a} against {num_b} runs"
        return f"{change} [unknown with {few}]"
    return f"{change} [{percentage_change(estimate.ci_low - 1)}, {percentage_change(estimate.ci_high - 1)}]"


def speed_line(cell: CellComparison) -> str | None:
    """Tokens per step over time per step of decode steps; None where no side drafts tokens or one is unknown."""
    metrics = {metric.metric.name: metric for metric in cell.metrics}
    tokens, time = metrics.get("tokens_per_step"), metrics.get("decode_step_ms")
    if cell.a_drafts is None and cell.b_drafts is None:
        return None
    if tokens is None or time is None or not (tokens.a and tokens.b and time.a and time.b):
        return None
    gain, cost = tokens.b / tokens.a, time.b / time.a
    return (
        f"decode steps: {tokens.a:.4g} to {tokens.b:.4g} tokens of a sequence per step (x{gain:.3f}) at "
        f"{time.a:.4g} to {time.b:.4g} ms per step (x{cost:.3f}) make x{gain / cost:.3f} tokens per second of a "
        "sequence"
    )


def margin_text(margin_frac: float) -> str:
    """A margin with its two ends, which are equal as factors but not in per cent."""
    low, high = percentage_change(1 / (1 + margin_frac) - 1), percentage_change(margin_frac)
    return f"{percentage(margin_frac)} ({low} to {high})"


def threshold_text(comparison: Comparison) -> str:
    """The threshold, and the margin of equivalence where one was named."""
    equivalence = comparison.rules.equivalence_margin_frac
    threshold = f"margin {margin_text(comparison.rules.margin_frac)}"
    return threshold if equivalence is None else f"{threshold}, of equivalence {margin_text(equivalence)}"


def floors_text(comparison: Comparison) -> str:
    """The largest noise floor of the deciding metrics; empty where no A/A experiment is on file."""
    if not comparison.noise:
        return ""
    name, noise = max(comparison.noise.items(), key=lambda item: item[1].floor_frac)
    decides = " decides where it exceeds the margin" if noise.floor_frac > comparison.rules.margin_frac else ""
    return f"noise floor up to {percentage(noise.floor_frac, 2)} ({name}){decides}"


def unrecorded_lines(comparison: Comparison) -> tuple[str, ...]:
    """One line for each set of primary metrics that a server does not record, with those that decide instead."""
    cells_of: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for cell in comparison.cells:
        if cell.unrecorded:
            deciding = tuple(metric.metric.name for metric in cell.deciding)
            cells_of.setdefault((cell.unrecorded, deciding), []).append(cell.label)
    return tuple(
        unrecorded_text(unrecorded, deciding)
        + ("" if len(labels) == len(comparison.cells) else f" ({'; '.join(labels)})")
        for (unrecorded, deciding), labels in cells_of.items()
    )


def difference_lines(differences: Iterable[Difference]) -> Iterator[str]:
    """One line for each setting, with its values in all cells; one for all settings of a section that only one side
    has.
    """
    values_of: dict[tuple[str, str], list[str]] = {}
    for difference in differences:
        cells = f" ({'; '.join(difference.cells)})" if difference.cells else ""
        values_of.setdefault((difference.key, difference.a), []).append(f"{difference.b}{cells}")
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, a in values_of:
        groups.setdefault(key.partition(".")[0] if a == ABSENT else f"{key}: {a}", []).append((key, a))
    for name, group in groups.items():
        if len(group) == 1:
            (key, a) = group[0]
            yield f"{key}: {a} against {', '.join(values_of[key, a])}"
        else:
            parts = (f"{key.partition('.')[2]} {', '.join(values_of[key, a])}" for key, a in group)
            yield f"{name}: {ABSENT} against {'; '.join(parts)}"


def looks_lines(comparison: Comparison) -> Iterator[str]:
    """The cost of each way in which the experiment could have ended earlier than it did."""
    confidence = percentage(comparison.rules.confidence, 4)
    if (times := comparison.num_extensions) > 0:
        how_often = {1: "once", 2: "twice"}.get(times, f"{times} times")
        yield f"blocks were added {how_often} after results were seen: intervals are those of {confidence}"
    elif comparison.num_looks > 1:
        yield (
            f"declared stopping rule: the experiment could end at {comparison.num_looks} looks; intervals and "
            f"verdicts of this one are those of {confidence}"
        )
