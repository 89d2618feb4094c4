"""Settings of the sending process for a load: an interpreter that does not delay timestamps, enough open files, and
scheduling priority.

Next to a server that keeps every core busy, a thread of ordinary priority waits for a core: requests leave late and
arrivals are read late. The event loop therefore requests real-time scheduling at the lowest priority (SCHED_FIFO,
1), else a negative nice value, and continues without if neither is permitted. Only the calling thread is raised.
Threads and processes that it starts meanwhile have ordinary priority (SCHED_RESET_ON_FORK): no server inherits it.
"""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.profile.sections import PriorityOption

NICE: Final = -10
_THIS_THREAD: Final = 0


@contextmanager
def steady_interpreter() -> Iterator[None]:
    """Keep the interpreter's own pauses out of arrival times.

    Inside, the collector does not search for cycles: a pass would stop all streams for milliseconds, and a load
    makes no cycles. A sampler thread hands the interpreter back after half a millisecond instead of five.
    """
    interval_s, was_enabled = sys.getswitchinterval(), gc.isenabled()
    gc.disable()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if was_enabled:
            gc.enable()


def allow_many_open_files() -> None:
    """Raise the limit of open files of this process as far as the system permits without privilege.

    Each open request is one. Processes that are started later inherit the limit: call this before the first server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = usable_open_files()
    if soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def usable_open_files() -> int:
    """The limit of open files of a process after ``allow_many_open_files``."""
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return max(soft, min(65_536, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """The priority of a client, and the reason why it is not higher (empty for ``fifo``, the highest)."""

    level: Literal["fifo", "nice", "normal"]
    reason: str = ""

    def __str__(self) -> str:
        name = f"nice {NICE}" if self.level == "nice" else self.level
        return f"{name} ({self.reason})" if self.reason else name


@contextmanager
def load_priority(option: PriorityOption, num_processes: int = 1) -> Iterator[Priority]:
    """Raise the calling thread as far as permitted, and restore it afterwards; yields what was granted.

    ``num_processes`` is the number of processes of the load, each of which is raised: were they as many as there
    are cores, real-time scheduling could occupy all of them. Raises no error of its own.
    """
    policy = os.sched_getscheduler(_THIS_THREAD) & ~os.SCHED_RESET_ON_FORK
    nice = os.getpriority(os.PRIO_PROCESS, _THIS_THREAD)
    if option == "none":
        priority = Priority(level="normal", reason="not requested")
    elif policy != os.SCHED_OTHER or nice:  # chosen deliberately: a job of low priority must not jump the queue
        chosen = f"nice {nice}" if nice else f"scheduling policy {policy}"
        priority = Priority(level="normal", reason=f"benchctl was started with {chosen}, which it keeps")
    elif num_processes >= len(os.sched_getaffinity(_THIS_THREAD)):
        priority = _take_nice("fifo: the load could occupy every core")
    else:
        # Above all ordinary threads, below whatever else is real-time
        obstacle = _set_policy(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, 1)
        priority = _take_nice(f"fifo: {obstacle}") if obstacle else Priority(level="fifo")
    try:
        yield priority
    finally:
        if priority.level != "normal":
            _lower()


def _take_nice(reason: str) -> Priority:
    """Take the negative nice value, which is not ``fifo`` for that reason; ordinary priority if it is refused."""
    try:
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, NICE)
    except OSError as error:
        return Priority(level="normal", reason=f"{reason}; nice: {error.strerror}")
    _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)
    return Priority(level="nice", reason=reason)


def _lower() -> None:
    """Restore ordinary priority. Without privilege the flag stays, which means nothing for an ordinary thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, 0)
    if _set_policy(os.SCHED_OTHER, 0):
        _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)


def _set_policy(policy: int, priority: int) -> str:
    """Set the scheduling policy; returns the obstacle, empty without one."""
    try:
        os.sched_setscheduler(_THIS_THREAD, policy, os.sched_param(priority))
    except OSError as error:
        return str(error.strerror)
    return ""
