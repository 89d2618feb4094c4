"""Decode steps of one unchanged batch, one after the other: nothing here is done for each row or block.

Every step adds one token to each row, so the sum of contexts grows by the number of rows and the price of the step
is a point further on a line. ``walk`` evaluates that line in one of three ways, which give the same integers: in a
loop over local variables, as arrays where many steps lie ahead, or with a factor of its own for each step.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from benchctl.records.columns import Integers
from benchctl.sim.costs.cost_model import DecodeCost, GuidedCounts, NoiseSource
from benchctl.sim.steps import StepLog

NEVER_NS: Final = 1 << 62
"""Later than any virtual time."""
_SHORTEST: Final = 96
"""Steps from which arrays are faster than a loop; measured, and of no influence on results."""
_LONGEST: Final = 8192


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


class Progress(NamedTuple):
    """The number of steps that were run, at least 1, their end, and the blocks in use in the last of them."""

    num_steps: int
    now_ns: int
    kv_used: int


def walk(course: Course, log: StepLog, noise: NoiseSource | None = None) -> Progress:
    """Run steps and append the columns of each to a log; an end before the bounds of the course means nothing."""
    if noise is not None:
        return _walk_with_noise(course, log, noise)
    left_ns = course.until_ns - course.now_ns
    if course.num_steps >= _SHORTEST and left_ns >= _SHORTEST * course.fixed_ns:
        first_ns = course.fixed_ns + course.cost.forward_at(course.position)
        num_likely = min(course.num_steps, 1 + left_ns // max(first_ns, 1))
        if num_likely >= _SHORTEST:
            return walk_in_arrays(course, min(num_likely, _LONGEST), log)
    return walk_steps(course, log)


def walk_steps(course: Course, log: StepLog) -> Progress:
    """Step by step, in local variables."""
    cost, fixed_ns, x, slope, now_ns, until_ns, num_steps, step, kv_used, needs, num_blocks = course
    (intercept, per_token), (other, per_token_other) = (*cost.lines, cost.lines[0])[:2]
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


def walk_in_arrays(course: Course, num_steps: int, log: StepLog) -> Progress:
    """Up to ``num_steps`` at once."""
    return _steps_in_bounds(course, course.fixed_ns + _forwards_ns(course, num_steps), log)


def walk_guided(course: Course, counts: GuidedCounts, log: StepLog) -> Progress:
    """Steps of a batch with guided rows, which were drawn: as many as ``counts`` has."""
    cost = course.cost
    if cost.scored_rest is None or cost.value_forward_ns is None:
        raise TypeError("this price has no guided rows")
    is_scored = counts.scored_rows > 0
    value_ns = np.rint(cost.value_forward_ns(counts)).astype(np.int64)
    scored_ns = cost.scored_rest.total_ns() - cost.rest.total_ns() + value_ns
    dur_ns = course.fixed_ns + _forwards_ns(course, len(is_scored)) + np.where(is_scored, scored_ns, 0)
    progress = _steps_in_bounds(course, dur_ns, log)
    columns = (*counts, np.where(is_scored, value_ns, -1))
    for column, values in zip(log.extra.values(), columns, strict=True):
        column.frombytes(values[: progress.num_steps].tobytes())
    return progress


def _forwards_ns(course: Course, num_steps: int) -> Integers:
    """model_forward of each of the next steps."""
    positions = course.position + course.slope * np.arange(num_steps)
    forward_ns = np.max([intercept + slope * positions for intercept, slope in course.cost.lines], axis=0)
    whole_ns: Integers = np.rint(forward_ns).astype(np.int64) + course.cost.forward_ns
    return whole_ns


def _steps_in_bounds(course: Course, dur_ns: Integers, log: StepLog) -> Progress:
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
    return Progress(num_run, now_ns, kv_used)
