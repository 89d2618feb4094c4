"""Options of the engine ``attach``, and addresses of servers as users have them."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import dialects

_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1")
_SCHEMES: Final = ("http", "https")


def server_address(url: str) -> str:
    """The address without the path that requests bring themselves: ``localhost:8000/v1/`` is http://localhost:8000.

    Without a scheme it is http; a prefix of paths stays. Raises ValueError where requests cannot use it.
    """
    stripped = url.strip()
    whole = stripped if "://" in stripped else f"http://{stripped}"
    scheme, _, rest = whole.partition("://")
    if scheme.lower() not in _SCHEMES:
        raise ValueError(f"is {url!r}; write an address that begins with http:// or https://")
    if "?" in rest or "#" in rest:
        raise ValueError("holds a query, which requests cannot carry; name a variable in api_key_env instead")
    if "@" in rest.partition("/")[0]:
        raise ValueError("holds credentials, which would be recorded; name a variable in api_key_env instead")
    bare = f"{scheme.lower()}://{rest}".rstrip("/")
    endpoint = next((each for each in _ENDPOINTS if bare.endswith(each)), "")
    bare = bare.removesuffix(endpoint).rstrip("/")
    if any(character.isspace() or not character.isprintable() for character in bare):
        raise ValueError(f"is {url[:80]!r}, which has spaces or control characters; remove them")
    if not _has_host_and_port(bare):
        raise ValueError(f"is {url!r}; write a host and a port from 1 to 65535, such as http://127.0.0.1:8000")
    return bare


def _check_international(url: str) -> None:
    """Raise ValueError for a host that the client cannot encode; few addresses need the client for that."""
    httpx = import_module("httpx")
    try:
        str(httpx.URL(url).host)
    except httpx.InvalidURL as error:
        raise ValueError(str(error)) from error


def _has_host_and_port(url: str) -> bool:
    """True for an address with a host and, where it names one, a port from 1 to 65535."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # a label of more than 63 characters
        if not host.isascii() or "xn--" in host:
            _check_international(url)
        return bool(host) and parts.port != 0
    except ValueError:
        return False


if TYPE_CHECKING:
    Dialect: TypeAlias = str
else:
    Dialect = Literal[dialects()]


class AttachOptions(ServerOptions):
    """Options of the engine ``attach``: a server that someone else started and will end."""

    url: str = Field(
        description="Address of the server, such as ``http://127.0.0.1:8000``; ``localhost:8000/v1`` is "
        "understood, too."
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
