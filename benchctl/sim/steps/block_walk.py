"""Long stretches of decode steps as arrays: the numbers of ``walk_steps``, a few thousand at a time."""

from typing import Final

import numpy as np

from benchctl.records.columns import Integers
from benchctl.sim.steps.log import StepLog
from benchctl.sim.steps.walk import Course, Progress, walk_steps

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
