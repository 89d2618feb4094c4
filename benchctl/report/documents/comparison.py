"""A comparison as a JSON document: what ``compare --json`` prints and the report page carries."""

import math
from dataclasses import asdict
from typing import Any

import msgspec

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.text import reasons_of, verdict_sentence
from benchctl.analysis.quality.divergence import Divergence
from benchctl.analysis.quality.text import divergence_sentence, quality_lines
from benchctl.analysis.statistics.block_order import OrderEffects, Slope
from benchctl.analysis.summary.arm_drafts import ArmDrafts
from benchctl.errors import InvalidDataError, NotComparableError
from benchctl.report.documents.decomposition import decomposition_document, ratio_document
from benchctl.report.documents.nodes import nodes_document


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
