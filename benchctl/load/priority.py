"""A client that gets its turn on the processor first, while a load goes on.

Beside a server that keeps every core busy, a thread of ordinary priority waits for its turn: requests leave late
and what has arrived is read late. The event loop therefore asks for real-time scheduling at the lowest priority
(SCHED_FIFO, 1), else for a negative nice value, and goes on without where it gets neither.

Only the calling thread is raised. What it starts meanwhile, threads and processes, begins as ordinary
(SCHED_RESET_ON_FORK), so that no server ever inherits it.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.profile.model import PriorityOption

FIFO_PRIORITY: Final = 1
"""The lowest of real-time priorities: above all ordinary threads, below whatever else is real-time."""
NICE: Final = -10
_THIS_THREAD: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """What a client got, and why no more than that (empty for ``fifo``, the most there is)."""

    level: Literal["fifo", "nice", "normal"]
    reason: str = ""

    def __str__(self) -> str:
        name = f"nice {NICE}" if self.level == "nice" else self.level
        return f"{name} ({self.reason})" if self.reason else name


@contextmanager
def load_priority(option: PriorityOption, num_processes: int = 1) -> Iterator[Priority]:
    """Raise the calling thread as far as permitted, and put it back afterwards; tells what it got.

    ``num_processes`` are those of the load, each of which asks. Never raises an error of its own.
    """
    priority = Priority(level="normal", reason=reason) if (reason := _kept(option)) else _raise(num_processes)
    try:
        yield priority
    finally:
        if priority.level != "normal":
            _lower()


def _kept(option: PriorityOption) -> str:
    """Why the priority that we were started with stays as it is; empty where it may change."""
    if option == "none":
        return "not asked for"
    if not hasattr(os, "sched_setscheduler"):
        return "this system offers no other"
    try:
        policy = os.sched_getscheduler(_THIS_THREAD) & ~os.SCHED_RESET_ON_FORK
        nice = os.getpriority(os.PRIO_PROCESS, _THIS_THREAD)
    except OSError as error:
        return f"the system does not tell it: {error.strerror}"
    # Whoever started us with another one meant it: a job of low priority shall not jump the queue.
    if policy != os.SCHED_OTHER:
        return f"benchctl was started with scheduling policy {policy}, which it keeps"
    return f"benchctl was started at nice {nice}, which it keeps" if nice else ""


def _raise(num_processes: int) -> Priority:
    not_fifo = _obstacle_to_fifo(num_processes) or _take_fifo()
    if not not_fifo:
        return Priority(level="fifo")
    if not (not_nice := _take_nice()):
        return Priority(level="nice", reason=f"fifo: {not_fifo}")
    return Priority(level="normal", reason=f"fifo: {not_fifo}; nice: {not_nice}")


def _obstacle_to_fifo(num_processes: int) -> str:
    """What makes real-time scheduling dangerous here; empty where nothing does."""
    num_cores = len(os.sched_getaffinity(_THIS_THREAD))
    if num_processes >= num_cores:  # on each of them one of ours could keep all others waiting
        return f"{_counted(num_processes, 'process')} on {_counted(num_cores, 'core')}"
    if resource.getrlimit(resource.RLIMIT_RTTIME)[0] != resource.RLIM_INFINITY:
        return "RLIMIT_RTTIME would end the process"
    return ""


def _take_fifo() -> str:
    """Take it; returns what was in the way."""
    return _set_policy(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, FIFO_PRIORITY)


def _take_nice() -> str:
    """Take it; returns what was in the way."""
    try:
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, NICE)
    except OSError as error:
        return _said(error)
    if obstacle := _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0):
        _lower()  # what we start would inherit it
    return obstacle


def _lower() -> None:
    """Back to what ``_kept`` found, as far as the system lets us."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, 0)
    if _set_policy(os.SCHED_OTHER, 0):
        # Without privilege the flag cannot be taken off again; an ordinary thread has nothing that it would reset.
        _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)


def _set_policy(policy: int, priority: int) -> str:
    """Returns what was in the way; empty where nothing was."""
    try:
        os.sched_setscheduler(_THIS_THREAD, policy, os.sched_param(priority))
    except OSError as error:
        return _said(error)
    return ""


def _said(error: OSError) -> str:
    return "not permitted" if isinstance(error, PermissionError) else str(error.strerror)


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
