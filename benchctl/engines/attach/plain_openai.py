"""The dialect ``openai``: OpenAI's published API and no extension of it."""

from collections.abc import Sequence
from typing import Any

from benchctl.engines.engine import RequestCall
from benchctl.engines.openai_server import OpenAiServer, streamed
from benchctl.profile.model import VariantSettings
from benchctl.records.request import PreparedRequest


class PlainOpenAi(OpenAiServer):
    """Servers of an unknown kind that speak OpenAI's API."""

    kind = "attach"

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what the published API cannot express."""
        super().check_requests(requests, settings)
        if settings.sampling.top_k != -1 or settings.sampling.min_p != 0:
            what = "is asked in the dialect openai, which has neither top_k nor min_p"
            raise self.refusal(settings, what, "leave them out, or name its dialect in server.dialect")

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Unknown: each kind of server has its own path, or none."""
        return None

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
        """Ask for ``request``; ``ignore_eos`` only where it matters, as strict servers refuse unknown fields."""
        sampling = settings.sampling
        body: dict[str, Any] = {
            "model": settings.server.request_model or settings.model,
            "n": request.n,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        return streamed(request, body)
