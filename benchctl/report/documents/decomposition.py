"""A decomposition as a JSON document: factors that multiply, seconds that add up.

The verdicts on backfill of bonus tokens as JSON documents; times in nanoseconds.
A fit, its errors and its diagnosis as one JSON document.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution, StepFloor
from benchctl.analysis.attribution.splits import WallSplit
from benchctl.analysis.attribution.text import floor_line, model_line, sentence, wall_line
from benchctl.analysis.bonus.bonus import Comparison, Cost, MeasuredBonus, PublishedBeside
from benchctl.analysis.bonus.published import SOURCE
from benchctl.analysis.bonus.sentences import published_limits, verdict_sentences
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.steptime.diagnosis.diagnose import Diagnosis
from benchctl.steptime.diagnosis.evaluate import Evaluation
from benchctl.steptime.diagnosis.predictions import Accuracy
from benchctl.steptime.model import StepTimeModel


def decomposition_document(decomposition: Decomposition | None) -> dict[str, Any] | None:
    """Everything of a decomposition; times in seconds, factors and shares as numbers."""
    if decomposition is None:
        return None
    lines = [line(decomposition) for line in (wall_line, model_line, floor_line)]
    wall = decomposition.wall
    return {
        "sentence": sentence(decomposition),
        "lines": [line for line in lines if line is not None],
        "blocks": decomposition.num_blocks,
        "wall": None if wall is None else _wall_document(wall),
        "sections": _sections_document(decomposition),
        "work": _work_document(decomposition),
        "work_missing": decomposition.work if isinstance(decomposition.work, str) else None,
        "model": _model_document(decomposition),
        "model_missing": decomposition.model if isinstance(decomposition.model, str) else None,
    }


def _wall_document(wall: WallSplit) -> dict[str, Any]:
    return {
        "a_s": wall.a_s,
        "b_s": wall.b_s,
        **ratio_document(wall.total),
        "factors": [
            {
                "name": factor.name,
                "meaning": factor.meaning,
                **ratio_document(factor.estimate),
                "added_s": factor.added_s,
                "share": factor.share_of(wall.total),
            }
            for factor in wall.factors
        ],
    }


def ratio_document(estimate: RatioEstimate) -> dict[str, float | None]:
    """The ratio with both ends of its interval."""
    return {"ratio": estimate.ratio, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}


def _parts_document(whole: Contribution, parts: Iterable[Contribution]) -> dict[str, Any]:
    return {"whole": asdict(whole), "parts": [asdict(part) for part in parts]}


def _sections_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.sections
    if split is None:
        return None
    parts = _parts_document(split.whole, split.sections)
    return {**parts, "clock": split.clock_note, "unplaced": list(split.unplaced)}


def _work_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.work
    if isinstance(split, str):
        return None
    return {
        "model": f"roofline of {split.hardware}",
        **_parts_document(split.whole, split.parts),
        "unexplained_frac": split.rest.share_of(split.whole),
        "floor": None if split.floor is None else floor_document(split.floor),
    }


def floor_document(floor: StepFloor) -> dict[str, Any]:
    """The ratio of the steps at the peaks of a device, its causes, and the measured ratio."""
    low, high = floor.interval or (None, None)
    return {
        "hardware": floor.hardware,
        "ratio": floor.ratio,
        "causes": dict(floor.causes),
        "measured_ratio": floor.measured,
        "measured_ci_low": low,
        "measured_ci_high": high,
        "times_floor": floor.times_floor,
        "a_times_floor": floor.a_times_floor,
        "added_s": floor.added_s,
        "floor_added_s": floor.floor_added_s,
    }


def _model_document(decomposition: Decomposition) -> dict[str, Any] | None:
    split = decomposition.model
    if isinstance(split, str):
        return None
    return {
        "source": split.source.name,
        "held_out_mape_frac": split.source.mape_frac,
        **_parts_document(split.whole, split.parts),
        "predicted": asdict(split.predicted),
        "explained_frac": split.explained_frac,
    }


def bonus_document(measured: MeasuredBonus) -> dict[str, Any]:
    """The output of ``benchctl micro bonus --json``: the verdicts, beside the published numbers."""
    return {
        "schema_version": 1,
        "results": str(measured.path),
        **verdicts_document(measured),
        "published": {
            "source": SOURCE,
            "passes": [_published(each) for each in measured.published],
            "limits": published_limits(),
        },
    }


def verdicts_document(measured: MeasuredBonus) -> dict[str, Any]:
    """Every row of every verdict, as ``summary.json`` and the page hold them."""
    return {
        "model": measured.model,
        "device": measured.device,
        "dtype": measured.dtype,
        "verdicts": [
            {
                "context_tokens": design.context_tokens,
                "confidence": verdict.confidence,
                "row_confidence": verdict.row_confidence,
                "comparisons": [_row(row) for row in verdict.comparisons],
                "sentences": verdict_sentences(verdict),
            }
            for design, verdict in measured.verdicts
        ],
        "missing": list(measured.missing),
    }


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "batch_size": row.batch_size,
        "bonus_tokens": row.bonus_tokens,
        "decode_mode": row.decode_mode,
        "prefill_mode": row.prefill_mode,
        "num_blocks": row.num_blocks,
        "decode_ns": _cost(row.decode),
        "expansion_ns": _cost(row.expansion),
        "prefill_ns": _cost(row.prefill),
        "difference_ns": _cost(row.difference),
        "cheaper": row.cheaper,
    }


def _published(each: PublishedBeside) -> dict[str, Any]:
    return {
        "phase": each.phase,
        "mode": each.mode,
        "batch_size": each.batch_size,
        "published_ms": each.published_ms,
        "here_ns": None if each.cost is None else _cost(each.cost),
    }


def _cost(cost: Cost) -> dict[str, float | None]:
    return {"centre": cost.centre_ns, "low": cost.low_ns, "high": cost.high_ns}


def model_document(model: StepTimeModel) -> dict[str, Any]:
    """Coefficients and provenance, without the bootstrap draws."""
    return {
        "structure": model.structure,
        "experts_read": model.experts_read,
        "hardware": model.hardware,
        "tensor_parallel": list(model.tensor_parallel),
        "compute_scale": model.compute_scale,
        "memory_scale": model.memory_scale,
        "coefficients": [asdict(coefficient) for coefficient in model.coefficients],
        "overheads": None if model.overheads is None else asdict(model.overheads),
        "provenance": asdict(model.provenance),
    }


def evaluation_document(evaluation: Evaluation) -> dict[str, Any]:
    """Errors of a structure on all groups left out, and on each."""
    return {
        "structure": evaluation.structure,
        "by": evaluation.by,
        "whole": asdict(evaluation.whole),
        "groups": [asdict(group) for group in evaluation.groups],
    }


def bucket_document(buckets: dict[str, tuple[Accuracy, ...]]) -> dict[str, Any]:
    """Errors of each bucket by its kind."""
    return {kind: [asdict(accuracy) for accuracy in group] for kind, group in buckets.items()}


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Health, features, regions and the runs to add; numbers that are infinite are null."""
    return {
        "is_finished": diagnosis.is_finished,
        "condition": _finite(diagnosis.condition),
        "columns": [{**asdict(column), "vif": _finite(column.vif)} for column in diagnosis.columns],
        "checks": [asdict(check) for check in diagnosis.checks],
        "buckets": bucket_document(diagnosis.buckets),
        "gaps": [asdict(region) for region in diagnosis.gaps],
        "redundant": [asdict(region) for region in diagnosis.redundant],
        "runs_to_add": [asdict(run) for run in diagnosis.runs_to_add],
    }


def evaluations_document(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    return [evaluation_document(evaluation) for evaluation in evaluations]


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
