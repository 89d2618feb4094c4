"""A comparison, a directory and its verdict as JSON documents and as rows of CSV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.decomposition import MEANING, Decomposition
from benchctl.analysis.attribution.estimate import Split
from benchctl.analysis.compare.accuracy import divergence_sentence, quality_lines
from benchctl.analysis.compare.answer import reasons_of, verdict_sentence
from benchctl.analysis.compare.cells import NodeResults
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.experiment.summary import RunSummary, flops_bridge
from benchctl.analysis.metrics.run import ArmDrafts
from benchctl.analysis.metrics.table import METRICS, OF_SLO
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.analysis.validity.machines import machines_of
from benchctl.errors import InvalidDataError, NotComparableError
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.curve_tables import capacity_document, curve_rows
from benchctl.report.model_documents import verdicts_document
from benchctl.report.table import csv_bytes
from benchctl.report.verdicts import ComparisonVerdict, PageVerdict


def definitions(*analyses: AnalyzedExperiment) -> dict[str, str]:
    """Formula and unit of every metric that some of the experiments may have."""
    lacking = OF_SLO.intersection(*(each.lacks for each in analyses))
    return {name: f"{each.formula} [{each.unit}]" for name, each in METRICS.items() if name not in lacking}


def document_of(comparison: Comparison) -> dict[str, Any]:
    """Everything of a comparison; units inside ``metrics`` are those of each metric, ratios are b / a."""
    equivalence_frac = comparison.rules.equivalence_margin_frac
    return {
        "verdict": comparison.verdict,
        "exit_code": comparison.exit_code,
        "summary": verdict_sentence(comparison),
        "reasons": list(reasons_of(comparison)),
        "a": comparison.a_name,
        "b": comparison.b_name,
        "margin_frac": comparison.rules.margin_frac,
        "equivalence_margin_frac": comparison.rules.margin_frac if equivalence_frac is None else equivalence_frac,
        "confidence": comparison.rules.confidence,
        "num_looks": comparison.num_looks,
        "num_extensions": comparison.num_extensions,
        "pairing": comparison.pairing,
        "num_tests": comparison.num_tests,
        "screening": comparison.is_screening,
        "noise": {name: msgspec.to_builtins(noise) for name, noise in comparison.noise.items()},
        "noise_source": comparison.rules.noise_source or None,
        "cells": [_cell_document(cell) for cell in comparison.cells],
        "metrics": [metric_document(cell, m) for cell in comparison.cells for m in cell.metrics],
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


def verdict_document(verdict: PageVerdict) -> dict[str, Any]:
    """The verdict, and under ``comparisons`` the document of each comparison; those of controls decide nothing."""
    return {
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "comparisons": [
            {**comparison_document(one), "is_control": one.is_control, "sides": one.sides} for one in verdict.all
        ],
        "notes": list(verdict.notes),
        **({} if verdict.precision is None else {"precision": verdict.precision}),
    }


def comparison_document(one: ComparisonVerdict) -> dict[str, Any]:
    """One comparison; where none could be made, the reason in the same keys."""
    if one.comparison is not None:
        return document_of(one.comparison)
    return {
        "verdict": one.word,
        "exit_code": one.exit_code,
        "summary": one.sentence,
        "reasons": list(one.differences) or [one.problem],
        "a": one.a_name,
        "b": one.b_name,
        "cells": [],
        "metrics": [],
    }


_COLUMNS: Final = (
    *("cell", "name", "unit", "role", "a", "b", "ratio", "ci_low", "ci_high", "blocks", "p"),
    *("margin_frac", "equivalence_margin_frac", "judged_confidence", "minimum_detectable_effect"),
    *("estimator", "method", "verdict", "reason"),
)


def comparison_csv(comparison: Comparison) -> bytes:
    """One line for each metric in each cell; ratios are b / a."""
    return csv_bytes(_COLUMNS, document_of(comparison)["metrics"])


def comparisons_csv(comparisons: Mapping[str, Comparison]) -> bytes:
    """The lines of several comparisons; the first column is the name of each."""
    documents = {name: document_of(comparison) for name, comparison in comparisons.items()}
    rows = [{"sides": name, **row} for name, document in documents.items() for row in document["metrics"]]
    return csv_bytes(("sides", *_COLUMNS), rows)


def _cell_document(cell: CellComparison) -> dict[str, Any]:
    divergence, decomposition = cell.divergence, cell.decomposition
    of_divergence = None
    if divergence is not None:
        sides = {"b_against_a": divergence.b_against_a, "a_against_a": divergence.a_against_a}
        of_divergence = {
            **{
                name: None if each is None else {**asdict(each), "identical_frac": each.identical_frac}
                for name, each in sides.items()
            },
            "temperature": divergence.temperature,
            "summary": divergence_sentence(divergence),
        }
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
        "decomposition": None if decomposition is None else _decomposition_document(decomposition, cell.cause),
        "drafts": {"a": _drafts_document(cell.a_drafts), "b": _drafts_document(cell.b_drafts)},
        "quality": quality_document(cell),
        "divergence": of_divergence,
    }


def metric_document(cell: CellComparison, metric: MetricComparison) -> dict[str, Any]:
    """One metric in one cell; the slopes of ``order``, by position and by block, are of logarithms of the value."""
    estimate, order, judged = metric.estimate, metric.order, None
    if estimate is not None and metric.judged_confidence is not None:
        judged = estimate.interval_at(metric.judged_confidence)
    slopes = {
        name: None
        if slope is None
        else {"log": slope.log_per_unit, "standard_error": slope.standard_error, "p": slope.p_value}
        for name, slope in (
            ()
            if order is None
            else (
                ("per_position", order.position),
                ("ratio_per_block", order.ratio_drift),
                ("level_per_block", order.machine_drift),
            )
        )
    }
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
        "judged_interval": None if judged is None else [math.exp(end) for end in judged],
        "method": estimate.method if estimate else None,
        "estimator": estimate.estimator if estimate else None,
        "position_effect": estimate.position_effect if estimate else None,
        "block_weights": list(estimate.block_weights) if estimate else [],
        "order": None if order is None else slopes,
        "outlier_blocks": list(metric.outlier_blocks),
        "without_outliers": None if metric.without_outliers is None else _ratio(metric.without_outliers),
        "is_unreliable": metric.is_unreliable,
        "p": estimate.p_value if estimate else None,
        "minimum_detectable_effect": estimate.minimum_detectable_effect if estimate else None,
        "exploratory": metric.role == "exploratory",
        "role": metric.role,
        "a_blocks": list(metric.a_blocks),
        "b_blocks": list(metric.b_blocks),
    }


def _drafts_document(drafts: ArmDrafts | None) -> dict[str, Any] | None:
    """Counts and acceptance of an arm's draft tokens; None where none were drafted."""
    if drafts is None:
        return None
    return {
        **drafts.counts.metrics,
        "positions": [asdict(position) for position in drafts.positions],
    }


def quality_document(cell: CellComparison) -> dict[str, Any] | None:
    """Judged answers; accuracies in [0, 1], differences in percentage points. Only ``note`` where none were."""
    if cell.quality is None:
        return None if cell.quality_note is None else {"note": cell.quality_note}
    pass_at = {str(k): {"a": a, "b": b} for k, (a, b) in cell.quality.pass_at.items()}
    lines = list(quality_lines(cell.quality))
    return {**asdict(cell.quality), "pass_at": pass_at, "decides": cell.is_quality_deciding, "lines": lines}


def _decomposition_document(of: Decomposition, cause: str | None) -> dict[str, Any]:
    """Everything of a decomposition; times in seconds, factors and shares as numbers."""
    wall, sections, work, model = of.wall, of.sections, of.work, of.model
    return {
        "sentence": cause,
        "blocks": of.num_blocks,
        "wall": None
        if wall is None
        else {
            "a_s": wall.whole.a_s,
            "b_s": wall.whole.b_s,
            **_ratio(wall.whole.estimate),
            "factors": [
                {
                    "name": factor.name,
                    "meaning": MEANING[factor.name],
                    **_ratio(factor.estimate),
                    "added_s": factor.added_s,
                    "share": factor.share_of(wall.whole),
                }
                for factor in wall.parts
            ],
        },
        "sections": None
        if sections is None
        else {
            "whole": asdict(sections.whole),
            "parts": [asdict(part) for part in sections.parts],
            "clock": sections.origin,
            "unplaced": list(sections.unplaced),
        },
        "work": _work_document(work),
        "work_missing": work if isinstance(work, str) else None,
        "model": None
        if isinstance(model, str)
        else {
            "source": model.origin,
            "held_out_mape_frac": model.mape_frac,
            "whole": asdict(model.whole),
            "parts": [asdict(part) for part in model.parts],
            "predicted": None if model.predicted is None else asdict(model.predicted),
            "explained_frac": model.explained_frac,
        },
        "model_missing": model if isinstance(model, str) else None,
    }


def _ratio(estimate: RatioEstimate) -> dict[str, float | None]:
    """The ratio with both ends of its interval."""
    return {"ratio": estimate.ratio, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def _work_document(work: Split | str) -> dict[str, Any] | None:
    """The mean step by the floors of the models; None where these are unknown."""
    if isinstance(work, str):
        return None
    return {
        "model": f"roofline of {work.origin}",
        "whole": asdict(work.whole),
        "parts": [asdict(part) for part in work.parts],
        "unexplained_frac": work.rest.share_of(work.whole),
    }


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
                "over_blocks": _ratio(metric.over_blocks),
                "p": metric.p_value,
            }
            for metric in results.metrics
        ],
    }


def node_values(variants: Sequence[NodeResults]) -> list[dict[str, Any]]:
    """A row for each node in each metric of each cell."""
    return [
        dict(zip(NODE_COLUMNS, (results.variant, metric.label, metric.metric, *row, metric.p_value), strict=True))
        for results in variants
        for metric in results.metrics
        for row in metric.rows
    ]


def summary_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """``summary.json``: every run, every cell over its blocks, findings and all warnings.

    ``machines`` are those that measured the runs. ``bonus`` is there for experiments that compare ways of backfill,
    ``nodes`` where blocks ran on more than one, ``capacities`` where the profile asks for one.
    """
    manifest = analysis.results.manifest
    cells = [
        {
            "variant": cell.variant,
            "cell": cell.cell,
            "num_runs": len(cell.runs),
            "num_unusable": cell.num_unusable,
            "infeasible": cell.infeasible,
            "columns": {
                column: {name: getattr(spread, name) for name in ("centre", "scatter_frac", "sd", "n")}
                for column, spread in cell.spreads.items()
            },
            "drafts": _drafts_document(cell.drafts()),
            "flops_bridge": flops_bridge(cell),
        }
        for cell in analysis.cells
    ]
    curves = [
        {"metrics": curve.metrics, "points": [*curve_rows(curve)], "knees": [*curve.knees.items()]}
        for curve in analysis.curves
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": manifest.profile,
        "state": manifest.state,
        "baseline": manifest.baseline,
        "machines": msgspec.to_builtins(machines_of(analysis.results)),
        "runs": [_run_document(run) for run in analysis.runs],
        "cells": cells,
        "ladders": msgspec.to_builtins(analysis.ladders),
        **({} if analysis.bonus is None else {"bonus": verdicts_document(analysis.bonus)}),
        **({"curves": curves} if curves else {}),
        **({"nodes": [nodes_document(results) for results in analysis.nodes]} if analysis.nodes else {}),
        **({"capacities": [*map(capacity_document, analysis.capacities)]} if analysis.capacities else {}),
        **({"scatter": _scatter_document(analysis)} if analysis.scatter else {}),
        **({"carry_over": msgspec.to_builtins(analysis.carry_over)} if analysis.carry_over else {}),
        "findings": [
            {"code": finding.code, "sentence": finding.sentence, "numbers": dict(finding.numbers)}
            for finding in analysis.findings
        ],
        "warnings": msgspec.to_builtins(
            [*analysis.warnings, *(warning for run in analysis.runs for warning in run.warnings)]
        ),
        "damage": list(analysis.damage),
        "definitions": definitions(analysis),
    }


def _scatter_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """Variance components of the primary metrics, as fractions, and what the declared precision costs."""
    return {
        "metrics": {
            name: {part: asdict(getattr(each, part)) for part in ("between", "within", "drift")}
            for name, each in analysis.scatter.items()
        },
        "precision": analysis.precision,
    }


def _run_document(run: RunSummary) -> dict[str, Any]:
    """Its row; with the metrics of each of several loads that counts."""
    loads = zip(run.run.several, run.experiment.load_metrics(run.run), strict=False)
    several = [{"load": load.load, **metrics} for load, metrics in loads]
    return {**run.values, **({"loads": several} if several else {})}


def sweep_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """``sweep_summary.json``: every cell against the baseline, with the ratios of its blocks."""
    manifest = analysis.results.manifest
    rows = [
        dict(row.values)
        | {
            "factors": row.cell,
            "work": _work_document(row.work),
            "work_missing": row.work if isinstance(row.work, str) else None,
            "estimates": {
                quantity: _ratio(estimate) | {"confidence": estimate.confidence, "p_value": estimate.p_value}
                for quantity, estimate in row.estimates.items()
            },
            "blocks": [
                {"block": block, **{name: ratio.block_ratios.get(block) for name, ratio in row.ratios.items()}}
                for block in row.pair.blocks
            ],
        }
        for row in analysis.sweep
    ]
    infeasible = [
        {"variant": cell.variant, "factors": cell.cell, "infeasible": cell.infeasible}
        for cell in analysis.infeasible
    ]
    head = {"schema_version": SCHEMA_VERSION, "profile": manifest.profile, "baseline": manifest.baseline}
    return {**head, "rows": rows, "infeasible": infeasible}


def show_document(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """The output of ``benchctl show --json``: the summary, the sweep, the manifest and the runs not yet begun.

    ``peaks`` are those that FLOPs and bytes are compared with, and their origin.
    """
    hardware, sweep = analysis.experiment.hardware, sweep_document(analysis)
    names = ("name", "peak_flops_per_s", "bandwidth_bytes_per_s", "source", "measured_at")
    return summary_document(analysis) | {
        "path": str(analysis.results.path),
        "manifest": msgspec.to_builtins(analysis.results.manifest),
        "peaks": None if hardware is None else {name: getattr(hardware, name) for name in names},
        "not_begun": [planned.run_id for planned in analysis.runs_not_begun],
        "sweep": sweep["rows"],
        "infeasible": sweep["infeasible"],
    }
