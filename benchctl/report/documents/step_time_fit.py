"""A fit, its errors and its diagnosis as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchctl.steptime.diagnosis.diagnose import Diagnosis
from benchctl.steptime.diagnosis.evaluate import Evaluation
from benchctl.steptime.diagnosis.predictions import Accuracy
from benchctl.steptime.model import StepTimeModel


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
