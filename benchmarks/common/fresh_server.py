"""A server of an engine, started for a benchmark and ended with it."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchctl.engines.engine import Engine, LaunchSite
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import Profile, VariantSettings


@contextmanager
def fresh_server(
    engine: Engine,
    profile: Profile,
    settings: VariantSettings,
    site: LaunchSite,
    env: Mapping[str, str],
    log: Path | None = None,
) -> Iterator[str]:
    """The address of a server that is ready and has answered nothing yet; ``log`` is ``server.log`` by default."""
    launch = Launch(
        argv=engine.argv(settings, site),
        env=dict(env),
        port=site.port,
        health_path=engine.health_path(settings),
        log=site.directory / "server.log" if log is None else log,
        timeouts=profile.timeouts,
        diagnose=engine.diagnose,
    )
    with ServerProcess(launch) as server:
        asyncio.run(_ready(server, launch.base_url))
        yield launch.base_url


async def _ready(server: ServerProcess, base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url) as client:
        await server.wait_ready(client)
