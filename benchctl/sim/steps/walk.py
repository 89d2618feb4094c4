"""Decode steps of one unchanged batch, one after the other: nothing here is done for each row or block."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from benchctl.sim.costs.cost_model import DecodeCost
from benchctl.sim.costs.noise import NoiseSource
from benchctl.sim.steps.log import StepLog

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
