"""The engine ``micro``, whose passes ``benchctl micro`` measures: here is what readers of its results ask for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchctl.engines.engine import LaunchSite, OpenAiServer
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import VariantSettings
from benchctl.records.record import Call, PreparedRequest

if TYPE_CHECKING:
    import httpx

_REMEDY = (
    "computes forward passes and serves no requests: 'benchctl micro forward' measures such an experiment, and "
    "'benchctl micro forward --resume DIR' continues one"
)


class MicroEngine(OpenAiServer):
    """Forward passes in a process of their own."""

    kind = "micro"
    is_launched = False
    needs_first_generation = False

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError: nothing can be started that requests could be sent to."""
        raise EngineUnavailableError(f"engine 'micro' {_REMEDY}")

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for any request."""
        if requests:
            raise self.refusal(settings, _REMEDY, "set workload.dataset to none")

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """None: there is nothing to ask."""
        return None

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """None: nothing is started."""
        return ()

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """Raises EngineUnavailableError: there is nothing to ask."""
        raise EngineUnavailableError(f"engine 'micro' {_REMEDY}")

    async def effective_config(
        self, client: "httpx.AsyncClient", settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """Empty: the process that computes reports its settings by itself."""
        return {}

    def has_steps(self, settings: VariantSettings) -> bool:
        """Each pass is a step."""
        return True
