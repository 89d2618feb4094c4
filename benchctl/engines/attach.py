"""The engine ``attach``: requests in the dialect of another engine, and no process of our own.

There is no command line, log, process or step to observe; GPUs are those of this host that the options name. The
configuration is what the server states over HTTP; what it does not state stays unknown. The server may be remote,
also behind ``https``; its key is read from our environment for each request, and never recorded.
"""

import os
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
import psutil
from pydantic import Field, field_validator

from benchctl.engines.engine import (
    Client,
    Engine,
    LaunchSite,
    PromptCounter,
    engine_for,
    own_options,
    streamed,
    uncached_fields,
)
from benchctl.errors import EngineUnavailableError
from benchctl.profile.choices import ServerOptions, check_rules
from benchctl.profile.engine_table import PLAIN_DIALECT, dialects
from benchctl.profile.model import VariantSettings
from benchctl.records.record import Call, PreparedRequest

if TYPE_CHECKING:
    Dialect: TypeAlias = str
else:
    Dialect = Literal[dialects()]

_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1")


class AttachOptions(ServerOptions):
    """Options of the engine ``attach``: a server that someone else started and will end."""

    url: str = Field(
        description="Address of the server, as in ``--set engine.options.url=http://127.0.0.1:8000``; "
        "``localhost:8000/v1`` is understood, too."
    )
    dialect: Dialect = "vllm"
    """Spelling of requests that the server understands; ``openai`` is the common part."""
    served_model: str | None = None
    """Name under which the server offers the model; where it is not given, requests name none."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable of our environment that holds the server's key; the key itself is never recorded."""

    bypass_prefix_cache: bool = True
    """Keeps requests from using the server's prefix cache, where a repeated run would find its prompts: by
    ``cache_salt`` (vllm, sglang) or ``cache_prompt`` (llamacpp); other dialects have no way. false: as the server
    is."""

    send_seed: bool = True
    """Gives each request a seed; false for a vLLM on a CPU that computes prompts in parts, which dies of it."""

    gpus: tuple[Annotated[int, Field(ge=0, le=4095)], ...] = ()
    """GPUs of this host that the server uses, by their indices in nvidia-smi, for telemetry. Without any, no GPU is
    sampled."""

    @property
    def request_model(self) -> str | None:
        return self.served_model

    @property
    def env(self) -> dict[str, str]:
        """The choice of its devices, as the environment of a server that we start would make it."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}

    @property
    def secret_variables(self) -> frozenset[str]:
        return frozenset() if self.api_key_env is None else frozenset({self.api_key_env})

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        return server_address(url)


def server_address(url: str) -> str:
    """The address without the path that requests bring themselves: ``localhost:8000/v1/`` is http://localhost:8000.

    Without a scheme it is http; a prefix of paths stays. Raises ValueError where requests cannot use it.
    """
    stripped = url.strip()
    whole = stripped if "://" in stripped else f"http://{stripped}"
    scheme, _, rest = whole.partition("://")
    bare = f"{scheme.lower()}://{rest}".rstrip("/")
    endpoint = next((each for each in _ENDPOINTS if bare.endswith(each)), "")
    bare = bare.removesuffix(endpoint).rstrip("/")
    instead = "name a variable in api_key_env instead"
    check_rules(
        (
            scheme.lower() not in {"http", "https"},
            f"is {url!r}; write an address that begins with http:// or https://",
        ),
        ("?" in rest or "#" in rest, f"holds a query, which requests cannot carry; {instead}"),
        ("@" in rest.partition("/")[0], f"holds credentials, which would be recorded; {instead}"),
        (
            any(character.isspace() or not character.isprintable() for character in bare),
            f"is {url[:80]!r}, which has spaces or control characters; remove them",
        ),
        (
            not _is_usable(bare),
            f"is {url!r}; write a host and a port from 1 to 65535, such as http://127.0.0.1:8000",
        ),
    )
    return bare


def _is_usable(url: str) -> bool:
    """True for an address with a host that the client can look up and, where it names one, a possible port."""
    import httpx  # noqa: PLC0415 - few profiles name an address

    try:
        address = httpx.URL(url)
        address.host.encode("idna")  # a label of more than 63 characters
    except (httpx.InvalidURL, ValueError):
        return False
    return bool(address.host) and (address.port is None or 0 < address.port <= 65_535)


class AttachEngine(Engine):
    """Servers that someone else started."""

    kind = "attach"
    is_launched = False

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when the variable with the server's key is missing or cannot be sent, and
        when its GPUs are to be sampled and it runs on another host.
        """
        options = own_options(settings, AttachOptions)
        name, key = options.api_key_env, _key(options)
        addresses = (each.address for interface in psutil.net_if_addrs().values() for each in interface)
        problems = (
            (
                bool(options.gpus)
                and urlsplit(options.url).hostname not in {"localhost", platform.node(), *addresses},
                (
                    f"gpus names GPUs of this host, and {options.url} is not on it; leave gpus out, or measure on "
                    "the server's host, at 127.0.0.1"
                ),
            ),
            (
                name is not None and not key,
                f"api_key_env names {name}, which is not set; export {name}, or leave api_key_env out",
            ),
            (
                not (key.isascii() and key.isprintable()),
                (
                    f"api_key_env names {name}, whose value holds line breaks or other characters that no request "
                    f"carries; export {name} without them"
                ),
            ),
        )
        if problem := next((problem for is_there, problem in problems if is_there), None):
            raise EngineUnavailableError(f"engine 'attach', variant {settings.variant!r}: {problem}")

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what servers of this dialect cannot do."""
        _dialect(settings).check_requests(requests, settings)

    def metrics_path(self, settings: VariantSettings) -> str | None:
        return _dialect(settings).metrics_path(settings)

    def base_url(self, settings: VariantSettings, port: int) -> str:
        return own_options(settings, AttachOptions).url

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        options, call = own_options(settings, AttachOptions), super().request_call(request, settings)
        if not (key := _key(options)):
            return call
        return msgspec.structs.replace(
            call,
            headers={**_authorization(options), **call.headers},
            secrets={str(options.api_key_env): key, **call.secrets},
        )

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        options, dialect = own_options(settings, AttachOptions), _dialect(settings)
        uncached = uncached_fields(dialect.spec) if options.bypass_prefix_cache else {}
        body: dict[str, Any] = uncached | msgspec.to_builtins(dialect.request_fields(request, settings))
        if options.served_model is None and settings.request.model is None:
            body.pop("model", None)
        if dialect.spec.adds_repetition_penalty:
            body.setdefault("repetition_penalty", settings.sampling.repetition_penalty)
        if not options.send_seed:
            body.pop("seed", None)
        return body

    def salted(self, settings: VariantSettings) -> VariantSettings:
        return _dialect(settings).salted(settings)

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        return _dialect(settings).prompt_counter(settings)

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The configuration that the server states, and how it is addressed."""
        options, (headers, _) = own_options(settings, AttachOptions), settings.request.sent_headers()
        config = await _dialect(settings).attached_config(client, {**_authorization(options), **headers})
        stated = {name: value for name, value in config.items() if value is not None}
        return {**stated, "url": options.url, "dialect": options.dialect}


class PlainOpenAi(Engine):
    """The dialect ``openai``: servers of an unknown kind, addressed by OpenAI's published API alone.

    Prompts are counted as vLLM is asked: the server may be one, or imitate it, and else refuses.
    """

    kind = "attach"
    counter = PromptCounter

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for what the published API cannot express."""
        super().check_requests(requests, settings)
        if settings.sampling.top_k != -1 or settings.sampling.min_p != 0:
            raise self.refusal(
                settings,
                "is asked in the dialect openai, which has neither top_k nor min_p",
                "leave them out, or name its dialect in engine.options.dialect",
            )

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Unknown: each kind of server has its own path, or none."""
        return None

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        """Ask for ``request``; ``ignore_eos`` only where it matters, as strict servers refuse unknown fields."""
        sampling = settings.sampling
        body = {
            "model": settings.server.request_model or settings.model,
            "n": request.n,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **sampling.penalties,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if request.ignore_eos else {}),
        }
        return streamed(request, settings, body)


def _authorization(options: AttachOptions) -> dict[str, str]:
    """The header with the key of the server; empty without one."""
    key = _key(options)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _key(options: AttachOptions) -> str:
    """The key of the server; empty without one."""
    return os.environ.get(options.api_key_env, "") if options.api_key_env else ""


def _dialect(settings: VariantSettings) -> Engine:
    """The engine whose servers are spoken to; no other is imported."""
    dialect = own_options(settings, AttachOptions).dialect
    return PlainOpenAi() if dialect == PLAIN_DIALECT else engine_for(dialect)
