"""A whole simulation: the server without HTTP and without waiting, and the columns of its steps and requests."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.records.columns import (
    CLOCKS,
    PHASES,
    POSITION_PREFIX,
    SECTION_PREFIX,
    Flags,
    Integers,
    StepColumns,
    columns_with,
)
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase, SimLoad
from benchctl.sim.costs.cost_model import LVM_PARTS, SECTIONS, StepCost
from benchctl.sim.counted import CountedRun
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.steps import COUNTS, DRAFT_SECTIONS, MOST_STEPS, NO_VALUE, StepLog, Stretch

_PARTS: Final = tuple(field.name for field in msgspec.structs.fields(StepCost))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestColumns:
    """Finished choices in the order of their end; each array has one value a choice. Times are virtual ns."""

    load: Integers
    """Index of the load that the request belongs to."""
    index: Integers
    """Index of the request within its load."""
    choice: Integers
    """Number of the choice within its request, from 0."""
    entry: Integers
    """Number of the choice in the order in which they entered the queue, from 1."""
    arrival_ns: Integers
    """The request entered the queue."""
    first_token_ns: Integers
    last_token_ns: Integers
    prompt_tokens: Integers
    output_tokens: Integers
    cached_tokens: Integers
    """Prompt tokens that a shared prefix spared when the request last began."""
    preemptions: Integers
    """Times that the choice lost its key-value memory."""

    def __len__(self) -> int:
        return len(self.index)

    def of(self, where: Flags) -> "RequestColumns":
        """The choices of ``where``."""
        return RequestColumns(**{field.name: getattr(self, field.name)[where] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Steps and requests of one server life."""

    config: SimConfig
    loads: tuple[SimLoad, ...]
    log: StepLog
    requests: RequestColumns
    num_preemptions: int

    @property
    def steps(self) -> list[StepRecord]:
        """All steps in their order."""
        return list(self.log.records())

    def step_columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up, as columns."""
        return columns_of(self.log, is_warmup=is_warmup)

    def makespan_ns(self) -> int:
        """From the first measured step's start to the last one's end."""
        columns = self.step_columns()
        return int(columns.start_ns[-1] + columns.dur_ns[-1] - columns.start_ns[0]) if len(columns) else 0


def simulate(config: SimConfig, loads: Items[SimLoad], *, keeps_steps: bool = True) -> Simulation:
    """Run phases of load on one fresh server.

    The steps are those that the server logs when the same phases are announced and sent over HTTP. Without
    ``keeps_steps`` all but the last are forgotten on the way (``log.num_cleared``).
    """
    engine = SimulatedEngine(config)
    counted = CountedRun(engine, keeps_steps=keeps_steps)
    ended = counted.ended
    if not (engine.counts_rows and all(counted.run(Phase(load)) for load in loads)):
        engine = SimulatedEngine(config)
        ended = _run(Core(engine), loads, keeps_steps=keeps_steps)
    names = [field.name for field in fields(RequestColumns)]
    columns = np.frombuffer(ended, dtype=np.int64).reshape(-1, len(names)).T
    return Simulation(
        config=config,
        loads=tuple(loads),
        log=engine.log,
        requests=RequestColumns(**dict(zip(names, columns, strict=True))),
        num_preemptions=engine.scheduler.num_preemptions,
    )


def _run(core: Core, loads: Items[SimLoad], *, keeps_steps: bool) -> "array[int]":
    """Run phases of load; returns the values of RequestColumns, one finished choice after the other."""
    ended = array("q")
    for number, load in enumerate(loads):
        core.announce(Phase(load))
        while (finished := core.leap()) is not None:
            for seq in finished:
                times = (seq.arrival_ns, seq.first_token_ns or 0, seq.last_token_ns or 0)
                tokens = (seq.prompt_tokens, seq.num_output, seq.num_cached)
                ended.extend(
                    (number, seq.entry.request_index, seq.choice, seq.seq_id, *times, *tokens, seq.num_preemptions)
                )
            if not keeps_steps and len(core.engine.log) > MOST_STEPS:
                core.engine.log.clear()
    return ended


def columns_of(log: StepLog, *, is_warmup: bool = False) -> StepColumns:
    """The steps of the load, or those of the warm-up, as the columns that the analysis reads, made all at once."""
    table = np.frombuffer(log.stretches, dtype=np.int64).reshape(-1, len(Stretch._fields))
    num_steps = table[:, 0]
    stretch = np.repeat(np.arange(len(table)), num_steps)
    at = np.flatnonzero(table[stretch, Stretch._fields.index("is_warmup")] == is_warmup)
    stretch = stretch[at]
    offset = at - (np.cumsum(num_steps) - num_steps)[stretch]
    rows = dict(zip(Stretch._fields, table[stretch].T, strict=True))
    extra = {name: np.frombuffer(column, dtype=np.int64)[at] for name, column in log.extra.items()}
    dur_ns = np.frombuffer(log.dur_ns, dtype=np.int64)
    before_ns = np.cumsum(dur_ns) - dur_ns
    phase = np.where(rows["prefill_tokens"] == 0, PHASES.index("decode"), PHASES.index("mixed"))
    phase[(rows["prefill_tokens"] > 0) & (rows["num_decodes"] == 0)] = PHASES.index("prefill")
    zeros = np.zeros(len(at), dtype=np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {
        "start_ns": rows["start_ns"] + before_ns[at] - before_ns[at - offset],
        "dur_ns": dur_ns[at],
        "num_seqs": rows["num_prefills"] + rows["num_decodes"],
        "phase": phase,
        "clock": np.full(len(at), CLOCKS.index("virtual")),
        "num_prefill_tokens": rows["prefill_tokens"],
        "num_decode_tokens": rows["num_decodes"] + extra.get("draft_tokens", 0),
        "context_tokens": rows["context"] + offset * rows["num_decodes"],
        "output_tokens": rows["num_output"],
        "is_greedy": rows["is_greedy"],
        **{name: extra.get(name, zeros) for name in COUNTS},
        "fused": extra.get("fused", zeros + NO_VALUE),
        "preempted": np.where(offset == 0, rows["num_preempted"], 0),
        "kv_used_blocks": np.frombuffer(log.kv_used, dtype=np.int32)[at],
        **{SECTION_PREFIX + name: values for name, values in _section_columns(log, at, stretch, extra).items()},
    }
    if log.num_drafts:
        accepted = np.frombuffer(log.accepted, dtype=np.int64).reshape(-1, log.num_drafts)[at]
        arrays |= {name: extra[name] for name in ("drafts", "draft_tokens")}
        arrays["accepted_tokens"] = accepted.sum(axis=1)
        arrays |= {f"{POSITION_PREFIX}{number}": values for number, values in enumerate(accepted.T, start=1)}
    return columns_with(arrays)


def _section_columns(
    log: StepLog, at: Integers, stretch: Integers, extra: dict[str, Integers]
) -> dict[str, Integers]:
    """Time of each section, -1 in steps without it: ``StepCost.sections`` for all steps at once."""
    rest_ids = np.frombuffer(log.rest_ids, dtype=np.int32)[stretch]
    rests = [msgspec.structs.asdict(rest) for rest in log.rests]
    exists = {name: np.array([rest[name] is not None for rest in rests], dtype=bool)[rest_ids] for name in _PARTS}
    factor = np.frombuffer(log.factors)[at] if log.has_noise else None
    parts: dict[str, Integers] = {}
    for name in _PARTS:
        part = np.array([rest[name] or 0 for rest in rests], dtype=np.int64)[rest_ids]
        parts[name] = part if factor is None else np.rint(part * factor).astype(np.int64)
    if "lvm_forward" in extra:
        parts["lvm_forward"] = np.maximum(extra["lvm_forward"], 0)
        for name in ("lvm_forward", "lvm_apply_guidance"):  # steps of guided stretches that score no row
            exists[name] &= extra["lvm_forward"] >= 0
            parts[name] = np.where(exists[name], parts[name], 0)
    drafted: dict[str, Integers] = {name: extra[name] for name in DRAFT_SECTIONS if name in extra}
    parts["lvm_apply_outer"] = parts["lvm_rest"] + sum(parts[name] for name in LVM_PARTS)
    parts["sampler_total"] = parts["sampler_rest"] + sum(
        parts[name] for name in ("pre_lvm", "lvm_apply_outer", "sample")
    )
    exists |= {"lvm_apply_outer": exists["lvm_rest"], "sampler_total": exists["sampler_rest"]}
    others_ns = parts["schedule"] + parts["sampler_total"] + sum(np.maximum(part, 0) for part in drafted.values())
    parts["model_forward"] = np.frombuffer(log.dur_ns, dtype=np.int64)[at] - others_ns
    return {name: np.where(exists[name], parts[name], NO_VALUE) for name in SECTIONS} | drafted
