"""The steps of one server life: the walk over decode steps, their log, and its records.

A log stores stretches: a row of ten numbers for steps of one batch; each step besides has its duration and the
blocks in use. The forward is what is left of a step's duration after its other sections, which few steps differ in.

Each decode step of one batch adds a token to each row, so the price of the step is a point further on a line.
``walk`` evaluates that line in one of three ways, which give the same integers: in a loop over local variables, as
arrays where many steps lie ahead, or with a factor of its own for each step.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, cycle, islice
from operator import add
from typing import Final, NamedTuple, TypeAlias

import msgspec

from benchctl.records.schema import StepRecord
from benchctl.sim.costs.cost_model import (
    DecodeCost,
    GuidedStep,
    Lines,
    NoiseSource,
    StepCost,
)

NO_VALUE: Final = -1
"""Stands for None in a column of integers."""
COUNTS: Final = ("guided_rows", "candidates", "value_prefill_tokens", "value_extend_tokens")
_GUIDED: Final = (*COUNTS, "fused", "lvm_forward")
_DRAFTED: Final = ("drafts", "draft_tokens", "draft", "backfill")
DRAFT_SECTIONS: Final = ("draft", "backfill")
NEVER_NS: Final = 1 << 62
"""Later than any virtual time."""
MOST_STEPS: Final = 1 << 20
"""Steps after which a log is cleared whose steps are not kept."""
_SHORTEST: Final = 96
"""Steps from which arrays are faster than a loop; measured, and of no influence on results."""


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


_WIDTH: Final = len(Stretch._fields)


class StepLog:
    """Columns of steps. They grow by stretches and are read as records, one after the other, or as arrays.

    ``rests`` holds each combination of sections once. ``factors`` has the noise of each step, and ``extra`` the
    counts and times of guidance or of drafts, a value for each step on servers that have them. Accepted drafts have
    ``num_drafts`` values for each step.
    """

    def __init__(self, *, has_noise: bool = False, has_guidance: bool = False, num_drafts: int = 0) -> None:
        self.has_noise: Final = has_noise
        self.num_drafts: Final = num_drafts
        """Positions of drafts; 0 on servers without speculation."""
        self.rests: Final[list[StepCost]] = []
        self.num_cleared = 0
        """Steps that were forgotten."""
        self._rest_ids: Final[dict[StepCost, int]] = {}
        self._extra_names: Final = (*(_GUIDED if has_guidance else ()), *(_DRAFTED if num_drafts else ()))
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
        self.extra = {name: array("q") for name in self._extra_names}
        self.accepted = array("q")

    def __len__(self) -> int:
        return len(self.dur_ns)

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

    def add_guided(self, guided: GuidedStep, lvm_forward_ns: int | None, num_steps: int = 1) -> None:
        """Append the same counts of guidance, and time of the value forward, for each of some steps."""
        fused = NO_VALUE if guided.fused is None else int(guided.fused)
        counts = (guided.scored_rows, guided.candidates, guided.value_prefill_tokens, guided.value_extend_tokens)
        self._add_extra((*counts, fused, NO_VALUE if lvm_forward_ns is None else lvm_forward_ns), num_steps)

    def add_drafted(
        self, drafts: int, draft_tokens: int, accepted: Iterable[int], draft_ns: int, backfill_ns: int = NO_VALUE
    ) -> None:
        """Append the drafts of one step, the accepted ones by position, and the times of drafting and backfill."""
        self._add_extra((drafts, draft_tokens, draft_ns, backfill_ns), 1)
        self.accepted.extend(accepted)

    def _add_extra(self, values: Iterable[int], num_steps: int) -> None:
        for column, value in zip(self.extra.values(), values, strict=True):
            column.extend((value,) * num_steps)

    def records(self) -> Iterator[StepRecord]:
        """Every step as a record."""
        at = 0
        for index, rest_id in enumerate(self.rest_ids):
            stretch = Stretch(*self.stretches[index * _WIDTH : (index + 1) * _WIDTH])
            start_ns = stretch.start_ns
            for offset in range(stretch.num_steps):
                yield self._record(stretch, self.rests[rest_id], at, offset, start_ns)
                start_ns += self.dur_ns[at]
                at += 1

    def _record(self, stretch: Stretch, rest: StepCost, at: int, offset: int, start_ns: int) -> StepRecord:
        """Step ``at`` of the columns, which is step ``offset`` of its stretch."""
        extra = {name: column[at] for name, column in self.extra.items()}
        fused = extra.get("fused", NO_VALUE)
        accepted = self.accepted[at * self.num_drafts : (at + 1) * self.num_drafts].tolist()
        return StepRecord(
            step=self.num_cleared + at + 1,
            start_ns=start_ns,
            dur_ns=self.dur_ns[at],
            clock="virtual",
            phase=("mixed" if stretch.num_decodes else "prefill") if stretch.prefill_tokens else "decode",
            is_warmup=bool(stretch.is_warmup),
            num_seqs=stretch.num_prefills + stretch.num_decodes,
            num_prefill_tokens=stretch.prefill_tokens,
            num_decode_tokens=stretch.num_decodes + extra.get("draft_tokens", 0),
            context_tokens=stretch.context + offset * stretch.num_decodes,
            output_tokens=stretch.num_output,
            is_greedy=None if stretch.is_greedy == NO_VALUE else bool(stretch.is_greedy),
            guided_rows=extra.get("guided_rows", 0),
            candidates=extra.get("candidates", 0),
            fused=None if fused == NO_VALUE else bool(fused),
            preempted=0 if offset else stretch.num_preempted,
            kv_used_blocks=self.kv_used[at],
            value_prefill_tokens=extra.get("value_prefill_tokens", 0),
            value_extend_tokens=extra.get("value_extend_tokens", 0),
            sections_ns=self._sections(rest, at, extra),
            drafts=extra.get("drafts"),
            draft_tokens=extra.get("draft_tokens"),
            accepted_tokens=sum(accepted) if self.num_drafts else None,
            accepted_by_position=tuple(accepted) if self.num_drafts else None,
        )

    def _sections(self, rest: StepCost, at: int, extra: dict[str, int]) -> dict[str, int]:
        if not (extra or self.has_noise):
            sections, rest_ns = _sections_and_time(rest)
            return {**sections, "model_forward": self.dur_ns[at] - rest_ns}
        if self.has_noise:
            rest = rest.scaled(self.factors[at])
        lvm_forward_ns = extra.get("lvm_forward", NO_VALUE)
        if lvm_forward_ns != NO_VALUE:
            rest = msgspec.structs.replace(rest, lvm_forward=lvm_forward_ns)
        elif rest.lvm_forward is not None:  # a step of a guided stretch that scores no row
            rest = msgspec.structs.replace(rest, lvm_forward=None, lvm_apply_guidance=None)
        drafted = {name: extra[name] for name in DRAFT_SECTIONS if extra.get(name, NO_VALUE) != NO_VALUE}
        forward_ns = self.dur_ns[at] - rest.total_ns() - sum(drafted.values())
        return msgspec.structs.replace(rest, model_forward=forward_ns).sections() | drafted


@lru_cache
def _sections_and_time(rest: StepCost) -> tuple[dict[str, int], int]:
    """Sections and time of steps that differ in their forward alone: those of one stretch."""
    return rest.sections(), rest.total_ns()


class Course(NamedTuple):
    """The state in which decode steps begin, and the bounds within which the batch stays as it is."""

    cost: DecodeCost
    fixed_ns: int
    """Time of all sections but the forward."""
    position: int
    """The x of ``DecodeCost`` in the first step, ..."""
    slope: int
    """... and what each step adds to it."""
    now_ns: int
    until_ns: int
    """No step but the first begins at this time or later."""
    num_steps: int
    """Steps at most."""
    step: int
    """Number of the first step."""
    kv_used: int
    """Blocks in use in the first step."""
    needs: Sequence[int]
    """Blocks that a later step s takes: entry s mod their number. A step for which none are left is not run."""
    num_blocks: int


Progress: TypeAlias = tuple[int, int, int]
"""The number of steps that were run, at least 1, their end, and the blocks in use in the last of them."""


def walk(course: Course, log: StepLog, noise: NoiseSource | None = None) -> Progress:
    """Run steps and append the columns of each to a log; an end before the bounds of the course means nothing."""
    if noise is not None:
        return _walk_with_noise(course, log, noise)
    num_likely = course.num_steps
    if num_likely > 1 and course.until_ns != NEVER_NS:
        first_ns = course.fixed_ns + course.cost.forward_at(course.position)
        num_likely = min(num_likely, 1 + max(course.until_ns - course.now_ns, 0) // max(first_ns, 1))
    if num_likely >= _SHORTEST:
        from benchctl.sim.aggregate import walk_as_arrays  # noqa: PLC0415 - numpy, which a server does without

        return walk_as_arrays(course, log, num_likely)
    return walk_steps(course, log, num_likely)


def walk_steps(course: Course, log: StepLog, num_steps: int = 1 << 40, more_ns: Sequence[int] = ()) -> Progress:
    """The same for ``num_steps`` at most, in lists; ``more_ns`` is the time of each step beyond its price."""
    cost, fixed_ns, x, slope, now_ns, until_ns, most, step, kv_used, needs, num_blocks = course
    fixed_ns += cost.forward_ns
    positions = range(x, x + min(most, num_steps) * slope, slope)
    lines = _leading(cost.lines, positions[0], positions[-1])
    (intercept, per_token), (other, per_token_other) = lines[0], lines[-1]
    if len(lines) == 1:
        durations = [fixed_ns + round(intercept + per_token * x) for x in positions]
    else:
        durations = [
            fixed_ns + round(max(intercept + per_token * x, other + per_token_other * x)) for x in positions
        ]
    if more_ns:
        durations = list(map(add, durations, more_ns))
    next_step = (step + 1) % len(needs)
    new_blocks = islice(cycle([*needs[next_step:], *needs[:next_step]]), len(positions) - 1)
    used, end_ns, num_run = list(accumulate(new_blocks, initial=kv_used)), now_ns + sum(durations), len(positions)
    if used[-1] > num_blocks or end_ns - durations[-1] >= until_ns:
        ends_ns = list(accumulate(durations, initial=now_ns))
        num_run = min(bisect_right(used, num_blocks, 1), bisect_left(ends_ns, until_ns, 1, num_run))
        end_ns, durations, used = ends_ns[num_run], durations[:num_run], used[:num_run]
    log.dur_ns.extend(durations)
    log.kv_used.extend(used)
    return num_run, end_ns, used[-1]


def _leading(lines: Lines, begin: int, end: int) -> Lines:
    """The one line that is the highest by more than rounding from ``begin`` to ``end``, or all of them."""
    if len(lines) > 1:
        (intercept, per_token), (other, per_token_other) = lines
        base, slope = intercept - other, per_token - per_token_other
        first, last = base + slope * begin, base + slope * end
        if (first > 1 and last > 1) or (first < -1 and last < -1):
            return lines[:1] if first > 1 else lines[1:]
    return lines


def _walk_with_noise(course: Course, log: StepLog, noise: NoiseSource) -> Progress:
    """Steps with a factor each: every section is rounded by itself, as ``StepCost.scaled`` does."""
    cost, _, x, slope, now_ns, until_ns, num_steps, step, kv_used, needs, num_blocks = course
    parts, forward_at, size = [part for part in cost.rest.parts() if part], cost.forward_at, len(needs)
    for num_run in range(1, num_steps + 1):
        factor = noise()
        dur_ns = round(forward_at(x) * factor)
        for part in parts:
            dur_ns += round(part * factor)
        log.factors.append(factor)
        log.dur_ns.append(dur_ns)
        log.kv_used.append(kv_used)
        now_ns += dur_ns
        x += slope
        needed = needs[(step + num_run) % size]
        if now_ns >= until_ns or kv_used + needed > num_blocks:
            break
        if num_run < num_steps:
            kv_used += needed
    return num_run, now_ns, kv_used
