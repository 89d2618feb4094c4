"""``lenvm_summary.csv``: the columns of the LenVM project's own ``summary.csv``, by its definitions.

Misleading definitions are kept, because this file is made to be compared with theirs: ``n_requests`` counts lines,
latencies are over lines, percentiles of steps are interpolated and those of requests are not, all greedy steps are
left out, ``t_*_mean`` is over the steps that have the section, FLOPs are charged for every requested candidate.
Tokens are counted once for each request, a failed line hides no answer, and of several lives of a server those
count that answered. An unknown value has no column, or an empty cell.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchctl.analysis.experiment.columns import TIMED_SECTIONS, Value, number_of, published_columns
from benchctl.analysis.metrics.latency import percentiles, smallest_sample
from benchctl.costs.flops import RunTotals, published_flops
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.lenvm.directory import BASELINE, Arm

SUMMARY_NAME: Final = "lenvm_summary.csv"
RATIO_TAG: Final = "ratio (lvm/base)"
_GUIDED: Final = "lenvm"
Row: TypeAlias = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Base and value model, which no file of such a directory names."""

    base: str
    value: str
    is_assumed: bool


def lenvm_csv(arms: Sequence[Arm], models: Models) -> bytes:
    """A row for each arm, and one with the ratio of the arm ``lenvm`` to the baseline where there are both.

    Columns are the sorted union of all keys that a row knows, as there.
    """
    rows: dict[str, Row] = {
        arm.tag: {"tag": arm.tag, **_load(arm), **_steps(arm), **_flops(arm, models)} for arm in arms
    }
    if _GUIDED in rows:
        rows[RATIO_TAG] = _ratio(rows[BASELINE], rows[_GUIDED])
    columns = sorted({key for row in rows.values() for key, value in row.items() if value is not None})
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue().encode()


def _load(arm: Arm) -> Row:
    answered = arm.answered
    outputs = sorted(each.completion_tokens for each in answered if each.completion_tokens)
    latencies = sorted(row.elapsed_s for row in arm.rows if row.elapsed_s is not None)
    wall_s = arm.meta.wall_clock_s
    return {
        "n_requests": len(arm.rows),
        "total_output_tokens": sum(outputs),
        "total_prompt_tokens": sum(each.prompt_tokens or 0 for each in answered if not each.is_failed),
        "output_tokens_mean": _mean(outputs),
        "output_tokens_p95": _p95(outputs),
        "latency_s_mean": _mean(latencies),
        "latency_s_p95": _p95(latencies),
        "wall_clock_s": wall_s,
        "throughput_output_tokens_per_s": sum(outputs) / wall_s if wall_s and outputs else None,
        "top_k": arm.meta.top_k,
        "value_scale": arm.meta.value_scale,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _p95(ordered: Sequence[float]) -> float | None:
    """The value at index floor(0.95 n) of ascending values."""
    return ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)] if ordered else None


def _steps(arm: Arm) -> Row:
    records = [record for life in arm.lives for record in life if not record.is_greedy]
    if not records:
        return {}
    row: Row = {"n_steps": len(records), "n_steps_with_lvm": sum(record.is_active for record in records)}
    sizes = _statistics([float(record.batch_size) for record in records])
    row |= {f"batch_size_{name}": sizes[name] for name in ("mean", "p50", "p95")}
    for section in TIMED_SECTIONS:
        times = [record.sections_ms[section] for record in records if section in record.sections_ms]
        if times:
            row |= {f"t_{section}_ms_{name}": value for name, value in _statistics(times).items()}
    return row


def _statistics(values: Sequence[float]) -> dict[str, float]:
    total, tails = math.fsum(values), percentiles(values, smallest_sample(95), (50, 95))
    return {
        "mean": total / len(values),
        "p50": tails[50] or 0.0,
        "p95": tails[95] or 0.0,
        "sum": total,
        "count": len(values),
    }


def _flops(arm: Arm, models: Models) -> Row:
    """Published FLOPs in their columns; empty for an unknown shape, or without an answer."""
    answered = [each for each in arm.answered if not each.is_failed and each.completion_tokens]
    num_samples = arm.meta.n_samples_per_q or max((len(each.choices) for each in answered), default=0)
    num_questions = arm.meta.max_questions or len(answered)
    top_k = arm.meta.top_k if arm.meta.top_k is not None else int(arm.sampling.get("top_k", -1))
    try:
        base = shape_for(models.base)
        value_model = None if arm.tag == BASELINE else shape_for(models.value)
        totals = RunTotals(
            num_questions=num_questions,
            num_sequences=num_questions * num_samples,
            prompt_tokens=sum(each.prompt_tokens or 0 for each in answered),
            output_tokens=sum(each.completion_tokens or 0 for each in answered),
        )
    except UsageError:
        return {}
    account = published_flops(totals, base=base, value_model=value_model, top_k=top_k)
    is_guided = value_model is not None and top_k >= 1
    columns = published_columns(account, arm.meta.wall_clock_s)
    return {name: value for name, value in columns.items() if is_guided or not name.startswith("lvm_")}


def _ratio(base: Row, guided: Row) -> Row:
    """Guided over baseline for every number that both have and that is not 0 in the baseline."""
    numbers = {name: (number_of(value), number_of(guided.get(name))) for name, value in base.items()}
    ratios = {name: above / below for name, (below, above) in numbers.items() if below and above is not None}
    return {"tag": RATIO_TAG, **ratios}
