"""What servers share that others wrote and that speak the dialect of OpenAI: asked by HTTP, timed by the host."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from benchctl.engines.engine import LaunchSite, RequestCall
from benchctl.profile.model import VariantSettings
from benchctl.records.jsonl import encode
from benchctl.records.run import Clock, PreparedRequest, ResultWarning

LOOPBACK: Final = "127.0.0.1"


class OpenAiServer:
    """The part of an engine that such servers do not differ in; each engine's file adds the rest."""

    clock: Final[Clock] = "host"
    needs_first_generation: Final = True

    def health_path(self, settings: VariantSettings) -> str:
        return "/health"

    def base_url(self, settings: VariantSettings, port: int) -> str:
        return f"http://{LOOPBACK}:{port}"

    def time_scale(self, settings: VariantSettings) -> float:
        """Their clock is ours."""
        return 1.0

    async def announce(
        self,
        client: httpx.AsyncClient,
        requests: Sequence[PreparedRequest],
        *,
        max_concurrency: int | None,
        is_warmup: bool,
    ) -> None:
        """They take requests as they come."""

    async def after_load_warnings(self, client: httpx.AsyncClient) -> tuple[ResultWarning, ...]:
        """They say nothing of their own doubts."""
        return ()

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """Nothing but what the profile sets."""
        return dict(getattr(settings.server, "env", {}))


def streamed(
    request: PreparedRequest, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> RequestCall:
    """``request`` as a streamed completion, or chat completion where it has messages, with ``body`` beside it."""
    asked: dict[str, Any] = {**body, "max_tokens": request.max_tokens, "stream": True}
    if request.messages is not None:
        path, asked["messages"] = "/v1/chat/completions", request.messages
    else:
        path, asked["prompt"] = "/v1/completions", request.prompt
    return RequestCall(
        path=path, headers={"X-Request-Id": request.request_id, **(headers or {})}, body=encode(asked)
    )
