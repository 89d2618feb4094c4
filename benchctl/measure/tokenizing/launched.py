"""A server that is started to be asked for lengths of prompts, and ended before anything is measured."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchctl.engines.engine import Engine, LaunchSite
from benchctl.errors import ServerStartError, UsageError
from benchctl.load.control import control_client
from benchctl.measure.interrupt import run_interruptible
from benchctl.measure.redaction import server_env
from benchctl.measure.server.resources import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import VariantSettings
from benchctl.profile.sections import Timeouts


@contextmanager
def launched_server(
    engine: Engine, settings: VariantSettings, timeouts: Timeouts, on_start: Callable[[str], None]
) -> Iterator[str]:
    """The address of a server of these settings, which is ready and lives as long as the context.

    ``on_start`` is told in words what is started. Raises EngineUnavailableError where it is not installed,
    ServerStartError where it does not become ready, and UsageError where it never will; the log is then
    kept.
    """
    engine.check_available(settings)
    directory = Path(tempfile.mkdtemp(prefix="benchctl-tokenizer-"))
    site = LaunchSite(port=choose_port(settings.server.fixed_port), directory=directory)
    launch = Launch(
        argv=engine.argv(settings, site),
        env=server_env(os.environ, engine.env(settings, site)),
        port=site.port,
        health_path=engine.health_path(settings),
        log=directory / "server.log",
        timeouts=timeouts,
        diagnose=engine.diagnose,
        essential_processes=engine.essential_processes,
    )
    on_start(f"starting a server of {settings.variant} to count the prompts: only it has the tokenizer")
    with ServerProcess(launch) as server:
        try:
            run_interruptible(_ready(server, launch))
        except ServerStartError as error:
            if error.is_profile_error:
                raise UsageError(str(error), log_tail=error.log_tail) from error
            raise
        yield launch.base_url
    shutil.rmtree(directory, ignore_errors=True)


async def _ready(server: ServerProcess, launch: Launch) -> None:
    async with control_client(launch.base_url, launch.timeouts) as client:
        await server.wait_ready(client)
