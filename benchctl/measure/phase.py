"""One phase of a run (the warm-up or the load): announce the requests, send them, watch the server meanwhile."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import httpx
import msgspec

from benchctl.engines.engine import Engine
from benchctl.errors import LoadError
from benchctl.measure.client import Call, StreamClient
from benchctl.measure.load import Load
from benchctl.measure.server import Server
from benchctl.profile.model import VariantSettings
from benchctl.records.run import PreparedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that is up, and how to speak to it."""

    engine: Engine
    settings: VariantSettings
    server: Server
    client: StreamClient

    def call(self, request: PreparedRequest, *, is_warmup: bool) -> Call:
        """``request`` in the engine's dialect, ready to be sent."""
        asked = self.engine.request_call(request, self.settings)
        return self.client.prepare(request, asked.path, asked.headers, asked.body, is_warmup=is_warmup)


async def drive(
    target: Target, load: Load, requests: Sequence[PreparedRequest], *, max_concurrency: int | None, is_warmup: bool
) -> None:
    """Send ``requests`` through ``load``. Raises ServerDiedError when the server ends meanwhile."""
    calls = [target.call(request, is_warmup=is_warmup) for request in requests]
    with control_errors(target.server):
        await target.engine.announce(
            target.client.control, requests, max_concurrency=max_concurrency, is_warmup=is_warmup
        )
    driving = asyncio.create_task(load.drive(calls))
    death = asyncio.create_task(target.server.died())
    try:
        await asyncio.wait({driving, death}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        death.cancel()
        driving.cancel()  # no effect on one that has ended
        await asyncio.wait({driving, death})
    target.server.check_alive()
    await driving


@contextmanager
def control_errors(server: Server) -> Iterator[None]:
    """Translate what goes wrong between us and the server outside the measured requests."""
    try:
        yield
    except (httpx.HTTPError, aiohttp.ClientError, msgspec.DecodeError, json.JSONDecodeError) as error:
        server.check_alive()
        cause = error.__cause__ or error
        raise LoadError(
            f"the server is up but does not answer as its engine should ({type(cause).__name__}: {cause}); "
            "its log says more",
            cause="bad-answer",
            log_tail=server.log_tail(),
        ) from error
