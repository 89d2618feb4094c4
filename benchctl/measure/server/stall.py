"""A server that hangs: it is alive, requests are open, and nothing arrives for any of them."""

import asyncio
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


async def raise_when_stalled(activity: Callable[[], Activity], server: Server, limit_s: float) -> None:
    """Raise LoadError when no byte of any open request has arrived for ``limit_s``; never returns."""
    while True:
        await asyncio.sleep(min(limit_s / _CHECKS_PER_LIMIT, _MAX_CHECK_S))
        now, now_ns = activity(), time.monotonic_ns()
        silent_ns = silence_ns(now, now_ns)
        if silent_ns >= limit_s * NS_PER_S:
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


def _state(server: Server) -> str:
    with suppress(psutil.NoSuchProcess):
        if server.pid is not None and psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
            return f"the server hangs (its process {server.pid} is stopped)"
    return "the server hangs"
