"""An analyzed experiment as JSON documents, for ``--json`` and the exported files."""

from typing import Any

import msgspec

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.work_split import StepFloor
from benchctl.analysis.metrics.run_metrics import METRICS
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.summary.flops_bridge import flops_bridge
from benchctl.analysis.summary.runs import CellSummary
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.analysis.validity.comparability.machines import machines_of
from benchctl.costs.hardware import Hardware
from benchctl.interop.writers.vllm import bounds_document
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.documents.bonus import verdicts_document
from benchctl.report.documents.comparison import drafts_document
from benchctl.report.documents.decomposition import floor_document, ratio_document
from benchctl.report.documents.nodes import nodes_document


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
