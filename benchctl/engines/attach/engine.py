"""The engine ``attach``: requests in the dialect of another engine, and no process of our own.

There is no command line, log, process or step to observe; GPUs are those of this host that the options name. The
configuration is what the server states over HTTP; what it does not state stays unknown. The server may be remote,
also behind ``https``; its key is read from our environment for each request, and never recorded.
"""

import os
import platform
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from benchctl.engines.attach.options import AttachOptions
from benchctl.engines.engine import (
    JsonGetter,
    LaunchSite,
    OpenAiServer,
    PromptCounter,
    TokenizeCounter,
    own_options,
    streamed,
)
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_spec import load_name
from benchctl.profile.engine_table import ENGINES, PLAIN_DIALECT
from benchctl.profile.model import VariantSettings
from benchctl.records.files import encode
from benchctl.records.record import Call, PreparedRequest
from benchctl.untrusted.http import fetch, fetch_json


class Dialect(Protocol):
    """The part of an engine that can address a server of its kind that someone else started."""

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError when such servers cannot do what these requests or settings ask."""

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Path of their counters."""

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """A request in their spelling."""

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        """Counts prompts by asking such a server."""

    def uncached_fields(self) -> dict[str, Any]:
        """Fields of one request that keep its prompt from being found in a cache; empty where none do."""

    async def attached_config(self, get_json: JsonGetter) -> dict[str, Any]:
        """The configuration that they state over HTTP."""

    def config_of_metrics(self, series: Collection[str]) -> dict[str, Any]:
        """The part of it that their metrics page states, whose series are named so."""


class AttachEngine(OpenAiServer):
    """Servers that someone else started."""

    kind = "attach"
    is_launched = False

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when the variable with the server's key is missing or cannot be sent, and
        when its GPUs are to be sampled and it runs on another host.
        """
        options = own_options(settings, AttachOptions)
        where, name = f"engine 'attach', variant {settings.variant!r}", options.api_key_env
        addresses = (each.address for interface in psutil.net_if_addrs().values() for each in interface)
        if options.gpus and urlsplit(options.url).hostname not in {"localhost", platform.node(), *addresses}:
            raise EngineUnavailableError(
                f"{where}: gpus names GPUs of this host, and {options.url} is not on it; leave gpus out, or "
                "measure on the server's host, at 127.0.0.1"
            )
        if name is None:
            return
        key = os.environ.get(name)
        where = f"{where}: api_key_env names {name}"
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
        return own_options(settings, AttachOptions).url

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """None: nothing is started."""
        return ()

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        options, dialect = own_options(settings, AttachOptions), _dialect(settings)
        call = dialect.request_call(request, settings)
        body: dict[str, Any] = msgspec.json.decode(call.body)
        if options.served_model is None and settings.request.model is None:
            body.pop("model", None)
        if options.dialect != PLAIN_DIALECT and ENGINES[options.dialect].adds_repetition_penalty:
            body.setdefault("repetition_penalty", settings.sampling.repetition_penalty)
        if not options.send_seed:
            body.pop("seed", None)
        if options.bypass_prefix_cache:
            body = {**dialect.uncached_fields(), **body}
        headers = {**_authorization(options), **call.headers}
        return replace(call, headers=headers, body=encode(body), secrets={**_key(options), **call.secrets})

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        return _dialect(settings).prompt_counter(settings)

    async def effective_config(
        self, client: httpx.AsyncClient, settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        options, (headers, _) = own_options(settings, AttachOptions), settings.request.sent_headers()

        async def get_json(path: str) -> dict[str, Any]:
            return await _get_json(client, path, {**_authorization(options), **headers})

        dialect = _dialect(settings)
        config = await dialect.attached_config(get_json)
        if (path := dialect.metrics_path(settings)) is not None:
            series = await _get_series(client, path, {**_authorization(options), **headers})
            config |= dialect.config_of_metrics(series)
        stated = {name: value for name, value in config.items() if value is not None}
        return {**stated, "url": options.url, "dialect": options.dialect}


class PlainOpenAi(OpenAiServer):
    """The dialect ``openai``: servers of an unknown kind, addressed by OpenAI's published API alone."""

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

    def prompt_counter(self, settings: VariantSettings) -> TokenizeCounter:
        """Asks as vLLM is asked: the server may be one, or imitate it, and else refuses."""
        return TokenizeCounter(chat_template_kwargs=settings.request.chat_template_kwargs)

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """Ask for ``request``; ``ignore_eos`` only where it matters, as strict servers refuse unknown fields."""
        sampling = settings.sampling
        body: dict[str, Any] = {
            "model": settings.server.request_model or settings.model,
            "n": request.n,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **sampling.penalties,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        return streamed(request, settings, body)


async def _get_json(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """The JSON object at ``path``; empty where the server does not offer one."""
    try:
        return await fetch_json(client, path, headers)
    except httpx.HTTPError:
        return {}


async def _get_series(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> Collection[str]:
    """The names of the series of a metrics page; none where the server does not offer one."""
    from benchctl.engines.metrics_page import series_of  # noqa: PLC0415 - servers of the plain dialect need none

    try:
        response = await fetch(client, "GET", path, headers=headers)
        response.raise_for_status()
        return series_of(response.text)
    except (httpx.HTTPError, ValueError):
        return ()


def _key(options: AttachOptions) -> dict[str, str]:
    """The key of the server by the variable that holds it; empty without one."""
    name = options.api_key_env
    key = os.environ.get(name) if name is not None else None
    return {name: key} if name is not None and key else {}


def _authorization(options: AttachOptions) -> dict[str, str]:
    (key,) = _key(options).values() or (None,)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _dialect(settings: VariantSettings) -> Dialect:
    """The engine whose servers are spoken to; no other is imported."""
    dialect = own_options(settings, AttachOptions).dialect
    if dialect == PLAIN_DIALECT:
        return PlainOpenAi()
    engine: Dialect = load_name(ENGINES[dialect].implementation)()
    return engine
