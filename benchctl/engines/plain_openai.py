"""Servers that speak the dialect of OpenAI, and of which nothing more is known: the published API and no more."""

from collections.abc import Sequence
from typing import Any

from benchctl.engines.engine import RequestCall
from benchctl.engines.openai_server import streamed, unsupported
from benchctl.profile.engine_options import AttachOptions
from benchctl.profile.model import VariantSettings
from benchctl.records.request import PreparedRequest


class PlainOpenAi:
    """The dialect ``openai`` of the engine ``attach``."""

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what the published API has no words for."""
        sampling = settings.sampling
        if settings.guidance is not None:
            raise unsupported("attach", settings, "loads no value model", "measure guidance on a guided engine")
        if sampling.top_k != -1 or sampling.min_p != 0:
            what = "is asked in the dialect openai, which has neither top_k nor min_p"
            raise unsupported("attach", settings, what, "leave them out, or name its dialect in server.dialect")

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Unknown: each kind of server has a place of its own, or none."""
        return None

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
        """Ask for ``request``. ``ignore_eos`` is said only where it matters: strict servers refuse the word."""
        options, sampling = settings.server, settings.sampling
        served = options.served_model if isinstance(options, AttachOptions) else None
        body: dict[str, Any] = {
            "model": served or settings.model,
            "n": request.n,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        return streamed(request, body)
