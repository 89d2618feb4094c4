"""Runs a command and says what its whole family of processes took: processor time, memory, wall time."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.common.harness import FailedError

SAMPLE_S = 0.05
TAIL_LINES = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """``cpu_s``: user and system time of the process and its descendants. ``peak_bytes``: the most that the process
    had resident or, where the family is watched, the largest sum in a sample, in which memory that processes share
    counts for each of them."""

    cpu_s: float
    peak_bytes: int
    wall_s: float
    most_processes: int
    failure: str | None
    """The end of what it said when it failed."""


@dataclass(slots=True)
class Family:
    """What was seen of a process and its descendants so far."""

    pid: int
    cpu_s: dict[int, float] = field(default_factory=dict)
    """Of each process, when last seen."""
    peak_bytes: int = 0
    most_processes: int = 0

    def look(self) -> None:
        sizes: list[int] = []
        for process in self.members():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    self.cpu_s[process.pid] = times.user + times.system
                    sizes.append(process.memory_info().rss)
            except psutil.Error:  # it has just ended
                continue
        self.peak_bytes = max(self.peak_bytes, sum(sizes))
        self.most_processes = max(self.most_processes, len(sizes))

    def members(self) -> list[psutil.Process]:
        """All alive. Linux lists a process's children by thread, which costs less than a look at every process."""
        found, unseen = [], [self.pid]
        while unseen:
            pid = unseen.pop()
            try:
                found.append(psutil.Process(pid))
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    unseen.extend(map(int, children.read_text().split()))
            except (psutil.Error, OSError):  # it has just ended
                continue
        return found


def spent(argv: Sequence[str], work: Path, good_codes: Sequence[int] = (0,)) -> dict[str, float]:
    """What a command takes that nobody watches, its modules compiled beforehand. Raises FailedError."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(work / "bytecode")}
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **bytecode}
    log = work / "command.log"
    cost = run_measured(argv, log, timeout_s=600, environment=environment, is_watched=False, good_codes=good_codes)
    if cost.failure:
        raise FailedError(cost.failure)
    return {"wall s": cost.wall_s, "cpu s": cost.cpu_s, "peak MiB": cost.peak_bytes / 2**20}


def run_measured(
    argv: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    is_watched: bool = True,
    good_codes: Sequence[int] = (0,),
) -> Cost:
    """Run ``argv`` to its end; its output goes to ``log``. Whatever it leaves behind in its session is ended.

    Looking at a family takes processor time from it: where its times are what counts, it should not be watched.
    Processor time is what the kernel counted for the process and the descendants it waited for; of those that it
    did not wait for, what was last seen, when that is more.
    """
    began_s = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,  # modules beside the caller are not for the tool to import
            start_new_session=True,
            env={**os.environ, **environment},
        )
        family = Family(process.pid)
        try:
            status, used = wait(family, began_s + timeout_s, is_watched=is_watched)
        finally:
            end_session(process.pid)
    code = process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for here
    return Cost(
        cpu_s=max(used.ru_utime + used.ru_stime, sum(family.cpu_s.values())),
        peak_bytes=family.peak_bytes,
        wall_s=time.perf_counter() - began_s,
        most_processes=family.most_processes,
        failure=None if code in good_codes else f"ended with {code}: {tail(log)}",
    )


def wait(family: Family, deadline_s: float, *, is_watched: bool) -> tuple[int, resource.struct_rusage]:
    """Watch until the first process ends; past the deadline it is ended."""
    handle = os.pidfd_open(family.pid)  # readable as soon as it ends
    try:
        while not select.select([handle], [], [], SAMPLE_S)[0]:
            if is_watched:
                family.look()
            family.peak_bytes = max(family.peak_bytes, high_water_bytes(family.pid))
            if time.perf_counter() > deadline_s:
                end_session(family.pid)
    finally:
        os.close(handle)
    _, status, used = os.wait4(family.pid, 0)
    return status, used


def high_water_bytes(pid: int) -> int:
    """The most that a process has had resident; what the kernel counts at its end has its parent's memory in it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def end_session(leader: int) -> None:
    """Kill what still lives in the session that ``leader`` began."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.send_signal(signal.SIGKILL)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])
