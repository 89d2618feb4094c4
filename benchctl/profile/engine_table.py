"""The table of engines: one entry for each kind of server software.

An engine is added with a module of its own under ``engines/`` and an entry here, whose fields ``EngineSpec``
explains: the facts that other rooms need without its code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from benchctl.profile.bounds import PENALTIES

if TYPE_CHECKING:
    from benchctl.profile.choices import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Names of counters and gauges, in Prometheus format, of one kind of server."""

    generated_tokens: tuple[str, ...] = ()
    """Counters of output tokens."""
    prefix_hits: tuple[str, ...] = ()
    """Counters of prompt tokens that were found in a cache instead of being computed."""
    drafts: tuple[str, ...] = ()
    """Counters of drafts that were verified, one for each sequence and step."""
    draft_tokens: tuple[str, ...] = ()
    """Counters of the tokens of these drafts."""
    accepted_tokens: tuple[str, ...] = ()
    """Counters of the draft tokens that were accepted."""
    accepted_by_position: tuple[str, ...] = ()
    """Counters of the same with a label ``position``, from 0."""
    open_requests: tuple[str, ...] = ()
    """Gauges that are 0 while the server is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The fields of ``request`` and ``sampling`` that one kind of server understands, as far as that is known."""

    response_format: bool = True
    """True where it takes OpenAI's ``response_format``."""
    constraints: frozenset[str] | None = None
    """Keys of ``structured_outputs`` that it takes or that are spelled for it; None: all, judged by the server."""
    chat_template_kwargs: bool = True
    """True where it passes variables on to the chat template."""
    penalties: frozenset[str] = frozenset(PENALTIES)
    """Penalties of ``sampling`` that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Facts about one kind of server software that do not need its code.

    Classes are named by import path, ``module:name``, and loaded on first use.
    """

    kind: str
    """Its name in profiles."""
    options: str
    """Class of its options, a ``ServerOptions``."""
    implementation: str
    """Class that starts, asks and reads its servers, an ``engines.engine.Engine``."""
    is_virtual: bool = False
    """True if its times are computed and not measured: it needs no device, no core and no warm-up of its own."""
    is_attached: bool = False
    """True if someone else starts and ends its servers, on this machine or another."""
    counts_exactly: bool = False
    """True if its prompts need no tokenizer: the simulator counts as our estimate does, and passes have none."""
    serves_requests: bool = True
    """False if it computes forward passes without any request, for a workload with ``dataset: none``."""
    guides: bool = False
    """True if its servers can load a value model and guide with it."""
    installed_by: str | None = None
    """Command that installs it; None where nothing has to be installed."""
    needs_gpu: bool = False
    """True if it can only be installed on a machine with an NVIDIA GPU."""
    preset_without_gpu: str | None = None
    """Preset of its servers on machines without a GPU."""
    is_optional_check: bool = False
    """True if ``benchctl doctor`` looks for it only when it is named."""
    is_dialect: bool = False
    """True if ``attach`` can speak to its servers when someone else started them."""
    backend_names: tuple[str, ...] = ()
    """Names of its servers as ``--backend`` of other load generators."""
    cache_bypass: Literal["cache_salt", "cache_prompt"] | None = None
    """Field of a request that keeps its prompt from being found in a prefix cache."""
    adds_repetition_penalty: bool = False
    """True if its servers apply the repetition penalty of a model's own file unless a request sets one."""
    request_fields: RequestFields = RequestFields()
    """Fields of requests that its servers understand."""
    counters: ServerCounters = ServerCounters()
    """Names of its counters, where they are its own."""
    coded_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options behind each flag and variable that its code makes from them, beside those with a ``Flag``."""
    consequences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reported settings, as patterns, that follow from an option, setting or flag beside the one of its name."""


def load_name(path: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


OWN_PREFIX: Final = "BENCHCTL_"
"""Beginning of the variables of the environment that are benchctl's own."""
PLAIN_DIALECT: Final = "openai"
"""The dialect of servers of which nothing more is known than that they speak OpenAI's API."""
PLAIN_FIELDS: Final = RequestFields(
    constraints=frozenset(),
    chat_template_kwargs=False,
    penalties=frozenset({"presence_penalty", "frequency_penalty"}),
)
"""The fields of OpenAI's published API."""

VLLM_KV_SIZES: Final = (
    "server.kv_cache_max_concurrency", "server.kv_cache_size_tokens", "server.num_gpu_blocks"
)  # fmt: skip
"""Size of vLLM's KV cache, which shares the memory with all else. A value model does not declare another one: where
vLLM chose the size, the guided server has a smaller cache, which is a change beside guidance."""
_BUDGETS: Final = (
    "server.max_num_batched_tokens", "server.max_num_scheduled_tokens", "server.max_num_encoder_input_tokens",
    "server.encoder_cache_size", "server.compilation.compile_ranges_*", *VLLM_KV_SIZES,
)  # fmt: skip
"""Budgets of vLLM's scheduler, of which one limits the others."""
_GRAPHS: Final = ("server.compilation.*cudagraph*", "server.compilation.compile_sizes")
_SPECULATION: Final = ("server.speculative.*", "server.max_num_scheduled_tokens", *_GRAPHS, *VLLM_KV_SIZES)
_LORA: Final = ("server.lora.*", "server.compilation.*", *VLLM_KV_SIZES)

_RECORDED: Final = "server.value_model.recorded_passes"
_PREFIXES: Final = ("server.value_model.prefix_bytes", _RECORDED)
"""Sizes of a value model's memory and passes, where a server has one."""

_OF_VLLM: Final[Mapping[str, tuple[str, ...]]] = {
    "server.max_num_seqs": (*_BUDGETS, *_GRAPHS, *_PREFIXES),
    "server.max_num_batched_tokens": (*_BUDGETS, *_GRAPHS),
    "server.max_model_len": ("server.original_max_model_len", *_BUDGETS, *_PREFIXES),
    "server.enable_chunked_prefill": _BUDGETS,
    "server.enforce_eager": ("server.compilation.*", *VLLM_KV_SIZES),
    "server.async_scheduling": ("server.overlap_schedule",),
    "server.overlap_schedule": ("server.async_scheduling",),
    "server.tensor_parallel_size": (
        "server.world_size", "server.distributed_executor_backend", "server.disable_custom_all_reduce",
        *VLLM_KV_SIZES,
    ),
    "server.data_parallel_size": (
        "server.data_parallel_*", "server.disable_nccl_for_dp_synchronization", "server.elastic_ep_max_dp_size"
    ),
    "server.dtype": VLLM_KV_SIZES,
    "server.quantization": VLLM_KV_SIZES,
    "server.gpu_memory_utilization": VLLM_KV_SIZES,
    "server.kv_cache_memory_bytes": VLLM_KV_SIZES,
    "server.num_speculative_tokens": _SPECULATION,
    "server.speculative_method": _SPECULATION,
    "server.speculative_config": _SPECULATION,
    "server.draft_model": _SPECULATION,
    "server.draft_sampling": _SPECULATION,
    "server.prompt_lookup_max": _SPECULATION,
    "server.correct_cpu_sampling": ("server.speculative.cpu_sampling",),
    "server.step_log": ("server.observability.enable_logging_iteration_details",),
    "server.enable_lora": _LORA,
    "server.max_loras": _LORA,
    "server.max_lora_rank": _LORA,
}  # fmt: skip

_GUIDANCE: Final = (_RECORDED, "env.BENCHCTL_LENVM_SETTINGS")
"""Passes of the value model are recorded for the number of candidates that the requests of a variant have. The
options in the variable are reported and compared one by one."""


_OF_SGLANG: Final[Mapping[str, tuple[str, ...]]] = {
    "server.step_log": ("env.PYTHONPATH", "env.SGLANG_PLUGINS"),
    "server.value_model": ("server.value_model.*", "server.mem_fraction_static"),
    "server.max_num_batched_tokens": ("server.mem_fraction_static",),
    "server.tensor_parallel_size": ("server.mem_fraction_static",),
    "server.enforce_eager": ("server.mem_fraction_static",),
    "argv.--enable-deterministic-inference": (
        "server.request_seed", "server.attention_backend", "server.sampling_backend"
    ),
}  # fmt: skip
"""The share of memory that SGLang takes follows from these where no option fixes it."""


_SPECS: Final = (
    EngineSpec(
        kind="sim",
        options="benchctl.engines.sim.options:SimOptions",
        implementation="benchctl.engines.sim.engine:SimEngine",
        is_virtual=True,
        counts_exactly=True,
        guides=True,
        cache_bypass="cache_salt",
    ),
    EngineSpec(
        kind="vllm",
        options="benchctl.engines.vllm_options:VllmOptions",
        implementation="benchctl.engines.vllm:VllmEngine",
        installed_by="benchctl engines install vllm",
        preset_without_gpu="vllm-cpu",
        is_dialect=True,
        backend_names=("vllm", "vllm-chat"),
        cache_bypass="cache_salt",
        adds_repetition_penalty=True,
        counters=ServerCounters(
            generated_tokens=("vllm:generation_tokens_total",),
            # Without those of a request that was preempted and resumed; each of ``n`` choices counts.
            prefix_hits=("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
            drafts=("vllm:spec_decode_num_drafts_total",),
            draft_tokens=("vllm:spec_decode_num_draft_tokens_total",),
            accepted_tokens=("vllm:spec_decode_num_accepted_tokens_total",),
            accepted_by_position=("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
            open_requests=("vllm:num_requests_running", "vllm:num_requests_waiting"),
        ),
        coded_options={
            "--enable-logging-iteration-details": ("step_log",),
            "--lora-modules": ("lora_modules",),
            "--speculative-config": (
                "num_speculative_tokens", "speculative_method", "draft_model", "draft_sampling",
                "prompt_lookup_max",
            ),
            "BENCHCTL_SERVER_DESCRIPTION": (),
            "BENCHCTL_STEP_LOG": ("step_log",),
            "HF_HUB_OFFLINE": ("draft_model", "lora_modules"),
            "BENCHCTL_CORRECTS_CPU_SAMPLING": (
                "num_speculative_tokens", "speculative_config", "correct_cpu_sampling",
            ),
        },
        consequences=_OF_VLLM,
    ),
    EngineSpec(
        kind="vllm-lenvm",
        options="benchctl.engines.vllm_lenvm.options:VllmLenvmOptions",
        implementation="benchctl.engines.vllm_lenvm.engine:VllmLenvmEngine",
        guides=True,
        installed_by="benchctl engines install vllm",
        preset_without_gpu="vllm-lenvm",
        is_optional_check=True,
        coded_options={
            "--logits-processors": ("value_model",),
            "BENCHCTL_LENVM_CLOCK": ("value_model", "guidance_clock"),
            "BENCHCTL_LENVM_DESCRIPTION": ("value_model",),
            "BENCHCTL_LENVM_MODEL": ("value_model",),
            "BENCHCTL_LENVM_SETTINGS": (
                "value_model", "value_dtype", "value_load_format", "value_memory_bytes",
                "value_reuse", "value_graphs", "value_kernels", "value_skips_early", "fused", "lazy",
            ),
            "BENCHCTL_LENVM_STEP_LOG": ("value_model", "step_log"),
        },
        consequences={
            **_OF_VLLM,
            "server.value_model": ("server.value_model.*",),
            "server.value_dtype": ("server.value_model.*",),
            "server.value_memory_bytes": ("server.value_model.*",),
            "server.value_graphs": (_RECORDED,),
            "server.value_kernels": (
                _RECORDED, "server.value_model.has_kernels", "server.value_model.kernels_reason",
            ),
            "server.lazy": ("server.value_model.*",),
            "sampling.top_k": _GUIDANCE,
            "sampling.temperature": _GUIDANCE,
            "guidance.mode": _GUIDANCE,
        },
    ),
    EngineSpec(
        kind="sglang",
        options="benchctl.engines.sglang:SglangOptions",
        implementation="benchctl.engines.sglang:SglangEngine",
        installed_by="benchctl engines install sglang",
        needs_gpu=True,
        is_dialect=True,
        backend_names=("sglang", "sglang-oai"),
        cache_bypass="cache_salt",
        adds_repetition_penalty=True,
        counters=ServerCounters(
            generated_tokens=("sglang:generation_tokens_total",),
            prefix_hits=("sglang:cached_tokens_total",),
            drafts=("sglang:spec_verify_calls_total",),  # its lengths and rates are gauges over a few last steps
            open_requests=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        ),
        request_fields=RequestFields(constraints=frozenset({"json", "regex", "choice", "grammar"})),
        coded_options={"BENCHCTL_STEP_LOG": ("step_log",)},
        consequences=_OF_SGLANG,
    ),
    EngineSpec(
        kind="sglang-lenvm",
        options="benchctl.engines.sglang_lenvm:SglangLenvmOptions",
        implementation="benchctl.engines.sglang_lenvm:SglangLenvmEngine",
        guides=True,
        installed_by="pip install -e sglang-LenVM/python, in an environment of its own that engine.python names",
        is_optional_check=True,
        request_fields=RequestFields(constraints=frozenset({"json", "regex", "choice", "grammar"})),
        coded_options={
            "--enable-lvm-guided-sampling": ("value_model",),
            "--lvm-guided-fn": ("guided_fn", "value_model"),
            "--lvm-guided-inproc": ("value_model",),
            "--lvm-guided-inproc-json-model-override-args": ("value_architecture", "value_model"),
            "--lvm-guided-inproc-mem-fraction-static": ("value_mem_fraction_static", "value_model"),
            "--lvm-guided-inproc-model-path": ("value_model",),
            "--lvm-guided-inproc-model-revision": ("value_model_revision", "value_model"),
        },
        consequences=_OF_SGLANG,
    ),
    EngineSpec(
        kind="transformers",
        options="benchctl.engines.transformers:TransformersOptions",
        implementation="benchctl.engines.transformers:TransformersEngine",
        installed_by="benchctl engines install transformers",
        preset_without_gpu="transformers-cpu",
        is_dialect=True,
        request_fields=RequestFields(
            response_format=False, constraints=frozenset(), penalties=frozenset({"repetition_penalty"})
        ),
        coded_options={
            "--no-prefix-caching": ("enable_prefix_caching",),
            "--step-log": ("step_log", "continuous_batching"),
        },
        consequences={
            "server.continuous_batching": ("server.cb.*", "server.request_seed", "server.attn_implementation"),
            "server.num_kv_blocks": ("server.cb.num_blocks", "server.cb.max_memory_percent"),
            "server.block_size": ("server.cb.block_size",),
            "server.max_num_batched_tokens": ("server.cb.max_batch_tokens", "server.cb.max_requests_per_batch"),
            "server.enable_prefix_caching": ("server.cb.allow_block_sharing",),
        },
    ),
    EngineSpec(
        kind="llamacpp",
        options="benchctl.engines.llamacpp:LlamaCppOptions",
        implementation="benchctl.engines.llamacpp:LlamaCppEngine",
        installed_by="benchctl engines install llamacpp",
        preset_without_gpu="llamacpp-cpu",
        is_dialect=True,
        backend_names=("llama.cpp",),
        cache_bypass="cache_prompt",
        counters=ServerCounters(
            generated_tokens=("llamacpp:tokens_predicted_total",),
            open_requests=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        ),
        request_fields=RequestFields(constraints=frozenset({"json", "choice", "grammar"})),
        coded_options={"--cache-ram": ("enable_prefix_caching",), "--ctx-size": ("max_model_len", "max_num_seqs")},
    ),
    EngineSpec(
        kind="attach",
        options="benchctl.engines.attach:AttachOptions",
        implementation="benchctl.engines.attach:AttachEngine",
        is_attached=True,
    ),
    EngineSpec(
        kind="micro",
        options="benchctl.engines.micro:MicroOptions",
        implementation="benchctl.engines.micro:MicroEngine",
        counts_exactly=True,
        serves_requests=False,
    ),
)  # fmt: skip
ENGINES: Final[dict[str, EngineSpec]] = {spec.kind: spec for spec in _SPECS}
"""The engines by the names that they have in profiles."""


def options_class(kind: str) -> "type[ServerOptions]":
    """The class of a kind's options; KeyError for an unknown kind."""
    options: type[ServerOptions] = load_name(ENGINES[kind].options)
    return options


def is_virtual(kind: str) -> bool:
    """True where an engine of this kind computes its times; False for an unknown kind, as a stranger may name."""
    return kind in ENGINES and ENGINES[kind].is_virtual


@cache
def own_variables() -> Mapping[str, tuple[str, ...]]:
    """Variables of the environment by which benchctl tells its servers what to do, with the options behind each."""
    variables: dict[str, tuple[str, ...]] = {}
    for spec in ENGINES.values():
        for name, options in spec.coded_options.items():
            if name.startswith(OWN_PREFIX):
                variables[name] = tuple(dict.fromkeys((*variables.get(name, ()), *options)))
    return variables


def guiding_kinds() -> tuple[str, ...]:
    """Engines that can load a value model and guide with it, in alphabetical order."""
    return tuple(sorted(kind for kind, spec in ENGINES.items() if spec.guides))


def request_fields(kind: str) -> RequestFields:
    """The fields that servers of a kind, or of the plain dialect, understand."""
    return PLAIN_FIELDS if kind == PLAIN_DIALECT else ENGINES[kind].request_fields


def dialects() -> tuple[str, ...]:
    """Spellings of requests that ``attach`` can use."""
    return (*(kind for kind, spec in ENGINES.items() if spec.is_dialect), PLAIN_DIALECT)
