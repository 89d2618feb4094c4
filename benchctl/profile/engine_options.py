"""Typed options of each kind of engine: what ``engine.options`` and a variant's ``server`` may say.

Equal things have equal names on all engines (``max_num_seqs``, ``enable_prefix_caching``), so that one profile
and one sweep fit several; the engine's own file spells them as its server does. What has no option here goes
through ``extra_args`` as it is.
"""

from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from benchctl.profile.choices import CostModelName, value_model_error
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
    def client_cores_kept(self) -> Literal["auto"] | int:
        """Processor cores that the server leaves to the client."""
        return 0

    @property
    def guides_with(self) -> str | None:
        """The value model that the server loads for guidance; None where it cannot guide."""
        return None


class SimOptions(ServerOptions):
    """Options of the engine ``sim``."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    cost_model: CostModelName = "lenvm-h100"
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
        if reason := value_model_error(self.cost_model, self.value_model):
            raise ValueError(f"cost_model {reason}")
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
    client_cores: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Processor cores that are the client's alone: the server is started on the others, the client runs on the last
    ones. ``auto``: one, or one for each process of the load, where these are no more than an eighth of the cores;
    else none. The server always keeps one; on a machine with one core nothing is bound."""

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

    @property
    def client_cores_kept(self) -> Literal["auto"] | int:
        return self.client_cores


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


class VllmLenvmOptions(VllmOptions):
    """Options of the engine ``vllm-lenvm``, a stock vLLM with benchctl's guidance; what is null is left to vLLM."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    value_model: str | None = None
    """Directory of the value model that the server loads for guidance; null: vLLM as it comes."""
    value_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the value model's weights; ``auto`` as they are stored."""
    value_load_format: Literal["auto", "dummy"] = "auto"
    """How the value model's weights are read; ``dummy`` draws random ones on the device and needs none on disk."""
    value_memory_bytes: int | None = Field(default=None, ge=1)
    """Most memory for the prefixes that the value model keeps, for which max_num_seqs and max_model_len are
    multiplied; null: whatever that takes. vLLM does not count it: leave room with gpu_memory_utilization."""
    fused: bool = True
    """Whether prefixes are extended and candidates scored in one forward of the value model, or in two."""
    value_graphs: bool = True
    """Whether the value model's forwards are CUDA graphs."""
    value_stream: bool = False
    """Whether the value model computes on a CUDA stream of its own."""
    lazy: bool = False
    """Whether the value model is loaded by the first request that needs it, rather than at the start."""
    skip_noop: bool = False
    """Whether guidance that changes no probability is left out; computed all the same, its price is measured."""
    guidance_clock: Literal["host", "device"] = "host"
    """Whose times the sections of guidance are: the host's, which on a GPU are times of launching, or the GPU's."""
    stride: int = Field(default=1, ge=1)
    """Every so many steps of a request are guided."""
    overlap_schedule: bool | None = None
    """Whether the scheduler works while the device does, as other guided engines call ``async_scheduling``."""

    @model_validator(mode="after")
    def _can_guide(self) -> "VllmLenvmOptions":
        if self.overlap_schedule is not None and self.async_scheduling not in (None, self.overlap_schedule):
            raise ValueError(
                f"overlap_schedule is {self.overlap_schedule} and async_scheduling {self.async_scheduling}, which "
                "are two names of one thing; leave one of them out"
            )
        if self.value_model is None:
            return self
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} with a value model, which guides servers of "
                "one device; set it to 1, or drop value_model"
            )
        if self.speculative_config is not None:
            raise ValueError(
                "speculative_config and value_model exclude each other: vLLM lets nothing guide tokens that were "
                "drafted; drop one of the two"
            )
        return self

    @property
    def guides_with(self) -> str | None:
        return self.value_model


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


LenvmRevision = Literal["V0", "V1", "V2", "V3", "V4"]
"""Generations of SGLang's LenVM fork, told apart by what they make of a request; docs/engines.md says how."""
_TIMES_STRIDES: Final = frozenset({"V1", "V3"})


class SglangLenvmOptions(SglangOptions):
    """Options of the engine ``sglang-lenvm``, SGLang's LenVM fork; what is null is left to it."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset(
        {"value_model", "value_model_revision", "value_architecture", "value_mem_fraction_static"}
    )

    revision: LenvmRevision | None = None
    """Which generation of the fork is installed; null: unknown, and what differs between them is refused."""
    value_model: str | None = None
    """Value model that the server loads for guidance: a directory, a repository, or the size of a published one
    (``qwen2.5-0.5b``, ``qwen2.5-1.5b``); null: a server that cannot guide."""
    value_model_revision: str | None = None
    """Revision of the value model's repository."""
    value_architecture: (
        Literal["Qwen2ForLengthValueModel", "Qwen3ForLengthValueModel", "Qwen2_5_VLForLengthValueModel"] | None
    ) = None
    """Class that loads the value model; null: by its backbone."""
    value_mem_fraction_static: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory for the value model and its cache, beside ``mem_fraction_static``."""
    guided_fn: str = "sglang.srt.lvm.lvm_guided_sampling:lvm_combined_guidance"
    """Function that tilts, as ``module:function``."""
    stride: int = Field(default=1, ge=1)
    """Every so many steps of a request are guided, where the revision can (``LENVM_STRIDE``)."""
    synchronised_timing_interval: int | None = Field(default=None, ge=1)
    """Calls of the sampler between two lines of averages in the log of a V2 server, which waits for the device
    around every section for their sake and becomes slower; null: none."""

    @model_validator(mode="after")
    def _of_one_revision(self) -> "SglangLenvmOptions":
        if self.stride != 1 and self.revision not in _TIMES_STRIDES:
            raise ValueError(
                f"stride is {self.stride} with revision {self.revision}; only some commits of V1 and V3 know "
                "strides: set revision, or leave stride out"
            )
        if self.synchronised_timing_interval is not None and self.revision != "V2":
            raise ValueError(
                f"synchronised_timing_interval is {self.synchronised_timing_interval} with revision "
                f"{self.revision}; only V2 prints averages: set revision: V2, or leave it out"
            )
        return self

    @property
    def guides_with(self) -> str | None:
        return self.value_model


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
    "vllm-lenvm": VllmLenvmOptions,
    "sglang": SglangOptions,
    "sglang-lenvm": SglangLenvmOptions,
    "llamacpp": LlamaCppOptions,
    "transformers": TransformersOptions,
    "attach": AttachOptions,
}
"""Typed options of each engine that this version can measure."""
GUIDING_ENGINES: Final = frozenset({"sim", "vllm-lenvm", "sglang-lenvm"})
"""Engines that can load a value model and guide with it."""
