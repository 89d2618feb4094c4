"""The steps of a log as the columns that the analysis reads, made all at once."""

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.records.columns.columns import (
    CLOCKS,
    PHASES,
    POSITION_PREFIX,
    SECTION_PREFIX,
    Flags,
    Integers,
    StepColumns,
    columns_with,
)
from benchctl.sim.costs.cost_model import StepCost
from benchctl.sim.steps.log import WIDTH, StepLog, Stretch

_DRAFTED: Final = ("drafts", "draft_tokens")
_PARTS: Final = tuple(field.name for field in msgspec.structs.fields(StepCost))


class _Rows(NamedTuple):
    """The fields of Stretch, one value a step."""

    num_steps: Integers
    start_ns: Integers
    is_warmup: Integers
    num_prefills: Integers
    num_decodes: Integers
    prefill_tokens: Integers
    context: Integers
    num_output: Integers
    is_greedy: Integers
    num_preempted: Integers


def first_steps(log: StepLog) -> Integers:
    """Position in the log of the first step of each stretch."""
    num_steps = _stretches(log)[:, 0]
    return np.cumsum(num_steps) - num_steps


def columns_of(log: StepLog, *, is_warmup: bool = False) -> StepColumns:
    """The steps of the load, or those of the warm-up."""
    stretches = _stretches(log)
    which = np.repeat(np.arange(len(stretches)), stretches[:, 0])
    at = np.flatnonzero(stretches[which, Stretch._fields.index("is_warmup")] == is_warmup)
    which = which[at]
    offset = at - first_steps(log)[which]
    rows = _Rows(*stretches[which].T)
    dur_ns = np.frombuffer(log.dur_ns, dtype=np.int64)
    ends_ns = np.cumsum(dur_ns)
    before_ns = ends_ns - dur_ns
    start_ns = rows.start_ns + before_ns[at] - before_ns[at - offset]
    phase = np.where(rows.prefill_tokens == 0, PHASES.index("decode"), PHASES.index("mixed"))
    phase[(rows.prefill_tokens > 0) & (rows.num_decodes == 0)] = PHASES.index("prefill")
    arrays: dict[str, npt.NDArray[Any]] = {
        "start_ns": start_ns,
        "dur_ns": dur_ns[at],
        "num_seqs": rows.num_prefills + rows.num_decodes,
        "phase": phase,
        "clock": np.full(len(at), CLOCKS.index("virtual")),
        **_optionals(log, at, offset, rows),
        **{SECTION_PREFIX + name: values for name, values in _sections(log, at, which).items()},
    }
    if log.num_drafts:
        accepted = _accepted(log)[at]
        arrays |= {f"{POSITION_PREFIX}{number}": values for number, values in enumerate(accepted.T, start=1)}
    return columns_with(arrays)


def _stretches(log: StepLog) -> Integers:
    return np.frombuffer(log.stretches, dtype=np.int64).reshape(-1, WIDTH)


def _optionals(log: StepLog, at: Integers, offset: Integers, rows: _Rows) -> dict[str, npt.NDArray[Any]]:
    num_guided = {
        name: np.frombuffer(column, dtype=np.int64)[at] if log.has_guidance else np.zeros(len(at), dtype=np.int64)
        for name, column in log.guided.items()
    }
    fused = num_guided["fused"] if log.has_guidance else np.full(len(at), -1)
    columns: dict[str, npt.NDArray[Any]] = {
        "num_prefill_tokens": rows.prefill_tokens,
        "num_decode_tokens": rows.num_decodes,
        "context_tokens": rows.context + offset * rows.num_decodes,
        "output_tokens": rows.num_output,
        "is_greedy": rows.is_greedy,
        "guided_rows": num_guided["guided_rows"],
        "candidates": num_guided["candidates"],
        "fused": fused,
        "preempted": np.where(offset == 0, rows.num_preempted, 0),
        "kv_used_blocks": np.frombuffer(log.kv_used, dtype=np.int32)[at],
        "value_prefill_tokens": num_guided["value_prefill_tokens"],
        "value_extend_tokens": num_guided["value_extend_tokens"],
    }
    if log.num_drafts:
        drafted = {name: np.frombuffer(log.drafted[name], dtype=np.int64)[at] for name in _DRAFTED}
        columns["num_decode_tokens"] = rows.num_decodes + drafted["draft_tokens"]
        columns["accepted_tokens"] = _accepted(log)[at].sum(axis=1)
        columns |= drafted
    return columns


def _accepted(log: StepLog) -> Integers:
    """Accepted drafts, a row for each step and a column for each position."""
    return np.frombuffer(log.accepted, dtype=np.int64).reshape(-1, log.num_drafts)


def _sections(log: StepLog, at: Integers, which: Integers) -> dict[str, Integers]:
    """Time of each section, -1 in steps without it: ``StepCost.sections`` for all steps at once."""
    rest_ids = np.frombuffer(log.rest_ids, dtype=np.int32)[which]
    rests = [msgspec.structs.asdict(rest) for rest in log.rests]
    exists = {name: np.array([rest[name] is not None for rest in rests], dtype=bool)[rest_ids] for name in _PARTS}
    factor = np.frombuffer(log.factors)[at] if log.has_noise else None
    parts: dict[str, Integers] = {}
    for name in _PARTS:
        part = np.array([rest[name] or 0 for rest in rests], dtype=np.int64)[rest_ids]
        parts[name] = part if factor is None else np.rint(part * factor).astype(np.int64)
    if log.has_guidance:
        lvm_forward = np.frombuffer(log.guided["lvm_forward"], dtype=np.int64)[at]
        parts["lvm_forward"] = np.maximum(lvm_forward, 0)
        for name in ("lvm_forward", "lvm_apply_guidance"):  # steps of guided stretches that score no row
            exists[name] &= lvm_forward >= 0
            parts[name] = np.where(exists[name], parts[name], 0)
    if log.num_drafts:
        for name, column in (("draft", "draft_ns"), ("backfill", "backfill_ns")):
            part = np.frombuffer(log.drafted[column], dtype=np.int64)[at]
            exists[name], parts[name] = part >= 0, np.maximum(part, 0)
    parts["model_forward"] = np.frombuffer(log.dur_ns, dtype=np.int64)[at] - sum(parts.values())
    return _nested(parts, exists)


def _nested(parts: dict[str, Integers], exists: dict[str, Flags]) -> dict[str, Integers]:
    samples = exists["sampler_rest"]
    applies = samples & exists["lvm_rest"]
    of_lvm = ("lvm_build_pending", "value_model_load", "lvm_forward", "lvm_apply_guidance")
    outer = parts["lvm_rest"] + sum(parts[name] for name in of_lvm)
    total = parts["sampler_rest"] + parts["pre_lvm"] + outer + parts["sample"]
    sections = {
        "schedule": (parts["schedule"], np.ones(len(total), dtype=bool)),
        "model_forward": (parts["model_forward"], np.ones(len(total), dtype=bool)),
        "pre_lvm": (parts["pre_lvm"], samples & exists["pre_lvm"]),
        **{name: (parts[name], applies & exists[name]) for name in of_lvm},
        "lvm_apply_outer": (outer, applies),
        "sample": (parts["sample"], samples & exists["sample"]),
        "sampler_total": (total, samples),
    }
    sections |= {name: (parts[name], exists[name]) for name in ("draft", "backfill") if name in parts}
    return {name: np.where(has, times, -1) for name, (times, has) in sections.items()}
