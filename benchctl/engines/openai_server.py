"""What servers share that others wrote and that speak the dialect of OpenAI: asked by HTTP, timed by the host."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchctl.engines.engine import LaunchSite, RequestCall
from benchctl.errors import UnsupportedError
from benchctl.profile.model import VariantSettings
from benchctl.records.jsonl import encode
from benchctl.records.record import ResultWarning
from benchctl.records.request import PreparedRequest
from benchctl.records.step import Clock

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


def plugged_in(own: Mapping[str, str], directory: Path, name: str, *, allowed_in: str) -> dict[str, str]:
    """The environment ``own`` with our plugin ``name``, which lies in ``directory``, in the way of the server.

    ``allowed_in`` is the variable that lists what plugins the engine may load; unset means all, and so stays unset.
    """
    plugged = {**own, "PYTHONPATH": _first(str(directory), _inherited(own, "PYTHONPATH"), os.pathsep)}
    if (allowed := _inherited(own, allowed_in)) is not None:
        plugged[allowed_in] = _first(name, allowed, ",")
    return plugged


def _inherited(own: Mapping[str, str], name: str) -> str | None:
    return own.get(name, os.environ.get(name))


def _first(added: str, before: str | None, separator: str) -> str:
    return f"{added}{separator}{before}" if before else added


def unsupported(kind: str, settings: VariantSettings, what: str, remedy: str) -> UnsupportedError:
    """The refusal of what a server cannot do; ``what`` goes on after "the server"."""
    return UnsupportedError(f"engine {kind!r}, variant {settings.variant!r}: the server {what}; {remedy}")
