"""Typed options of each kind of engine: what ``engine.options`` and a variant's ``server`` may say.

Equal things have equal names on all engines (``max_num_seqs``, ``enable_prefix_caching``), so that one profile
and one sweep fit several; the engine's own file spells them as its server does. What has no option here goes
through ``extra_args`` as it is.
"""

from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from benchctl.profile.secret import SECRET_VALUE, is_secret_name, secret_options
from benchctl.profile.section import LEAST, MOST, Section

_INSTEAD: Final = (
    "remove it: a server on the loopback interface needs no key, and HF_TOKEN is taken from your environment"
)


class ServerOptions(Section):
    """What all engines have."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Options that load a value model: a server without them is the same one without guidance."""

    @property
    def fixed_port(self) -> int | None:
        """The port that the profile insists on."""
        return None

    @property
    def guides_with(self) -> str | None:
        """The value model that the server loads for guidance; None where it cannot guide."""
        return None


class SimOptions(ServerOptions):
    """Options of the engine ``sim``."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    cost_model: Literal["lenvm-h100", "roofline", "llm-mock"] = "lenvm-h100"
    """What a step costs: calibrated to published LenVM timings, computed from hardware peaks, or llm-mock's law."""
    hardware: str = "h100-sxm"
    """Device whose peaks the cost model computes with; a name of the hardware table."""
    time_scale: float = Field(default=1.0, ge=LEAST, le=MOST)
    """Virtual seconds per wall second."""
    noise: Literal["none", "published"] = "none"
    """Seeded run-to-run variation of step times: none, or of the size that was published."""
    revision: Literal["V1", "V2", "V4"] = "V1"
    """Which generation of the guided fork is emulated: V2 skips the value model at a neutral scale."""
    value_model: str | None = None
    """Value model that the server loads for guidance; none on a stock server."""
    overlap_schedule: bool = True
    """Whether the scheduler works while the device does."""
    max_num_seqs: int = Field(default=1024, ge=1)
    """Sequences in one batch at most."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens in one step at most; longer prompts are prefilled in chunks."""
    num_kv_blocks: int = Field(default=65536, ge=1)
    """Blocks of the KV cache."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in one KV block."""
    enable_prefix_caching: bool = False
    """Whether prompts that begin alike share their KV blocks."""
    tokens_per_chunk: int = Field(default=1, ge=1)
    """Tokens in one streamed event."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """A fixed port; a free one where it is not given."""
    start_delay_s: float = Field(default=0.0, ge=0, le=MOST)
    """Time the server takes to become ready, to rehearse slow starts."""

    @model_validator(mode="after")
    def _can_be_served(self) -> "SimOptions":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a step must have room for one token of each sequence; raise the former or lower the latter"
            )
        if self.cost_model == "llm-mock" and self.value_model is not None:
            raise ValueError(
                "cost_model llm-mock cannot price a value model; drop value_model, or take lenvm-h100 or roofline"
            )
        return self

    @property
    def fixed_port(self) -> int | None:
        return self.port

    @property
    def guides_with(self) -> str | None:
        return self.value_model


class LaunchedOptions(ServerOptions):
    """What servers have in common that benchctl starts and others wrote."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """A fixed port; a free one where it is not given."""
    env: dict[str, str] = {}
    """Variables of the server's environment beyond ours."""
    extra_args: tuple[str, ...] = ()
    """Words added to the server's command line as they are, after those that the options give."""

    @field_validator("env")
    @classmethod
    def _env_has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if is_secret_name(name) or SECRET_VALUE.search(value):
                raise ValueError(
                    f"{name} looks like a secret, which profiles and results must not hold; {_INSTEAD}"
                )
        return env

    @field_validator("extra_args")
    @classmethod
    def _words_have_no_secrets(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for found in secret_options(words):
            raise ValueError(f"{found} looks like a secret, which profiles and results must not hold; {_INSTEAD}")
        return words

    @property
    def fixed_port(self) -> int | None:
        return self.port


class PythonOptions(LaunchedOptions):
    """What servers have in common that are Python programs, each in an environment of its own."""

    python: str | None = None
    """Interpreter of the environment that has the engine; searched for where it is not given."""
    dtype: str | None = None
    """Type of weights and activations, as the engine names it; the engine's choice where it is not given."""


class VllmOptions(PythonOptions):
    """Options of the engine ``vllm``; what is null is left to vLLM."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and output together, in tokens."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory that the server may take."""
    kv_cache_memory_bytes: str | int | None = None
    """Size of the KV cache, such as ``256M``; in place of a share of the memory."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that each layer is spread over."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Replicas of the engine behind one front end."""
    enable_prefix_caching: bool = False
    """Whether prompts that begin alike share their KV blocks; off, because repeated prompts would be free."""
    enable_chunked_prefill: bool | None = None
    """Whether long prompts are computed in parts; on a CPU vLLM dies of one that belongs to a seeded request."""
    enforce_eager: bool = False
    """Whether to run without compilation and CUDA graphs."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences in one batch at most."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one step at most."""
    async_scheduling: bool | None = None
    """Whether the scheduler works while the device does."""
    load_format: str | None = None
    """How weights are read; ``dummy`` makes random ones and needs none on disk."""
    quantization: str | None = None
    """Method by which weights are quantised."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding, as vLLM's ``--speculative-config`` takes it."""
    step_log: bool = True
    """Whether steps are recorded, by a statistics plugin inside the server's front end."""


class SglangOptions(PythonOptions):
    """Options of the engine ``sglang``; what is null is left to SGLang."""

    device: str | None = None
    """Kind of device to run on."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and output together, in tokens (``--context-length``)."""
    mem_fraction_static: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory for weights and KV cache."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that each layer is spread over (``--tp-size``)."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Replicas of the engine (``--dp-size``)."""
    enable_prefix_caching: bool = False
    """Whether prompts that begin alike share their KV cache (off is ``--disable-radix-cache``)."""
    enforce_eager: bool = False
    """Whether to run without CUDA graphs (``--disable-cuda-graph``)."""
    overlap_schedule: bool = True
    """Whether the scheduler works while the device does (off is ``--disable-overlap-schedule``)."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences in one batch at most (``--max-running-requests``)."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens in one step at most (``--chunked-prefill-size``)."""
    load_format: str | None = None
    """How weights are read; ``dummy`` makes random ones."""
    attention_backend: str | None = None
    """Kernels of attention."""
    sampling_backend: str | None = None
    """Kernels of sampling."""
    step_log: bool = True
    """Whether steps are recorded, by a plugin inside the server's scheduler."""


class LlamaCppOptions(LaunchedOptions):
    """Options of the engine ``llamacpp`` (``llama-server``); what is null is left to it."""

    binary: str | None = None
    """Path of ``llama-server``; searched for where it is not given."""
    python: str | None = None
    """Interpreter of an environment that carries ``llama-server`` in a package."""
    max_model_len: int = Field(default=2048, ge=1)
    """Longest prompt and output of one sequence together, in tokens (``-c`` divided by ``-np``)."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Sequences in one batch at most, each with its own share of the context (``-np``)."""
    threads: int = Field(default=1, ge=1)
    """Threads of computation (``-t``); threads that wait for one another spin and take the client's cores."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one step at most (``-b``)."""
    n_gpu_layers: int | None = Field(default=None, ge=0)
    """Layers that are computed on the GPU."""
    enable_prefix_caching: bool = False
    """Whether a prompt may reuse what an earlier one left in its slot (off is ``--no-cache-prompt``)."""


class TransformersOptions(PythonOptions):
    """Options of the engine ``transformers`` (``transformers serve``); what is null is left to it."""

    device: str | None = None
    """Where the model runs, such as ``cpu`` or ``cuda``."""
    continuous_batching: bool = True
    """Whether requests are batched; without, they are served one after another and no step is recorded."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """Blocks of the KV cache (``--cb-num-blocks``)."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens in one KV block (``--cb-block-size``)."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one step at most (``--cb-max-batch-tokens``)."""
    enable_prefix_caching: bool = False
    """Whether prompts that begin alike share their KV blocks; off, because repeated prompts would be free."""
    attn_implementation: str | None = None
    """Kernels of attention."""
    step_log: bool = True
    """Whether steps are recorded, by a launcher that times them inside the server."""


class AttachOptions(ServerOptions):
    """Options of the engine ``attach``: a server that someone else started and will end."""

    url: str
    """Address of the server, such as ``http://127.0.0.1:8000``."""
    dialect: Literal["vllm", "sglang", "llamacpp", "transformers", "openai"] = "vllm"
    """Whose spelling of requests the server understands; ``openai`` is what they have in common."""
    served_model: str | None = None
    """Name under which the server offers the model; where it is not given, requests name none."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable of our environment that holds the server's key; the key itself is never recorded."""

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
        if not _names_a_place(url):
            raise ValueError(f"is {url!r}; write a host and a port from 1 to 65535, such as http://127.0.0.1:8000")
        return bare


def _names_a_place(url: str) -> bool:
    """Whether a host is named, and a port that there is; a larger one would be taken for another by the system."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


ENGINE_OPTIONS: Final[dict[str, type[ServerOptions]]] = {
    "sim": SimOptions,
    "vllm": VllmOptions,
    "sglang": SglangOptions,
    "llamacpp": LlamaCppOptions,
    "transformers": TransformersOptions,
    "attach": AttachOptions,
}
"""Typed options of each engine that this version can measure."""
GUIDING_ENGINES: Final = frozenset({"sim", "vllm-lenvm", "sglang-lenvm"})
"""Engines that can load a value model and guide with it."""
