"""Results by node as a JSON document and as rows of ``nodes_summary.csv``.

A comparison as a JSON document: what ``compare --json`` prints and the report page carries.
An analyzed experiment as JSON documents, for ``--json`` and the exported files.
The law of speculation and its load as one JSON document.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from benchctl.analysis.attribution.estimate import StepFloor
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.nodes import NodeResults
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import reasons_of, verdict_sentence
from benchctl.analysis.drafts import MeasuredSpeculation
from benchctl.analysis.metrics.run import METRICS
from benchctl.analysis.metrics.speculation import ArmDrafts
from benchctl.analysis.quality.accuracy import divergence_sentence, quality_lines
from benchctl.analysis.quality.divergence import Divergence
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.analysis.statistics.intervals import OrderEffects, Slope
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.columns import Value
from benchctl.analysis.summary.flops_bridge import flops_bridge
from benchctl.analysis.summary.summary import CellSummary, SweepRow
from benchctl.analysis.validity.machines import machines_of
from benchctl.costs.hardware import Hardware
from benchctl.errors import InvalidDataError, NotComparableError
from benchctl.interop.writers.vllm import bounds_document
from benchctl.records.schema import SCHEMA_VERSION, ResultWarning
from benchctl.report.documents.decomposition import (
    decomposition_document,
    floor_document,
    ratio_document,
    verdicts_document,
)
from benchctl.steptime.speculation.acceptance import LEVEL
from benchctl.steptime.speculation.batch_load import BatchLoad, LoadPoint
from benchctl.steptime.speculation.draft_length import LONGEST, SpeculationLaw, WholeEstimate
from benchctl.steptime.speculation.rate_load import RateLoad
from benchctl.steptime.speculation.served import ServedSpeculation

NODE_COLUMNS: Final = ("variant", "cell", "metric", "node", "blocks", "ratio", "p")


def nodes_document(results: NodeResults) -> dict[str, Any]:
    """Every deciding metric by node; ``p`` is that of the F test of equal nodes."""
    return {
        "variant": results.variant,
        "confidence": results.confidence,
        "num_tests": results.num_tests,
        "metrics": [
            {
                "cell": metric.label,
                "name": metric.metric,
                "nodes": [row._asdict() for row in metric.rows],
                "over_blocks": ratio_document(metric.over_blocks),
                "p": metric.p_value,
            }
            for metric in results.metrics
        ],
    }


def node_values(variants: Iterable[NodeResults]) -> Iterator[Mapping[str, Value]]:
    """A row for each node in each metric of each cell."""
    for results in variants:
        for metric in results.metrics:
            for row in metric.rows:
                values = (results.variant, metric.label, metric.metric, *row, metric.p_value)
                yield dict(zip(NODE_COLUMNS, values, strict=True))


def document_of(comparison: Comparison) -> dict[str, Any]:
    """Everything of a comparison; units inside ``metrics`` are those of each metric, ratios are b / a."""
    return {
        "verdict": comparison.verdict,
        "exit_code": comparison.exit_code,
        "summary": verdict_sentence(comparison),
        "reasons": list(reasons_of(comparison)),
        "a": comparison.a_name,
        "b": comparison.b_name,
        "margin_frac": comparison.margin_frac,
        "equivalence_margin_frac": (
            comparison.margin_frac
            if comparison.equivalence_margin_frac is None
            else comparison.equivalence_margin_frac
        ),
        "confidence": comparison.confidence,
        "num_looks": comparison.num_looks,
        "num_extensions": comparison.num_extensions,
        "pairing": comparison.pairing,
        "num_tests": comparison.num_tests,
        "screening": comparison.is_screening,
        "noise": {name: msgspec.to_builtins(noise) for name, noise in comparison.noise.items()},
        "noise_source": comparison.noise_source or None,
        "cells": [_cell_document(cell) for cell in comparison.cells],
        "metrics": [_metric_document(cell, m) for cell in comparison.cells for m in cell.metrics],
        "nodes": None if comparison.nodes is None else nodes_document(comparison.nodes),
        "allowed_differences": [
            {"key": d.key, "a": d.a, "b": d.b, "cells": list(d.cells)} for d in comparison.allowed
        ],
        "warnings": [{"code": w.code, "message": w.message, "where": w.where} for w in comparison.warnings],
    }


def refusal_document(error: InvalidDataError) -> dict[str, Any]:
    """The same document for results that must not be compared or cannot be read."""
    differences = error.differences if isinstance(error, NotComparableError) else ()
    return {
        "verdict": "not-comparable" if isinstance(error, NotComparableError) else "invalid",
        "exit_code": error.exit_code,
        "summary": str(error).splitlines()[0],
        "reasons": list(differences) or [str(error)],
        "cells": [],
        "metrics": [],
        "allowed_differences": [],
        "warnings": [],
    }


def _cell_document(cell: CellComparison) -> dict[str, Any]:
    return {
        "cell": cell.label,
        "a": cell.a_label,
        "b": cell.b_label,
        "blocks": cell.num_blocks,
        "a_first": cell.num_a_first,
        "block_ids": list(cell.design.blocks),
        "positions": cell.design.positions,
        "verdict": cell.verdict,
        "errors": list(cell.errors),
        "unrecorded_metrics": list(cell.unrecorded),
        "decomposition": decomposition_document(cell.decomposition),
        "drafts": {"a": drafts_document(cell.a_drafts), "b": drafts_document(cell.b_drafts)},
        "quality": quality_document(cell),
        "divergence": divergence_document(cell),
    }


def drafts_document(drafts: ArmDrafts | None) -> dict[str, Any] | None:
    """Counts and acceptance of an arm's draft tokens; None where none were drafted."""
    if drafts is None:
        return None
    return {
        "drafts": drafts.counts.drafts,
        "draft_tokens": drafts.counts.draft_tokens,
        "accepted_tokens": drafts.counts.accepted_tokens,
        "acceptance_rate": drafts.acceptance_rate,
        "acceptance_length": drafts.acceptance_length,
        "positions": [
            {
                **asdict(position.pooled),
                "survival_interval": position.survival_interval,
                "conditional_interval": position.conditional_interval,
            }
            for position in drafts.positions
        ],
    }


def quality_document(cell: CellComparison) -> dict[str, Any] | None:
    """Judged answers; accuracies in [0, 1], differences in percentage points. Only ``note`` where none were."""
    if cell.quality is None:
        return None if cell.quality_note is None else {"note": cell.quality_note}
    values = asdict(cell.quality)
    values["pass_at"] = {str(k): {"a": a, "b": b} for k, (a, b) in cell.quality.pass_at.items()}
    return {**values, "decides": cell.is_quality_deciding, "lines": list(quality_lines(cell.quality))}


def divergence_document(cell: CellComparison) -> dict[str, Any] | None:
    """Identical texts and the position at which others diverge, of B against A and of A against itself."""
    divergence = cell.divergence
    if divergence is None:
        return None
    baseline = divergence.a_against_a
    return {
        "b_against_a": _divergence_values(divergence.b_against_a),
        "a_against_a": None if baseline is None else _divergence_values(baseline),
        "temperature": divergence.temperature,
        "summary": divergence_sentence(divergence),
    }


def _divergence_values(divergence: Divergence) -> dict[str, Any]:
    return {**asdict(divergence), "identical_frac": divergence.identical_frac}


def _metric_document(cell: CellComparison, metric: MetricComparison) -> dict[str, Any]:
    estimate = metric.estimate
    return {
        "name": metric.metric.name,
        "unit": metric.metric.unit,
        "cell": cell.label,
        "a": metric.a,
        "b": metric.b,
        "ratio": estimate.ratio if estimate else None,
        "ci_low": estimate.ci_low if estimate else None,
        "ci_high": estimate.ci_high if estimate else None,
        "blocks": estimate.num_blocks if estimate else cell.num_blocks,
        "verdict": metric.verdict,
        "reason": metric.reason,
        "margin_frac": metric.margins.change_frac,
        "change_margin_frac": metric.margins.change_frac,
        "equivalence_margin_frac": metric.margins.equivalence_frac,
        "judged_confidence": metric.judged_confidence,
        "judged_interval": _judged_interval(metric),
        "method": estimate.method if estimate else None,
        "estimator": estimate.estimator if estimate else None,
        "position_effect": estimate.position_effect if estimate else None,
        "block_weights": list(estimate.block_weights) if estimate else [],
        "order": _order_document(metric.order),
        "outlier_blocks": list(metric.outlier_blocks),
        "without_outliers": None if metric.without_outliers is None else ratio_document(metric.without_outliers),
        "is_unreliable": metric.is_unreliable,
        "runs_with_bounds": {"a": metric.num_bounded[0], "b": metric.num_bounded[1]},
        "p": estimate.p_value if estimate else None,
        "minimum_detectable_effect": estimate.minimum_detectable_effect if estimate else None,
        "exploratory": metric.role == "exploratory",
        "role": metric.role,
        "a_blocks": list(metric.a_blocks),
        "b_blocks": list(metric.b_blocks),
    }


def _judged_interval(metric: MetricComparison) -> list[float] | None:
    """The ratio's interval at the confidence that made the verdict."""
    if metric.estimate is None or metric.judged_confidence is None:
        return None
    interval = metric.estimate.interval_at(metric.judged_confidence)
    return None if interval is None else [math.exp(end) for end in interval]


def _order_document(order: OrderEffects | None) -> dict[str, Any] | None:
    """Slopes in logarithms of the value: per position in the block, per block."""
    if order is None:
        return None
    return {
        "per_position": _slope_document(order.position),
        "ratio_per_block": _slope_document(order.ratio_drift),
        "level_per_block": _slope_document(order.machine_drift),
    }


def _slope_document(slope: Slope | None) -> dict[str, float] | None:
    if slope is None:
        return None
    return {"log": slope.log_per_unit, "standard_error": slope.standard_error, "p": slope.p_value}


def summary_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """``summary.json``: every run, every cell over its blocks, findings and all warnings.

    ``machines`` are those that measured the runs. ``bonus`` is there for experiments that compare ways of backfill,
    ``nodes`` where blocks ran on more than one.
    """
    manifest = analysis.results.manifest
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": manifest.profile,
        "state": manifest.state,
        "baseline": manifest.baseline,
        "machines": msgspec.to_builtins(machines_of(analysis.results)),
        "runs": [dict(run.values) for run in analysis.runs],
        "bounds": {run.record.run_id: bounds_document(run.bounds) for run in analysis.runs if run.bounds},
        "cells": [_cell(cell) for cell in analysis.cells],
        "ladders": msgspec.to_builtins(analysis.ladders),
        **({} if analysis.bonus is None else {"bonus": verdicts_document(analysis.bonus)}),
        **({"nodes": [nodes_document(results) for results in analysis.nodes]} if analysis.nodes else {}),
        "findings": [
            {"code": finding.code, "sentence": finding.sentence, "numbers": dict(finding.numbers)}
            for finding in analysis.findings
        ],
        "warnings": msgspec.to_builtins(
            [*analysis.warnings, *(warning for run in analysis.runs for warning in run.warnings)]
        ),
        "damage": list(analysis.damage),
        "definitions": {name: f"{metric.formula} [{metric.unit}]" for name, metric in METRICS.items()},
    }


def sweep_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """``sweep_summary.json``: every cell against the baseline, with the ratios of its blocks."""
    manifest = analysis.results.manifest
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": manifest.profile,
        "baseline": manifest.baseline,
        "rows": [_sweep_row(row) for row in analysis.sweep],
        "infeasible": [_infeasible(cell) for cell in analysis.infeasible],
    }


def show_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """The output of ``benchctl show --json``: the summary, the sweep, the manifest and the runs not yet begun."""
    return summary_document(analysis) | {
        "path": str(analysis.results.source),
        "manifest": msgspec.to_builtins(analysis.results.manifest),
        "peaks": _peaks(analysis.experiment.hardware),
        "not_begun": [planned.run_id for planned in analysis.runs_not_begun],
        "sweep": sweep_document(analysis)["rows"],
        "infeasible": [_infeasible(cell) for cell in analysis.infeasible],
    }


def _peaks(hardware: Hardware | None) -> dict[str, Any] | None:
    """The peaks that FLOPs and bytes are compared with, and their origin; None where they are unknown."""
    names = ("name", "peak_flops_per_s", "bandwidth_bytes_per_s", "source", "measured_at")
    return None if hardware is None else {name: getattr(hardware, name) for name in names}


def _cell(cell: CellSummary) -> dict[str, Any]:
    return {
        "variant": cell.variant,
        "cell": cell.cell,
        "num_runs": len(cell.runs),
        "num_unusable": cell.num_unusable,
        "infeasible": cell.infeasible,
        "columns": {
            column: {"centre": spread.centre, "scatter_frac": spread.scatter_frac, "sd": spread.sd, "n": spread.n}
            for column, spread in cell.spreads.items()
        },
        "drafts": drafts_document(cell.drafts()),
        "flops_bridge": None if (bridge := flops_bridge(cell)) is None else msgspec.to_builtins(bridge),
    }


def _infeasible(cell: CellSummary) -> dict[str, Any]:
    return {"variant": cell.variant, "factors": cell.cell, "infeasible": cell.infeasible}


def _sweep_row(row: SweepRow) -> dict[str, Any]:
    return dict(row.values) | {
        "factors": row.cell,
        "step_floor": floor_document(row.floor) if isinstance(row.floor, StepFloor) else None,
        "step_floor_missing": row.floor if isinstance(row.floor, str) else None,
        "estimates": {quantity: _estimate(estimate) for quantity, estimate in row.estimates.items()},
        "blocks": [
            {"block": block, **{quantity: ratio.block_ratios.get(block) for quantity, ratio in row.ratios.items()}}
            for block in row.blocks
        ],
    }


def _estimate(estimate: RatioEstimate) -> dict[str, Any]:
    return ratio_document(estimate) | {"confidence": estimate.confidence, "p_value": estimate.p_value}


def speculation_document(
    law: SpeculationLaw,
    served: ServedSpeculation | None,
    measured: MeasuredSpeculation | None = None,
    warnings: Sequence[ResultWarning] = (),
) -> dict[str, Any]:
    """Every number of the tables; intervals have null bounds where the acceptance was stated, not counted."""
    acceptance = law.acceptance
    return {
        "acceptance": list(acceptance.values),
        "is_same_everywhere": acceptance.is_constant,
        "counts": [asdict(each) for each in acceptance.counts],
        "draft_cost": law.cost.draft,
        "backfill_cost": law.cost.backfill,
        "bonus": law.bonus,
        "level": LEVEL,
        "lengths": [asdict(length) for length in law.lengths],
        "best": _whole_document(law.best),
        "best_speed_up": asdict(law.best_speed_up),
        "break_even": _whole_document(law.break_even),
        "longest": LONGEST,
        "load": None if served is None else _served_document(served),
        "measured": None if measured is None else _measured_document(measured),
        "warnings": msgspec.to_builtins(warnings),
    }


def _measured_document(measured: MeasuredSpeculation) -> dict[str, Any]:
    costs = measured.costs
    return {
        "baseline": measured.baseline,
        "same_everywhere_p": measured.same_everywhere_p,
        "same_in_arms_p": measured.same_in_arms_p,
        "draft_cost": None if costs is None else asdict(costs.draft),
        "backfill_cost": None if costs is None or costs.backfill is None else asdict(costs.backfill),
        "arms": [
            {
                "num_draft_tokens": arm.num_draft_tokens,
                **asdict(arm),
                "tokens_agree": measured.tokens_agree(arm),
                "speed_up_agrees": measured.speed_up_agrees(arm),
            }
            for arm in measured.arms
        ],
    }


def _whole_document(estimate: WholeEstimate) -> dict[str, Any]:
    shares = [{"draft_tokens": num, "share_frac": share} for num, share in estimate.shares]
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "shares": shares}


def _served_document(served: ServedSpeculation) -> dict[str, Any]:
    return {
        "step_times": served.origin,
        "context": served.context,
        "backfill": served.backfill,
        "most_rows": served.most_rows,
        "memory_rows": served.memory_rows,
        "batches": [_batch_document(batch) for batch in served.batches],
        "paying": [
            {"num_draft_tokens": num, "batches": None if ends is None else list(ends)}
            for num, ends in served.paying
        ],
        "rates": [_rate_document(rate) for rate in served.rates],
    }


def _batch_document(batch: BatchLoad) -> dict[str, Any]:
    return {
        "batch_size": batch.rows,
        "best_num_draft_tokens": batch.best.num_draft_tokens,
        "points": [_point_document(point) for point in batch.points],
    }


def _point_document(point: LoadPoint) -> dict[str, Any]:
    return {
        "num_draft_tokens": point.num_draft_tokens,
        "step_s": point.step.total_s,
        **asdict(point.step),
        "tokens": asdict(point.tokens),
        "goodput_per_s": asdict(point.goodput_per_s),
        "tpot_s": asdict(point.tpot_s),
        "speed_up": asdict(point.speed_up),
    }


def _rate_document(rate: RateLoad) -> dict[str, Any]:
    return {
        "requests_per_s": rate.rate_per_s,
        "best_num_draft_tokens": rate.best[0],
        "loads": [{"num_draft_tokens": num, **asdict(load)} for num, load in rate.loads],
    }
