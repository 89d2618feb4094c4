"""Decode steps of one unchanged batch, step by step or as arrays: nothing here is done for each row or block."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from benchctl.records.columns import Integers
from benchctl.sim.costs.cost_model import DecodeCost, NoiseSource
from benchctl.sim.steps import StepLog

NEVER_NS: Final = 1 << 62
"""Later than any virtual time."""


class Course(NamedTuple):
    """The state in which decode steps begin, and the bounds within which the batch stays as it is.

    ``position`` is the x of ``DecodeCost`` and grows by ``slope`` with each step. ``kv_used`` blocks are in use in
    the first step; a later step s takes ``needs[s mod len(needs)]`` more, and is left to the scheduler if they
    exceed ``num_blocks``. At most ``num_steps`` are run, and none begins at ``until_ns`` or later but the first.
    """

    cost: DecodeCost
    fixed_ns: int
    """Time of all sections but the forward."""
    position: int
    slope: int
    now_ns: int
    until_ns: int
    num_steps: int
    step: int
    """Number of the first step."""
    kv_used: int
    needs: Sequence[int]
    num_blocks: int


class Progress(NamedTuple):
    """The number of steps that were run, their end, and the blocks in use in the last of them."""

    num_steps: int
    now_ns: int
    kv_used: int


Walk: TypeAlias = Callable[[Course, StepLog], Progress]
"""Runs at least one step, and appends the columns of each to a log."""


def walk_steps(course: Course, log: StepLog) -> Progress:
    """Step by step, in local variables."""
    cost, fixed_ns, x, slope, now_ns, until_ns, num_steps, step, kv_used, needs, num_blocks = course
    (intercept, per_token), (other, per_token_other) = (*cost.lines, cost.lines[0])[:2]
    if len(cost.lines) > 2:
        return _walk_with(course, log, lambda at: course.fixed_ns + cost.forward_at(at))
    fixed_ns += cost.forward_ns
    append_ns, append_blocks = log.dur_ns.append, log.kv_used.append
    size = len(needs)
    remainder = step % size
    count = 0
    while True:
        forward_ns = intercept + per_token * x
        other_ns = other + per_token_other * x
        if other_ns > forward_ns:  # noqa: PLR1730 - a call of max takes as long as the rest of the step
            forward_ns = other_ns
        dur_ns = fixed_ns + round(forward_ns)
        append_ns(dur_ns)
        append_blocks(kv_used)
        now_ns += dur_ns
        count += 1
        if count == num_steps or now_ns >= until_ns:
            break
        x += slope
        remainder += 1
        if remainder == size:
            remainder = 0
        if needed := needs[remainder]:
            if kv_used + needed > num_blocks:
                break
            kv_used += needed
    return Progress(count, now_ns, kv_used)


def noisy_walk(noise: NoiseSource) -> Walk:
    """A walk whose steps have a factor each: every section is rounded by itself, as ``StepCost.scaled`` does."""

    def walk(course: Course, log: StepLog) -> Progress:
        parts = [part for part in course.cost.rest.parts() if part]
        forward_at, append = course.cost.forward_at, log.factors.append

        def duration_ns(position: int) -> int:
            factor = noise()
            append(factor)
            dur_ns = round(forward_at(position) * factor)
            for part in parts:
                dur_ns += round(part * factor)
            return dur_ns

        return _walk_with(course, log, duration_ns)

    return walk


def _walk_with(course: Course, log: StepLog, duration_ns: Callable[[int], int]) -> Progress:
    """The same for any price, and where blocks may run out."""
    x, now_ns, kv_used = course.position, course.now_ns, course.kv_used
    append, append_blocks, size = log.dur_ns.append, log.kv_used.append, len(course.needs)
    for count in range(1, course.num_steps + 1):
        dur_ns = duration_ns(x)
        append(dur_ns)
        append_blocks(kv_used)
        now_ns += dur_ns
        x += course.slope
        needed = course.needs[(course.step + count) % size]
        if count == course.num_steps or now_ns >= course.until_ns or kv_used + needed > course.num_blocks:
            return Progress(count, now_ns, kv_used)
        kv_used += needed
    raise ValueError("a walk has at least one step")


_SHORTEST: Final = 96
"""Steps from which arrays are faster than a loop; measured, and of no influence on results."""
_LONGEST: Final = 8192


def walk_in_blocks(course: Course, log: StepLog) -> Progress:
    """Run short courses step by step and long ones in arrays; both give the same integers."""
    if course.num_steps < _SHORTEST or course.until_ns - course.now_ns < _SHORTEST * course.fixed_ns:
        return walk_steps(course, log)
    total = 0
    while True:
        first_ns = course.fixed_ns + course.cost.forward_at(course.position)
        num_likely = min(course.num_steps, 1 + (course.until_ns - course.now_ns) // max(first_ns, 1))
        if num_likely < _SHORTEST:
            progress = walk_steps(course, log)
            return progress._replace(num_steps=total + progress.num_steps)
        size = min(num_likely, _LONGEST)
        progress = _walk_block(course, size, log)
        num_run, now_ns, kv_used = progress
        total += num_run
        step = course.step + num_run
        kv_next = kv_used + course.needs[step % len(course.needs)]
        is_cut = num_run < size or num_run == course.num_steps or now_ns >= course.until_ns
        if is_cut or kv_next > course.num_blocks:
            return progress._replace(num_steps=total)
        course = course._replace(
            position=course.position + course.slope * num_run,
            now_ns=now_ns,
            num_steps=course.num_steps - num_run,
            step=step,
            kv_used=kv_next,
        )


def _walk_block(course: Course, num_steps: int, log: StepLog) -> Progress:
    """Run up to ``num_steps``."""
    return steps_in_bounds(course, course.fixed_ns + forwards_ns(course, num_steps), log)


def forwards_ns(course: Course, num_steps: int) -> Integers:
    """model_forward of each of the next steps."""
    positions = course.position + course.slope * np.arange(num_steps)
    forward_ns = np.max([intercept + slope * positions for intercept, slope in course.cost.lines], axis=0)
    whole_ns: Integers = np.rint(forward_ns).astype(np.int64) + course.cost.forward_ns
    return whole_ns


def steps_in_bounds(course: Course, dur_ns: Integers, log: StepLog) -> Progress:
    """Append the steps of these durations that are within the bounds of the course."""
    num_steps = len(dur_ns)
    ends_ns = course.now_ns + np.cumsum(dur_ns)
    new_blocks = np.resize(np.roll(np.array(course.needs), -(course.step % len(course.needs))), num_steps)
    new_blocks[0] = 0  # the scheduler gave out the blocks of the first step
    kv_used = course.kv_used + np.cumsum(new_blocks)
    in_time = int(np.searchsorted(ends_ns, course.until_ns)) + 1
    with_room = int(np.searchsorted(kv_used, course.num_blocks, side="right"))
    num_run = min(num_steps, in_time, with_room)
    log.dur_ns.frombytes(dur_ns[:num_run].tobytes())
    log.kv_used.frombytes(kv_used[:num_run].astype(np.int32).tobytes())
    return Progress(num_run, int(ends_ns[num_run - 1]), int(kv_used[num_run - 1]))
