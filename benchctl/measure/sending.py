"""Sending requests to a server: announced to it, in its engine's dialect, while it is watched."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import httpx
import msgspec

from benchctl.engines.engine import Engine
from benchctl.errors import OWN_LIMITS, LoadError
from benchctl.load.client import StreamClient
from benchctl.load.control import underlying
from benchctl.load.tally import LoadSummary
from benchctl.load.workers import AnyLoad
from benchctl.profile.model import Arrival, VariantSettings
from benchctl.records.record import Call, PreparedRequest
from benchctl.workload.arrival import launch_offsets_ns

if TYPE_CHECKING:
    from benchctl.measure.server.server import AnyServer

_BAD_ANSWERS: Final[tuple[type[Exception], ...]] = (
    httpx.HTTPError,
    msgspec.MsgspecError,
    UnicodeDecodeError,
    json.JSONDecodeError,
    RecursionError,
)
"""Not all errors of decoders: around more than a decoder, ValueError would hide mistakes of ours."""
_CRASH_WAIT_S: Final = 2.0
"""How long a server that broke off an answer may take to end: its end explains more than the broken answer."""
_DRAIN_WAIT_S: Final = 8.0
"""The same for one that refuses connections: it was asked to end, and ends when it has drained."""
_BROKEN_OFF: Final = frozenset({"early-close", "reset", "server-error", "finish-error", "finish-abort"})
_UNREACHABLE: Final = frozenset({"connect-refused", "connect-timeout", "connect-failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """A server that is up, and how to speak to it."""

    engine: Engine
    settings: VariantSettings
    client: StreamClient
    server: "AnyServer | None" = None
    """Watched while requests are open; None for a server that is only sent requests."""
    stall_s: float = math.inf
    """Without anything arriving for an open request, until a watched server counts as hung."""


def calls_of(
    engine: Engine, settings: VariantSettings, requests: Iterable[PreparedRequest], *, is_warmup: bool
) -> Iterator[Call]:
    """``requests`` in the engine's dialect, each made when it is needed."""
    for request in requests:
        call = engine.request_call(request, settings)
        yield replace(call, is_warmup=True) if is_warmup else call


async def send_requests(
    target: ServerUnderTest,
    load: AnyLoad,
    requests: Iterable[PreparedRequest],
    *,
    is_warmup: bool,
    arrival: Arrival | None = None,
) -> None:
    """Send ``requests`` through ``load``, whose schedule is ``arrival``; None for a burst without limits.

    Raises ServerDiedError when a watched server ends meanwhile, and LoadError with cause ``hung`` when it hangs.
    """
    if target.server is None:
        await load.drive(calls_of(target.engine, target.settings, requests, is_warmup=is_warmup))
        return
    announced = tuple(requests)
    async with control_errors(target.server):
        await target.engine.announce(
            target.client.control,
            announced if arrival is None else _as_launched(announced, arrival),
            max_concurrency=None if arrival is None else arrival.max_concurrency,
            is_warmup=is_warmup,
        )
    calls = calls_of(target.engine, target.settings, announced, is_warmup=is_warmup)
    await _drive_watched(load, calls, target.server, target.stall_s)


def _as_launched(requests: Sequence[PreparedRequest], arrival: Arrival) -> Sequence[PreparedRequest]:
    """The requests as they come to the server: later than planned where launches are limited."""
    if arrival.launch_rate_limit is None:
        return requests
    offsets_ns = launch_offsets_ns((request.arrival_ns for request in requests), arrival.launch_rate_limit)
    return [
        msgspec.structs.replace(request, arrival_ns=offset_ns)
        for request, offset_ns in zip(requests, offsets_ns, strict=True)
    ]


async def _drive_watched(load: AnyLoad, calls: Iterable[Call], server: "AnyServer", stall_s: float) -> None:
    from benchctl.measure.server.health import raise_when_stalled  # noqa: PLC0415 - psutil, where there is a server

    driving = asyncio.create_task(load.drive(calls))
    death = asyncio.create_task(server.died())
    stall = asyncio.create_task(raise_when_stalled(load.activity, server, stall_s))
    try:
        await asyncio.wait({driving, death, stall}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            await asyncio.wait({death}, timeout=_crash_wait_s(load.summary().failures.keys()))
    finally:
        for task in (driving, death, stall):
            task.cancel()  # no effect on one that has ended
        await asyncio.wait({driving, death, stall})
    errors = [None if watcher.cancelled() else watcher.exception() for watcher in (stall, death)]
    server.check_alive()
    for error in errors:
        if error is not None:
            raise _own_limit(load.summary()) or error
    await driving


def _own_limit(load: LoadSummary) -> LoadError | None:
    """The limit of this machine by which requests failed, if any did: a server waits for what never reaches it."""
    limits = sorted(OWN_LIMITS.intersection(load.failures))
    if not limits:
        return None
    num_unsent = sum(load.failures[limit] for limit in limits)
    message = f"{num_unsent} of {load.num_sent} requests never reached the server ({load.first_error})"
    return LoadError(message, cause=limits[0])


def _crash_wait_s(error_kinds: AbstractSet[str]) -> float:
    """Seconds to wait for the end of a server whose requests failed with these errors."""
    if error_kinds & _UNREACHABLE:
        return _DRAIN_WAIT_S
    return _CRASH_WAIT_S if error_kinds & _BROKEN_OFF else 0.0


@asynccontextmanager
async def control_errors(server: "AnyServer") -> AsyncIterator[None]:
    """Translate errors between us and the server outside the measured requests into LoadError."""
    try:
        yield
    except _BAD_ANSWERS as error:
        if isinstance(error, httpx.TransportError):
            with suppress(TimeoutError):
                await asyncio.wait_for(server.died(), _CRASH_WAIT_S)
        server.check_alive()
        cause = underlying(error)
        raise LoadError(
            "the server is up but does not answer as its engine should "
            f"({type(cause).__name__}: {str(cause) or error}); its log says more",
            cause="bad-answer",
            log_tail=server.log_tail(),
        ) from error
