"""The LenVM project's own summary of an imported directory, and the warnings about it.

``lenvm_summary.csv`` has the columns of the project's own ``summary.csv``, by its definitions. Misleading
definitions are kept, because this file is made to be compared with theirs: ``n_requests`` counts lines, latencies
are over lines, percentiles of steps are interpolated and those of requests are not, all greedy steps are left out,
``t_*_mean`` is over the steps that have the section, FLOPs are charged for every requested candidate. Tokens are
counted once for each request, a failed line hides no answer, and of several lives of a server those count that
answered. An unknown value has no column, or an empty cell.

Warnings are about errors in the files, which are repaired here, and about the limits of the files. Each is given
once for the whole directory and names the arms that it concerns.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchctl.analysis.experiment.columns import TIMED_SECTIONS, Value, number_of, published_columns
from benchctl.analysis.metrics.latency import percentiles, smallest_sample
from benchctl.costs.flops import published_flops
from benchctl.costs.run_work import RunTotals
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.lenvm.directory import BASELINE, GPU, SAMPLING, Arm
from benchctl.interop.lenvm_log import load_ms, windows_of
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import IMPORT_LIMITS, IMPORT_REPAIRS, WARNING_TABLE
from benchctl.units import MS_PER_S

SUMMARY_NAME: Final = "lenvm_summary.csv"
RATIO_TAG: Final = "ratio (lvm/base)"
_GUIDED: Final = "lenvm"
Row: TypeAlias = dict[str, Value]
REPAIRS: Final = tuple(WARNING_TABLE[IMPORT_REPAIRS])
"""Codes of errors in the files that were repaired, or left out."""
_ORDER: Final = (*REPAIRS, *WARNING_TABLE[IMPORT_LIMITS])


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


def directory_warnings(arms: Sequence[Arm], models: Models) -> tuple[ResultWarning, ...]:
    """The warnings about a directory, errors before limits, each with the arms that it concerns."""
    of_arms = {arm.tag: _repairs(arm) | _limits(arm, arms) | _limits_of_steps(arm) for arm in arms}
    warnings = []
    for code in _ORDER:
        messages = {tag: texts[code] for tag, texts in of_arms.items() if texts.get(code)}
        if messages:
            is_same = len(set(messages.values())) == 1
            listed = "; ".join(f"{tag}: {text}" for tag, text in messages.items())
            message = next(iter(messages.values())) if is_same else listed
            warnings.append(ResultWarning(code=code, message=message, where=", ".join(messages)))
        elif code == "models-assumed" and models.is_assumed:
            assumption = f"no file names the models: FLOPs are those of {models.base} and {models.value}"
            message = f"{assumption}; name them with --model and --value-model"
            warnings.append(ResultWarning(code=code, message=message))
    return tuple(warnings)


def _repairs(arm: Arm) -> dict[str, str]:
    """Errors in the files of an arm that were repaired, by code."""
    most = max((each.num_rows for each in arm.answered if each.completion_tokens), default=0)
    num_failed = sum(each.is_failed for each in arm.answered)
    num_missing = max(0, (arm.meta.max_questions or 0) - len(arm.answered))
    cut = " and ".join(arm.paths[name].name for name, each in arm.damage.items() if each.is_cut)
    num_damaged = sum(each.num_lines for each in arm.damage.values())
    num_lives, num_counted = len(arm.all_lives), len(arm.lives)
    counted = "all are needed for the tokens of the answers and count"
    if num_counted < num_lives:
        counted = f"the last {num_counted} of them yielded the answers and count, the rest was left out"
    texts = {
        "usage-duplicated": (
            most > 1,
            (
                f"each choice of a request repeats the usage of the request, up to {most} times: it was counted "
                "once for each request"
            ),
        ),
        "questions-unanswered": (
            num_failed + num_missing > 0,
            f"{num_failed} questions failed and {num_missing} have no line",
        ),
        "line-cut": (bool(cut), f"{cut} ends within a line, which was left out"),
        "lines-damaged": (
            num_damaged > 0,
            f"{num_damaged} lines before the last are damaged and were left out",
        ),
        "log-restarted": (
            num_lives > 1,
            f"the step log has {num_lives} lives of a server, each counting from 1: {counted}",
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}


def _limits(arm: Arm, arms: Sequence[Arm]) -> dict[str, str]:
    """Limits of the files of an arm, by code."""
    unrecorded = ", ".join(name for name in SAMPLING if name not in arm.sampling)
    windows = list(windows_of(arm.averages))
    worst_ms = max((window.rounding_ms for window in windows), default=0.0)
    texts = {
        "overlap-differs": (
            arm.guidance is not None and any(other.guidance is None for other in arms),
            (
                "the project's scripts switch overlapped scheduling off on guided servers alone, so a difference "
                "to the baseline includes that; no file records how a server was started"
            ),
        ),
        "wall-holds-client": (
            arm.meta.wall_clock_s is not None,
            (
                "wall_clock_s of the meta file includes the start of the client, its imports and the loading of "
                "the dataset; wall_s here is first send to last answer, and theirs is in lenvm_summary.csv"
            ),
        ),
        "sends-reconstructed": (
            bool(arm.answered),
            (
                "no file records the times of sends: they are reconstructed from durations, which include "
                "retries, and concurrency"
            ),
        ),
        "gpu-unattributed": (
            GPU in arm.paths,
            "GPU samples are of every device of the host, including those that the server did not use",
        ),
        "sampling-unrecorded": (
            bool(unrecorded),
            f"{unrecorded}: recorded in no request and no command line; defaults are assumed",
        ),
        "averages-cumulative": (
            bool(windows),
            (
                "the server printed averages since its start and waited for the device around every section; "
                f"timing_windows.jsonl has the {len(windows)} windows between them, to within {worst_ms:.2g} ms, "
                "of the whole call alone"
            ),
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}


def _limits_of_steps(arm: Arm) -> dict[str, str]:
    """Limits of the step log of an arm, by code."""
    records = [record for life in arm.lives for record in life]
    if not records:
        return {"steps-unrecorded": "there is no step log, so single steps are unknown"}
    loads_ms = [load[1] for life in arm.lives if (load := load_ms(life)) is not None]
    num_own, num_greedy = sum(arm.num_start_up), sum(record.is_greedy for record in records)
    texts = {
        "steps-are-samplers": (
            True,
            (
                "the step log times the sampler alone and records neither the time nor the duration of a step: "
                "tables and charts of sections show the sampler, and step_ms is unknown"
            ),
        ),
        "sections-async": (
            any("lvm_forward" in record.sections_ms for record in records),
            (
                "sections are host time without waiting for the device: the first call that blocks is charged "
                "with the work queued before it (in lvm_build_pending the base model's own forward pass), and "
                "none is GPU time"
            ),
        ),
        "value-model-load-measured": (
            bool(loads_ms),
            (
                "the value model was loaded inside the first sampled step "
                f"({max(loads_ms, default=0.0) / MS_PER_S:.1f} s), and so inside the measured load"
            ),
        ),
        "greedy-records": (
            num_greedy > 0,
            (
                f"{num_greedy} of {len(records)} steps are greedy: {num_own} before the load are the server's own "
                f"and count as warm-up, {num_greedy - num_own} count as steps; the project's own columns leave all "
                "of them out"
            ),
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}
