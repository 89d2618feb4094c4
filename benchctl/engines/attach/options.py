"""Options of the engine ``attach``."""

from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import dialects

if TYPE_CHECKING:
    Dialect: TypeAlias = str
else:
    Dialect = Literal[dialects()]


class AttachOptions(ServerOptions):
    """Options of the engine ``attach``: a server that someone else started and will end."""

    url: str
    """Address of the server, such as ``http://127.0.0.1:8000``."""
    dialect: Dialect = "vllm"
    """Spelling of requests that the server understands; ``openai`` is the common part."""
    served_model: str | None = None
    """Name under which the server offers the model; where it is not given, requests name none."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable of our environment that holds the server's key; the key itself is never recorded."""

    @property
    def request_model(self) -> str | None:
        return self.served_model

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"is {url!r}; write the whole address, such as http://127.0.0.1:8000")
        if "?" in url or "#" in url:
            raise ValueError("holds a query, which requests cannot carry; name a variable in api_key_env instead")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("holds credentials, which would be recorded; name a variable in api_key_env instead")
        if (bare := url.rstrip("/")).endswith("/v1"):
            raise ValueError(f"is {url!r}; leave out /v1, which requests bring themselves")
        if not _has_host_and_port(url):
            raise ValueError(f"is {url!r}; write a host and a port from 1 to 65535, such as http://127.0.0.1:8000")
        return bare


def _has_host_and_port(url: str) -> bool:
    """True for an address with a host and, where it names one, a port from 1 to 65535."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
