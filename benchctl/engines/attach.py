"""A server that someone else started, asked in the dialect of its kind.

Nothing is started, watched from inside or ended: no command line, log, processes, GPU or steps. What the server
tells of itself is asked over HTTP, and an address that stays silent about it is only less known. The server may be
anywhere, also behind ``https``; a key is read from our environment when a request is made, and never recorded.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec

from benchctl.engines.engine import Diagnosis, LaunchSite, RequestCall
from benchctl.engines.openai_server import OpenAiServer
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_options import AttachOptions
from benchctl.profile.model import VariantSettings
from benchctl.records.jsonl import encode
from benchctl.records.request import PreparedRequest
from benchctl.records.step import StepRecord


class Dialect(Protocol):
    """What is asked of the engine whose servers are spoken to."""

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError when such servers cannot do what these requests or settings ask."""

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Where their counters are."""

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
        """How they are asked."""


_PENALISING: Final = frozenset({"vllm", "sglang"})
"""Dialects whose servers may add the repetition penalty that a model's own file wishes, unless they are told."""


class AttachEngine(OpenAiServer):
    """Servers of others."""

    kind: Final = "attach"
    is_launched: Final = False
    essential_processes: Final[tuple[str, ...]] = ()

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when our environment has not the key that the server asks for, or none that
        a request can carry.
        """
        name = _options(settings).api_key_env
        if name is None:
            return
        key = os.environ.get(name)
        where = f"engine 'attach', variant {settings.variant!r}: api_key_env names {name}"
        if not key:
            raise EngineUnavailableError(f"{where}, which is not set; export {name}, or leave api_key_env out")
        if not (key.isascii() and key.isprintable()):
            raise EngineUnavailableError(
                f"{where}, whose value holds line breaks or other characters that no request carries; "
                f"export {name} without them"
            )

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what servers of this dialect cannot do."""
        _dialect(settings).check_requests(requests, settings)

    def metrics_path(self, settings: VariantSettings) -> str | None:
        return _dialect(settings).metrics_path(settings)

    def base_url(self, settings: VariantSettings, port: int) -> str:
        return _options(settings).url

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """None: nothing is started."""
        return ()

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
        """Ask for ``request`` in the server's dialect, with its key where it wants one."""
        options = _options(settings)
        call = _dialect(settings).request_call(request, settings)
        body: dict[str, Any] = msgspec.json.decode(call.body)
        if options.served_model is None:
            body.pop("model", None)
        if options.dialect in _PENALISING:
            body["repetition_penalty"] = 1.0
        return replace(call, headers={**call.headers, **_authorization(options)}, body=encode(body))

    async def effective_config(
        self, client: httpx.AsyncClient, settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """The address, and what the server says of itself there."""
        options = _options(settings)
        told = await _told(client, options)
        return {**told, "url": options.url, "dialect": options.dialect}

    def has_steps(self, settings: VariantSettings) -> bool:
        return False

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """None: what runs inside the server is its owner's."""
        return iter(())

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        """Nothing: the log is its owner's."""
        return None


async def _told(client: httpx.AsyncClient, options: AttachOptions) -> dict[str, Any]:
    headers = _authorization(options)
    if options.dialect == "sglang":
        from benchctl.engines.sglang.engine import told_config as told_by_sglang

        info = await _asked(client, "/server_info", headers) or await _asked(client, "/get_server_info", headers)
        return told_by_sglang(info)
    if options.dialect == "llamacpp":
        from benchctl.engines.llamacpp import told_config as told_by_llamacpp

        return told_by_llamacpp(await _asked(client, "/props", headers))
    models = (await _asked(client, "/v1/models", headers)).get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    config = {"served_model": first.get("id"), "model_path": first.get("root")}
    config["max_model_len"] = first.get("max_model_len")
    if options.dialect == "vllm":
        config["version"] = (await _asked(client, "/version", headers)).get("version")
    return {name: value for name, value in config.items() if value is not None}


async def _asked(client: httpx.AsyncClient, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object at ``path``; empty where the server does not offer one."""
    try:
        response = await client.get(path, headers=dict(headers))
        answer = msgspec.json.decode(response.content) if response.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, msgspec.DecodeError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _authorization(options: AttachOptions) -> dict[str, str]:
    key = os.environ.get(options.api_key_env) if options.api_key_env is not None else None
    return {} if not key else {"Authorization": f"Bearer {key}"}


def _dialect(settings: VariantSettings) -> Dialect:
    """The engine whose servers are spoken to; the others are not imported."""
    match _options(settings).dialect:
        case "vllm":
            from benchctl.engines.vllm.engine import VllmEngine

            return VllmEngine()
        case "sglang":
            from benchctl.engines.sglang.engine import SglangEngine

            return SglangEngine()
        case "llamacpp":
            from benchctl.engines.llamacpp import LlamaCppEngine

            return LlamaCppEngine()
        case "transformers":
            from benchctl.engines.transformers.engine import TransformersEngine

            return TransformersEngine()
        case "openai":
            from benchctl.engines.plain_openai import PlainOpenAi

            return PlainOpenAi()


def _options(settings: VariantSettings) -> AttachOptions:
    if not isinstance(settings.server, AttachOptions):
        raise TypeError(f"nothing is attached to by {type(settings.server).__name__}")
    return settings.server
