"""The steps of one server life, stored as stretches, and as the records and columns that are made of them."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

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
from benchctl.records.schema import StepPhase, StepRecord
from benchctl.sim.costs.cost_model import StepCost
from benchctl.sim.guidance import GuidedStep


class Stretch(NamedTuple):
    """Consecutive steps of one batch, of which only the context grows, by a token for each decoding row.

    ``context`` and ``num_preempted`` are those of the first step; the latter is 0 in the others.
    """

    num_steps: int
    start_ns: int
    is_warmup: int
    num_prefills: int
    num_decodes: int
    prefill_tokens: int
    context: int
    num_output: int
    is_greedy: int
    """1, 0, or -1 for steps that sample nothing."""
    num_preempted: int


WIDTH: Final = len(Stretch._fields)
_NO: Final = -1
"""Stands for None in a column of integers."""


class DraftedStep(NamedTuple):
    """Drafts of one step, and the times of drafting and of the backfill in ns; -1 for a part that is not there."""

    drafts: int
    draft_tokens: int
    draft_ns: int
    backfill_ns: int
    accepted_by_position: Sequence[int]


class StepLog:
    """Columns of steps. They grow by stretches and are read as records, one after the other.

    The forward is what is left of a step's duration after its other sections, which few steps differ in: ``rests``
    holds each combination once. ``factors`` has the noise of each step, and the columns of guidance and of drafts a
    value for each step, on servers that have them. Accepted drafts have ``num_drafts`` values for each step.
    """

    def __init__(self, *, has_noise: bool = False, has_guidance: bool = False, num_drafts: int = 0) -> None:
        self.has_noise: Final = has_noise
        self.has_guidance: Final = has_guidance
        self.num_drafts: Final = num_drafts
        """Positions of drafts; 0 on servers without speculation."""
        self.rests: Final[list[StepCost]] = []
        self.num_cleared = 0
        """Steps that were forgotten."""
        self._rest_ids: Final[dict[StepCost, int]] = {}
        self._begin()

    def clear(self) -> None:
        """Forget all steps; their numbers go on."""
        self.num_cleared += len(self)
        self._begin()

    def _begin(self) -> None:
        self.stretches = array("q")
        self.rest_ids = array("i")
        """One for each stretch."""
        self.dur_ns = array("q")
        self.kv_used = array("i")
        self.factors = array("d")
        self.guided = {name: array("q") for name in GUIDED_COLUMNS}
        self.drafted = {name: array("q") for name in DRAFTED_COLUMNS}
        self.accepted = array("q")

    def __len__(self) -> int:
        return len(self.dur_ns)

    @property
    def num_stretches(self) -> int:
        return len(self.rest_ids)

    def rest_id(self, rest: StepCost) -> int:
        """The number of a combination of sections, whose model_forward and lvm_forward are 0."""
        number = self._rest_ids.get(rest)
        if number is None:
            number = self._rest_ids[rest] = len(self.rests)
            self.rests.append(rest)
        return number

    def add_stretch(self, rest_id: int, stretch: tuple[int, ...]) -> None:
        """Append the fields of a Stretch, whose steps the other columns have."""
        self.stretches.extend(stretch)
        self.rest_ids.append(rest_id)

    def add_guided(self, guided: GuidedStep, lvm_forward_ns: int | None) -> None:
        """Append what guidance did in one step."""
        fused = _NO if guided.fused is None else int(guided.fused)
        forward_ns = _NO if lvm_forward_ns is None else lvm_forward_ns
        counts = (guided.scored_rows, guided.candidates, guided.value_prefill_tokens, guided.value_extend_tokens)
        for column, value in zip(self.guided.values(), (*counts, fused, forward_ns), strict=True):
            column.append(value)

    def add_unguided(self, num_steps: int) -> None:
        """Append steps in which no row asked for guidance."""
        for column, value in zip(self.guided.values(), _UNGUIDED, strict=True):
            column.extend([value] * num_steps)

    def add_drafted(self, drafted: DraftedStep) -> None:
        """Append what was drafted in one step."""
        for column, value in zip(self.drafted.values(), drafted[:-1], strict=True):
            column.append(value)
        self.accepted.extend(drafted.accepted_by_position)

    def accepted_at(self, at: int) -> list[int]:
        """Accepted drafts of step ``at``, of each position."""
        return self.accepted[at * self.num_drafts : (at + 1) * self.num_drafts].tolist()

    def stretch(self, index: int) -> Stretch:
        return Stretch(*self.stretches[index * WIDTH : (index + 1) * WIDTH])

    def records(self) -> Iterator[StepRecord]:
        """Every step as a record."""
        first = 0
        for index in range(self.num_stretches):
            yield from self.records_of(index, first)
            first += self.stretches[index * WIDTH]

    def record(self, index: int, first: int, offset: int) -> StepRecord:
        """Step ``offset`` of the stretch ``index``, whose first step is at ``first`` of the columns."""
        stretch = self.stretch(index)
        elapsed_ns = sum(self.dur_ns[first : first + offset])
        return self._record(stretch, self.rests[self.rest_ids[index]], first, offset, stretch.start_ns + elapsed_ns)

    def records_of(self, index: int, first: int) -> Iterator[StepRecord]:
        """The steps of the stretch ``index``, whose first step is at ``first`` of the columns."""
        stretch, rest = self.stretch(index), self.rests[self.rest_ids[index]]
        start_ns = stretch.start_ns
        for offset in range(stretch.num_steps):
            record = self._record(stretch, rest, first, offset, start_ns)
            start_ns += record.dur_ns
            yield record

    def _record(self, stretch: Stretch, rest: StepCost, first: int, offset: int, start_ns: int) -> StepRecord:
        at = first + offset
        guided = [column[at] for column in self.guided.values()] if self.has_guidance else _UNGUIDED
        record = StepRecord(
            step=self.num_cleared + at + 1,
            start_ns=start_ns,
            dur_ns=self.dur_ns[at],
            clock="virtual",
            phase=_phase(stretch),
            is_warmup=bool(stretch.is_warmup),
            num_seqs=stretch.num_prefills + stretch.num_decodes,
            num_prefill_tokens=stretch.prefill_tokens,
            num_decode_tokens=stretch.num_decodes,
            context_tokens=stretch.context + offset * stretch.num_decodes,
            output_tokens=stretch.num_output,
            is_greedy=None if stretch.is_greedy == _NO else bool(stretch.is_greedy),
            guided_rows=guided[0],
            candidates=guided[1],
            fused=None if guided[4] == _NO else bool(guided[4]),
            preempted=0 if offset else stretch.num_preempted,
            kv_used_blocks=self.kv_used[at],
            value_prefill_tokens=guided[2],
            value_extend_tokens=guided[3],
            sections_ns=self._sections(rest, at, guided[5]),
        )
        return self._with_drafts(record, at) if self.num_drafts else record

    def _with_drafts(self, record: StepRecord, at: int) -> StepRecord:
        drafts, draft_tokens, draft_ns, backfill_ns = (column[at] for column in self.drafted.values())
        sections = dict(record.sections_ns)
        for name, part_ns in (("draft", draft_ns), ("backfill", backfill_ns)):
            if part_ns != _NO:
                sections["model_forward"] -= part_ns
                sections[name] = part_ns
        accepted = self.accepted_at(at)
        return msgspec.structs.replace(
            record,
            num_decode_tokens=(record.num_decode_tokens or 0) + draft_tokens,
            drafts=drafts,
            draft_tokens=draft_tokens,
            accepted_tokens=sum(accepted),
            accepted_by_position=tuple(accepted),
            sections_ns=sections,
        )

    def _sections(self, rest: StepCost, at: int, lvm_forward_ns: int) -> dict[str, int]:
        if self.has_noise:
            rest = rest.scaled(self.factors[at])
        if rest.lvm_forward is not None and lvm_forward_ns == _NO:  # a step of a guided stretch that scores no row
            rest = msgspec.structs.replace(rest, lvm_forward=None, lvm_apply_guidance=None)
        if lvm_forward_ns != _NO:
            rest = msgspec.structs.replace(rest, lvm_forward=lvm_forward_ns)
        return msgspec.structs.replace(rest, model_forward=self.dur_ns[at] - rest.total_ns()).sections()


GUIDED_COLUMNS: Final = (
    "guided_rows",
    "candidates",
    "value_prefill_tokens",
    "value_extend_tokens",
    "fused",
    "lvm_forward",
)
DRAFTED_COLUMNS: Final = DraftedStep._fields[:-1]
_UNGUIDED: Final = [0, 0, 0, 0, _NO, _NO]


def _phase(stretch: Stretch) -> StepPhase:
    if not stretch.prefill_tokens:
        return "decode"
    return "mixed" if stretch.num_decodes else "prefill"


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
