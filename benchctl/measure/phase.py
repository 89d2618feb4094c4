"""One phase of a run (the warm-up or the load): announce the requests, send them, watch the server meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from benchctl.engines.engine import Engine
from benchctl.errors import LoadError
from benchctl.load.transport.client import StreamClient
from benchctl.load.transport.failures import underlying
from benchctl.load.workers.workers import AnyLoad
from benchctl.measure.calls import calls_of
from benchctl.measure.server.server import Server
from benchctl.measure.server.stall import stalled
from benchctl.profile.model import VariantSettings
from benchctl.records.run import PreparedRequest

_LAST_BREATH_S: Final = 2.0
"""How long a server that has broken off may take to end, so that its end is told and not what came of it."""
_FAREWELL_S: Final = 8.0
"""The same for one that refuses connections: it has been asked to end and does so when it has drained."""
_BROKEN_OFF: Final = frozenset({"early-close", "reset", "server-error"})
_UNREACHABLE: Final = frozenset({"connect-refused", "connect-timeout", "connect-failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that is up, and how to speak to it."""

    engine: Engine
    settings: VariantSettings
    server: Server
    client: StreamClient
    stall_s: float
    """Without anything arriving for an open request, until the server counts as hung."""


async def drive(
    target: Target,
    load: AnyLoad,
    requests: Sequence[PreparedRequest],
    *,
    max_concurrency: int | None,
    is_warmup: bool,
) -> None:
    """Send ``requests`` through ``load``.

    Raises ServerDiedError when the server ends meanwhile, and LoadError with cause ``hung`` when it hangs.
    """
    calls = calls_of(target.engine, target.settings, requests, is_warmup=is_warmup)
    async with control_errors(target.server):
        await target.engine.announce(
            target.client.control, requests, max_concurrency=max_concurrency, is_warmup=is_warmup
        )
    driving = asyncio.create_task(load.drive(calls))
    death = asyncio.create_task(target.server.died())
    stall = asyncio.create_task(stalled(load.activity, target.server, target.stall_s))
    try:
        await asyncio.wait({driving, death, stall}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            await asyncio.wait({death}, timeout=_patience_s(load.error_kinds))
    finally:
        for task in (driving, death, stall):
            task.cancel()  # no effect on one that has ended
        await asyncio.wait({driving, death, stall})
    troubles = [None if watcher.cancelled() else watcher.exception() for watcher in (stall, death)]
    target.server.check_alive()
    for trouble in troubles:
        if trouble is not None:
            raise trouble
    await driving


def _patience_s(error_kinds: frozenset[str]) -> float:
    """How long to wait for the end of a server whose requests failed in these ways."""
    if error_kinds & _UNREACHABLE:
        return _FAREWELL_S
    return _LAST_BREATH_S if error_kinds & _BROKEN_OFF else 0.0


@asynccontextmanager
async def control_errors(server: Server) -> AsyncIterator[None]:
    """Translate what goes wrong between us and the server outside the measured requests."""
    try:
        yield
    except (httpx.HTTPError, msgspec.DecodeError, json.JSONDecodeError) as error:
        if isinstance(error, httpx.TransportError):
            with suppress(TimeoutError):
                await asyncio.wait_for(server.died(), _LAST_BREATH_S)
        server.check_alive()
        cause = underlying(error)
        raise LoadError(
            f"the server is up but does not answer as its engine should ({type(cause).__name__}: {cause}); "
            "its log says more",
            cause="bad-answer",
            log_tail=server.log_tail(),
        ) from error
