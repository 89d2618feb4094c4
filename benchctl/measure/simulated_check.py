"""Servers of an experiment on the simulator, started before its first run: they take the requests, or none would.

What is refused here would fail every run.
"""

from collections.abc import Iterable, Sequence

from benchctl.errors import UsageError
from benchctl.measure.measured_run import ignore
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.sim.virtual_server import VirtualServer


def check_simulated(arms: Iterable[VariantSettings], requests: Sequence[PreparedRequest]) -> None:
    """Start the server of each arm in virtual time, and show it the request that needs least room.

    Raises UsageError where a server cannot start, or refuses this request and with it all others.
    """
    shortest = min(requests, key=lambda request: request.prompt_tokens + request.max_tokens)
    for settings in arms:
        server = VirtualServer(settings, on_step=ignore)
        try:
            server.check_servable(shortest)
        except UsageError as error:
            raise UsageError(
                f"engine 'sim', variant {settings.variant!r}: every request would be refused: {error}"
            ) from error
