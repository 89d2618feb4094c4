"""A server that hangs: it is alive, requests are open, and nothing arrives for any of them."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil

from benchctl.errors import LoadError
from benchctl.load.tally import Activity
from benchctl.measure.server.server import Server
from benchctl.units import NS_PER_S, s_from_ns

_CHECKS_PER_LIMIT: Final = 8
"""A stall is found at most an eighth of the limit too late."""
_MAX_CHECK_S: Final = 1.0
_FILES_IN_PASSING: Final = 1
"""A server that was refused a file may have closed another one since."""


async def raise_when_stalled(activity: Callable[[], Activity], server: Server, limit_s: float) -> None:
    """Raise LoadError when no byte of any open request has arrived for ``limit_s``; never returns."""
    while True:
        await asyncio.sleep(min(limit_s / _CHECKS_PER_LIMIT, _MAX_CHECK_S))
        now, now_ns = activity(), time.monotonic_ns()
        silent_ns = silence_ns(now, now_ns)
        if silent_ns >= limit_s * NS_PER_S:
            _raise_for_lack_of_files(server)
            requests = f"{now.num_open} requests are" if now.num_open > 1 else "1 request is"
            oldest_s = s_from_ns(now_ns - now.oldest_sent_ns)
            raise LoadError(
                f"{_state(server)}: nothing has arrived for {s_from_ns(silent_ns):.1f} s (timeouts.stall_s is "
                f"{limit_s:g}) while {requests} open, the oldest for {oldest_s:.1f} s; read its log, or raise "
                "timeouts.stall_s",
                cause="hung",
                log_tail=server.log_tail(),
            )


def silence_ns(activity: Activity, now_ns: int) -> int:
    """Time during which nothing has arrived for any open request; 0 when none is open.

    Counted from the latest read of any request, but not from before the oldest open request was sent: requests sent
    since then are no sign of life of the server.
    """
    if not activity.num_open:
        return 0
    return now_ns - max(activity.last_arrival_ns, activity.oldest_sent_ns)


def _raise_for_lack_of_files(server: Server) -> None:
    """Raise LoadError where the server cannot accept connections: a process of it has all files that it may."""
    with suppress(psutil.Error):
        leader = psutil.Process(server.pid) if server.pid is not None else None
        for process in (leader, *leader.children(recursive=True)) if leader is not None else ():
            limit = _open_files_limit(process)
            if process.num_fds() >= limit - _FILES_IN_PASSING:
                raise LoadError(
                    f"process {process.pid} of the server has all {limit:,} files open that it may have, and "
                    "accepts no more requests; raise the limit (ulimit -n), or lower max_concurrency",
                    cause="too-many-open-files",
                    log_tail=server.log_tail(),
                )


def _open_files_limit(process: psutil.Process) -> int:
    limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == psutil.RLIM_INFINITY else limit


def _state(server: Server) -> str:
    with suppress(psutil.NoSuchProcess):
        if server.pid is not None and psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
            return f"the server hangs (its process {server.pid} is stopped)"
    return "the server hangs"
