"""Options of the engine ``attach``."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from benchctl.engines.attach.address import server_address
from benchctl.profile.engine_options import ServerOptions, dialects

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
