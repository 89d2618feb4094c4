"""Models as JSON documents: the law of speculation, the verdicts on backfill, step time."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from benchctl.analysis.bonus import MeasuredBonus, verdict_sentences
from benchctl.analysis.experiment.drafts import MeasuredSpeculation
from benchctl.records.schema import ResultWarning
from benchctl.steptime.diagnose import Diagnosis
from benchctl.steptime.evaluate import Accuracy, Evaluation
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.speculation_law import LEVEL, LONGEST, SpeculationLaw, WholeEstimate
from benchctl.steptime.speculation_load import ServedSpeculation


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
        "arms": [{"num_draft_tokens": arm.num_draft_tokens, **asdict(arm)} for arm in measured.arms],
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
        "batches": [
            {
                "batch_size": batch.rows,
                "best_num_draft_tokens": batch.best.num_draft_tokens,
                "points": [
                    {
                        "num_draft_tokens": point.num_draft_tokens,
                        "step_s": point.step.total_s,
                        **asdict(point.step),
                        "tokens": asdict(point.tokens),
                        "goodput_per_s": asdict(point.goodput_per_s),
                        "tpot_s": asdict(point.tpot_s),
                        "speed_up": asdict(point.speed_up),
                    }
                    for point in batch.points
                ],
            }
            for batch in served.batches
        ],
        "paying": [
            {"num_draft_tokens": num, "batches": None if ends is None else list(ends)}
            for num, ends in served.paying
        ],
        "rates": [
            {
                "requests_per_s": rate.rate_per_s,
                "best_num_draft_tokens": rate.best[0],
                "loads": [{"num_draft_tokens": num, **asdict(load)} for num, load in rate.loads],
            }
            for rate in served.rates
        ],
    }


def bonus_document(measured: MeasuredBonus) -> dict[str, Any]:
    """The output of ``benchctl micro bonus --json``: the verdicts."""
    return {"schema_version": 1, "results": str(measured.path), **verdicts_document(measured)}


def verdicts_document(measured: MeasuredBonus) -> dict[str, Any]:
    """Every row of every verdict, as ``summary.json`` and the page hold them."""
    return {
        "model": measured.model,
        "device": measured.device,
        "dtype": measured.dtype,
        "verdicts": [
            {
                "context_tokens": verdict.context_tokens,
                "confidence": verdict.confidence,
                "row_confidence": verdict.row_confidence,
                "comparisons": [
                    {
                        **{name: getattr(row, name) for name in ("batch_size", "bonus_tokens")},
                        **{name: getattr(row, name) for name in ("decode_mode", "prefill_mode", "num_blocks")},
                        **{
                            name: {"centre": cost_ns.value, "low": cost_ns.low, "high": cost_ns.high}
                            for name, cost_ns in (
                                ("decode_ns", row.decode_ns),
                                ("expansion_ns", row.expansion_ns),
                                ("prefill_ns", row.prefill_ns),
                                ("difference_ns", row.difference_ns),
                            )
                        },
                        "cheaper": row.cheaper,
                    }
                    for row in verdict.comparisons
                ],
                "sentences": verdict_sentences(verdict),
            }
            for verdict in measured.verdicts
        ],
        "missing": list(measured.missing),
    }


def model_document(model: StepTimeModel) -> dict[str, Any]:
    """Coefficients and provenance, without the bootstrap draws."""
    names = ("structure", "experts_read", "hardware", "tensor_parallel", "compute_scale", "memory_scale")
    return {
        **{name: getattr(model, name) for name in names},
        "coefficients": [asdict(coefficient) for coefficient in model.coefficients],
        "provenance": asdict(model.provenance),
    }


def bucket_document(buckets: dict[str, tuple[Accuracy, ...]]) -> dict[str, Any]:
    """Errors of each bucket by its kind."""
    return {kind: [asdict(accuracy) for accuracy in group] for kind, group in buckets.items()}


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Health, features and the runs to add; numbers that are infinite are null."""
    return {
        "is_finished": diagnosis.is_finished,
        "condition": _finite(diagnosis.condition),
        "columns": [{**asdict(column), "vif": _finite(column.vif)} for column in diagnosis.columns],
        "checks": [asdict(check) for check in diagnosis.checks],
        "buckets": bucket_document(diagnosis.buckets),
        "runs_to_add": [asdict(run) for run in diagnosis.runs_to_add],
    }


def evaluations_document(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Errors of each structure on all groups left out, and on each."""
    return [
        {
            "structure": evaluation.structure,
            "by": evaluation.by,
            "whole": asdict(evaluation.whole),
            "groups": [asdict(group) for group in evaluation.groups],
        }
        for evaluation in evaluations
    ]


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
