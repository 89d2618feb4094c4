"""Settings of the sending process for a load: steady interpreter, open files, and scheduling priority."""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.profile.sections import PriorityOption

_SWITCH_INTERVAL_S: Final = 0.0005
_OPEN_FILES: Final = 65_536


@contextmanager
def steady_interpreter() -> Iterator[None]:
    """Keep the interpreter's own pauses out of arrival times.

    Inside, the collector does not search for cycles: a pass would stop all streams for milliseconds, and a load
    makes no cycles. A sampler thread hands the interpreter back after half a millisecond instead of five.
    """
    interval_s, was_enabled = sys.getswitchinterval(), gc.isenabled()
    gc.freeze()  # objects that exist now are not searched at the end
    gc.disable()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.collect()
        gc.unfreeze()
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
    return max(soft, min(_OPEN_FILES, hard))


FIFO_PRIORITY: Final = 1
"""The lowest of real-time priorities: above all ordinary threads, below whatever else is real-time."""
NICE: Final = -10
_THIS_THREAD: Final = 0


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

    ``num_processes`` is the number of processes of the load, each of which is raised. Raises no error of its own.
    """
    priority = (
        Priority(level="normal", reason=reason) if (reason := _reason_to_keep(option)) else _raise(num_processes)
    )
    try:
        yield priority
    finally:
        if priority.level != "normal":
            _lower()


def _reason_to_keep(option: PriorityOption) -> str:
    """The reason to keep the priority that we were started with; empty if it may change."""
    if option == "none":
        return "not requested"
    if not hasattr(os, "sched_setscheduler"):
        return "this system offers no other"
    try:
        policy = os.sched_getscheduler(_THIS_THREAD) & ~os.SCHED_RESET_ON_FORK
        nice = os.getpriority(os.PRIO_PROCESS, _THIS_THREAD)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    # Another priority was chosen deliberately: a job of low priority must not jump the queue.
    if policy != os.SCHED_OTHER:
        return f"benchctl was started with scheduling policy {policy}, which it keeps"
    return f"benchctl was started at nice {nice}, which it keeps" if nice else ""


def _raise(num_processes: int) -> Priority:
    fifo = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    not_fifo = _obstacle_to_fifo(num_processes) or _set_policy(fifo, FIFO_PRIORITY)
    if not not_fifo:
        return Priority(level="fifo")
    if not (not_nice := _take_nice()):
        return Priority(level="nice", reason=f"fifo: {not_fifo}")
    return Priority(level="normal", reason=f"fifo: {not_fifo}; nice: {not_nice}")


def _obstacle_to_fifo(num_processes: int) -> str:
    """The reason why real-time scheduling is dangerous here; empty without one."""
    num_cores = len(os.sched_getaffinity(_THIS_THREAD))
    if num_processes >= num_cores:  # ours could occupy all of them
        return f"{_counted(num_processes, 'process')} on {_counted(num_cores, 'core')}"
    if resource.getrlimit(resource.RLIMIT_RTTIME)[0] != resource.RLIM_INFINITY:
        return "RLIMIT_RTTIME would end the process"
    return ""


def _take_nice() -> str:
    """Take it; returns the obstacle, empty without one."""
    try:
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, NICE)
    except OSError as error:
        return _reason(error)
    if obstacle := _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0):
        _lower()  # processes that we start would inherit it
    return obstacle


def _lower() -> None:
    """Restore ordinary priority, as far as the system permits."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, 0)
    if _set_policy(os.SCHED_OTHER, 0):
        # Without privilege the flag cannot be removed; for an ordinary thread it has no effect.
        _set_policy(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)


def _set_policy(policy: int, priority: int) -> str:
    """Set the scheduling policy; returns the obstacle, empty without one."""
    try:
        os.sched_setscheduler(_THIS_THREAD, policy, os.sched_param(priority))
    except OSError as error:
        return _reason(error)
    return ""


def _reason(error: OSError) -> str:
    return "not permitted" if isinstance(error, PermissionError) else str(error.strerror)


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
