"""The law of speculation and its load as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from benchctl.analysis.summary.speculation import MeasuredSpeculation
from benchctl.records.record import ResultWarning
from benchctl.steptime.speculation.acceptance import LEVEL
from benchctl.steptime.speculation.batch_load import BatchLoad, LoadPoint
from benchctl.steptime.speculation.draft_length import LONGEST, SpeculationLaw, WholeEstimate
from benchctl.steptime.speculation.rate_load import RateLoad
from benchctl.steptime.speculation.served import ServedSpeculation


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
