"""The columns of a run's row, and how each is filled.

``METRICS`` come last. Of the others, ``t_*_ms_mean`` is the mean over the steps that have the section, so these do
not add up (the breakdown does); ``*_pflops_*`` and ``theoretical_*`` follow the rule that the LenVM project
publishes, and ``observed_*`` counts what the step log shows.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final, TypeAlias

from benchctl.analysis.attribution.flops import RunFlops
from benchctl.analysis.metrics.latency import (
    is_completed,
    known_values,
    measured,
    percentiles,
    quotient,
)
from benchctl.analysis.metrics.loads import mean_metrics
from benchctl.analysis.metrics.run import num_guided_steps
from benchctl.analysis.metrics.table import CLIENT_TIMED, METRICS, OF_SLO, POSITION_ADJUSTED
from benchctl.costs.flops import FlopsAccount, achieved_flops_per_s
from benchctl.profile.model import VariantSettings
from benchctl.records.columns import StepColumns
from benchctl.records.directory import cell_name
from benchctl.records.loaded import LoadedRun
from benchctl.units import NS_PER_MS, PETA, TERA

Value: TypeAlias = str | int | float | bool | None

TIMED_SECTIONS: Final = (
    "sampler_total",
    "pre_lvm",
    "lvm_apply_outer",
    "lvm_build_pending",
    "lvm_forward",
    "lvm_apply_guidance",
    "sample",
)
"""The sections of the published timing log."""

_STATISTICS: Final = ("mean", "p50", "p95", "sum", "count")
SUMMARY_COLUMNS: Final[tuple[str, ...]] = (
    *("run_id", "variant", "cell", "block", "position", "state", "attempt", "failure", "clock"),
    *("top_k", "value_scale", "few_requests", "output_tokens_mean", "output_tokens_p95"),
    *("n_steps_with_lvm", "batch_size_p50", "batch_size_p95"),
    *(f"t_{section}_ms_{statistic}" for section in TIMED_SECTIONS for statistic in _STATISTICS),
    *(f"base_pflops_{part}" for part in ("prefill", "decode", "linear", "attention", "lm_head", "total")),
    *(f"lvm_pflops_{part}" for part in ("prefill", "extend", "candidates", "total")),
    *("theoretical_pflops_total", "theoretical_gflops_per_output_token", "achieved_tflops_per_s"),
    *("observed_base_pflops", "observed_lvm_pflops", "observed_draft_pflops", "observed_pflops_total"),
    *("observed_gflops_per_output_token", "observed_achieved_tflops_per_s"),
    *METRICS,
)
LABEL_COLUMNS: Final = frozenset({"block", "position", "attempt"})
"""Columns whose numbers are labels, so a mean of them has no meaning."""
CLIENT_COLUMNS: Final = CLIENT_TIMED | {"achieved_tflops_per_s", "observed_achieved_tflops_per_s"}
"""Columns that rest on the client's times."""
TIME_COLUMNS: Final = POSITION_ADJUSTED | (CLIENT_COLUMNS - CLIENT_TIMED)
"""Columns that drift within a block changes."""


def summary_row(
    run: LoadedRun,
    metrics: Mapping[str, float | None],
    tails: Mapping[str, float],
    settings: VariantSettings | None,
    flops: RunFlops | None,
) -> dict[str, Value]:
    """A value for every column of ``SUMMARY_COLUMNS``, in their order; None if it is unknown. Those of an objective
    are left out where ``metrics`` lack them.

    ``few_requests`` names the percentiles in ``tails``, those of too few requests, such as ``p95 p99``.
    """
    return dict.fromkeys(column for column in SUMMARY_COLUMNS if column in metrics or column not in OF_SLO) | {
        **_identity(run, settings),
        **_output_columns(run),
        **_step_columns(run.columns),
        **published_columns(None if flops is None else flops.published, metrics["wall_s"]),
        **_observed_columns(None if flops is None else flops.observed, metrics["wall_s"]),
        **metrics,
        **tails,
        "few_requests": " ".join(sorted({name.partition("_")[0] for name in tails})) or None,
    }


def mean_row(
    run: LoadedRun, loads: Sequence[Mapping[str, Value]], settings: VariantSettings | None
) -> dict[str, Value]:
    """The row of a run whose server got several loads: the mean of their rows, and what identifies the run."""
    numbers = mean_metrics([{name: number_of(value) for name, value in row.items()} for row in loads])
    return {**loads[0], **{name: number for name, number in numbers.items() if number is not None}} | _identity(
        run, settings
    )


def _identity(run: LoadedRun, settings: VariantSettings | None) -> dict[str, Value]:
    record = run.record
    guidance = None if settings is None else settings.guidance
    return {
        "top_k": None if settings is None else settings.sampling.top_k,
        "value_scale": None if guidance is None else guidance.value_scale,
        "run_id": record.run_id,
        "variant": record.variant,
        "cell": cell_name(record.cell),
        "block": record.block,
        "position": record.position,
        "state": record.state,
        "attempt": record.attempt,
        "failure": None if record.failure is None else record.failure.cause,
        "clock": record.clock,
    }


def _output_columns(run: LoadedRun) -> dict[str, Value]:
    tokens = known_values(r.completion_tokens for r in measured(run.requests) if is_completed(r))
    return {
        "output_tokens_mean": fmean(tokens) if tokens else None,
        "output_tokens_p95": percentiles(tokens, len(tokens), (95,))[95],
    }


def _step_columns(steps: StepColumns) -> dict[str, Value]:
    tails = percentiles(steps.num_seqs, len(steps), (50, 95))
    columns: dict[str, Value] = {"batch_size_p50": tails[50], "batch_size_p95": tails[95]}
    columns["n_steps_with_lvm"] = num_guided_steps(steps)
    section_ns, has_section = steps.section_ns, steps.has_section
    for section in TIMED_SECTIONS:
        if section in section_ns:
            times_ms = section_ns[section][has_section[section]] / NS_PER_MS
            tails = percentiles(times_ms, len(times_ms), (50, 95))
            total_ms = math.fsum(times_ms.tolist())
            values = (total_ms / len(times_ms), tails[50], tails[95], total_ms, len(times_ms))
            columns |= {f"t_{section}_ms_{name}": value for name, value in zip(_STATISTICS, values, strict=True)}
    return columns


def published_columns(account: FlopsAccount | None, wall_s: float | None) -> dict[str, Value]:
    """FLOPs by the published rule, under the names of the LenVM project; ``wall_s`` is that of the run."""
    if account is None:
        return {}
    return {
        "base_pflops_prefill": account.of("base_prefill").total / PETA,
        "base_pflops_decode": account.of("base_decode").total / PETA,
        "base_pflops_linear": account.of("base").linear / PETA,
        "base_pflops_attention": account.of("base").attention / PETA,
        "base_pflops_lm_head": account.of("base").head / PETA,
        "base_pflops_total": account.of("base").total / PETA,
        "theoretical_pflops_total": account.total / PETA,
        "theoretical_gflops_per_output_token": account.gflops_per_output_token,
        "achieved_tflops_per_s": quotient(achieved_flops_per_s(account.total, wall_s), TERA),
        "lvm_pflops_prefill": account.of("value_prefill").total / PETA,
        "lvm_pflops_extend": account.of("value_extend").total / PETA,
        "lvm_pflops_candidates": account.of("value_candidates").total / PETA,
        "lvm_pflops_total": account.of("value").total / PETA,
    }


def _observed_columns(account: FlopsAccount | None, wall_s: float | None) -> dict[str, Value]:
    if account is None:
        return {}
    return {
        "observed_base_pflops": account.of("base").total / PETA,
        "observed_lvm_pflops": account.of("value").total / PETA,
        "observed_draft_pflops": account.of("draft").total / PETA,
        "observed_pflops_total": account.total / PETA,
        "observed_gflops_per_output_token": account.gflops_per_output_token,
        "observed_achieved_tflops_per_s": quotient(achieved_flops_per_s(account.total, wall_s), TERA),
    }


def number_of(value: Value) -> float | None:
    """The value of a column as a number; None if it is unknown or text."""
    return None if value is None or isinstance(value, str) else float(value)
