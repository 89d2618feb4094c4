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
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from benchctl.analysis.experiment.columns import TIMED_SECTIONS
from benchctl.analysis.metrics.latency import percentiles, smallest_sample
from benchctl.costs.flops import FlopsAccount, RunTotals, published_flops
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.lenvm.directory import ArmData
from benchctl.interop.lenvm.records import Models
from benchctl.units import PETA, TERA

SUMMARY_NAME: Final = "lenvm_summary.csv"
RATIO_TAG: Final = "ratio (lvm/base)"
Cell: TypeAlias = str | int | float
Row: TypeAlias = dict[str, Cell]


def lenvm_rows(arms: Sequence[ArmData], models: Models) -> list[Row]:
    """A row for each arm, and one with the ratio of the arm ``lenvm`` to the baseline where there are both."""
    rows: list[Row] = [{"tag": arm.tag, **_load(arm), **_steps(arm), **_flops(arm, models)} for arm in arms]
    by_tag = {arm.tag: row for arm, row in zip(arms, rows, strict=True)}
    if "lenvm" in by_tag:
        rows.append(_ratio(by_tag["baseline"], by_tag["lenvm"]))
    return rows


def rows_csv(rows: Sequence[Mapping[str, Cell]]) -> bytes:
    """Columns are the sorted union of all keys, as there."""
    text = io.StringIO()
    writer = csv.DictWriter(text, sorted({key for row in rows for key in row}), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _load(arm: ArmData) -> Row:
    answered = arm.responses.answered
    outputs = sorted(a.completion_tokens for a in answered if a.completion_tokens)
    latencies = sorted(arm.responses.row_latencies_s)
    row: Row = {
        "n_requests": arm.responses.num_rows,
        "total_output_tokens": sum(outputs),
        "total_prompt_tokens": sum(a.prompt_tokens or 0 for a in answered if a.error is None),
    }
    if outputs:
        row |= {"output_tokens_mean": sum(outputs) / len(outputs), "output_tokens_p95": _cut(outputs, 0.95)}
    if latencies:
        row |= {"latency_s_mean": sum(latencies) / len(latencies), "latency_s_p95": _cut(latencies, 0.95)}
    wall_s = arm.meta.wall_clock_s
    if wall_s is not None:
        row["wall_clock_s"] = wall_s
    if wall_s and outputs:
        row["throughput_output_tokens_per_s"] = sum(outputs) / wall_s
    for name, value in (("top_k", arm.meta.top_k), ("value_scale", arm.meta.value_scale)):
        if value is not None:
            row[name] = value
    return row


def _steps(arm: ArmData) -> Row:
    records = [record for life in arm.lives for record in life if not record.is_greedy]
    if not records:
        return {}
    row: Row = {"n_steps": len(records), "n_steps_with_lvm": sum(record.is_active for record in records)}
    sizes = [float(record.batch_size) for record in records]
    row |= {
        f"batch_size_{name}": value for name, value in _statistics(sizes).items() if name in {"mean", "p50", "p95"}
    }
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


def _cut(ordered: Sequence[float], fraction: float) -> float:
    """The value at index floor(n p) of ascending values."""
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)]


def _flops(arm: ArmData, models: Models) -> Row:
    answered = [a for a in arm.responses.answered if a.error is None and a.completion_tokens]
    num_samples = arm.meta.n_samples_per_q or (max(len(a.choices) for a in answered) if answered else 0)
    num_questions = arm.meta.max_questions or len(answered)
    top_k = arm.meta.top_k if arm.meta.top_k is not None else int(arm.sampling.get("top_k", -1))
    try:
        base = shape_for(models.base)
        value_model = None if arm.is_baseline else shape_for(models.value)
        totals = RunTotals(
            num_questions=num_questions,
            num_sequences=num_questions * num_samples,
            prompt_tokens=sum(a.prompt_tokens or 0 for a in answered),
            output_tokens=sum(a.completion_tokens or 0 for a in answered),
        )
    except UsageError:  # an unknown shape, or no answer
        return {}
    account = published_flops(totals, base=base, value_model=value_model, top_k=top_k)
    return _flops_columns(account, arm, has_value=value_model is not None and top_k >= 1)


def _flops_columns(account: FlopsAccount, arm: ArmData, *, has_value: bool) -> Row:
    parts: dict[str, int] = {
        "base_pflops_prefill": account.base_prefill.total,
        "base_pflops_decode": account.base_decode.total,
        "base_pflops_linear": account.base.linear,
        "base_pflops_attention": account.base.attention,
        "base_pflops_lm_head": account.base.head,
        "base_pflops_total": account.base.total,
        "theoretical_pflops_total": account.total,
    }
    if has_value:
        parts |= {
            "lvm_pflops_prefill": account.value_prefill.total,
            "lvm_pflops_extend": account.value_extend.total,
            "lvm_pflops_candidates": account.value_candidates.total,
            "lvm_pflops_total": account.value.total,
        }
    row: Row = {name: flops / PETA for name, flops in parts.items()}
    if (per_token := account.gflops_per_output_token) is not None:
        row["theoretical_gflops_per_output_token"] = per_token
    if arm.meta.wall_clock_s:
        row["achieved_tflops_per_s"] = account.total / arm.meta.wall_clock_s / TERA
    return row


def _ratio(base: Row, guided: Row) -> Row:
    """Guided over baseline for every number that both have and that is not 0 in the baseline."""
    row: Row = {"tag": RATIO_TAG}
    for name, below in base.items():
        above = guided.get(name)
        if isinstance(below, int | float) and isinstance(above, int | float) and below:
            row[name] = above / below
    return row
