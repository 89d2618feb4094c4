"""Consequences of options: settings that a server reports otherwise because an option of its profile was set.

A variant that sets an option declares it, and with it what the option brings about: speculation fills a section of
vLLM's configuration and lowers a budget of its scheduler. What is not in this table is a difference of its own. The
entries of ``vllm`` are those of vLLM 0.32 with one option changed at a time.

Names are those of options and flags on the left, and patterns of the effective configuration on the right.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from benchctl.analysis.validity.comparability.kv_sizes import KV_SIZES

BUILD: Final = frozenset({"server.python", "server.binary"})
"""Options that choose a build of the engine: another version may also report settings that the first one lacks."""

_Consequences = Mapping[str, tuple[str, ...]]

_ANY_BUILD: Final = (
    "engine_version", "server.version", "server.*_version", "server.python", "server.binary", "server.torch",
    "server.transformers", "argv.program",
)  # fmt: skip
_EVERY_ENGINE: Final[_Consequences] = {
    "server.python": _ANY_BUILD,
    "server.binary": _ANY_BUILD,
    "model": (
        "server.model", "server.model_path", "server.model_weights", "server.model_class", "server.model_ftype",
        "server.served_model", "server.served_model_name", "server.tokenizer",
    ),
}  # fmt: skip

_CACHE: Final = tuple(sorted(KV_SIZES))
"""Size of vLLM's KV cache, which shares the memory with all else. A value model does not declare another one: where
vLLM chose the size, the guided server has a smaller cache, which is a change beside guidance."""
_BUDGETS: Final = (
    "server.max_num_batched_tokens", "server.max_num_scheduled_tokens", "server.max_num_encoder_input_tokens",
    "server.encoder_cache_size", "server.compilation.compile_ranges_*", *_CACHE,
)  # fmt: skip
"""Budgets of vLLM's scheduler, of which one limits the others."""
_GRAPHS: Final = ("server.compilation.*cudagraph*", "server.compilation.compile_sizes")
_SPECULATION: Final = ("server.speculative.*", "server.max_num_scheduled_tokens", *_GRAPHS, *_CACHE)
_LORA: Final = ("server.lora.*", "server.compilation.*", *_CACHE)

_RECORDED: Final = "server.value_model.recorded_passes"
_PREFIXES: Final = ("server.value_model.prefix_bytes", _RECORDED)
"""Sizes of a value model's memory and passes, where a server has one."""

_VLLM: Final[_Consequences] = {
    "server.max_num_seqs": (*_BUDGETS, *_GRAPHS, *_PREFIXES),
    "server.max_num_batched_tokens": (*_BUDGETS, *_GRAPHS),
    "server.max_model_len": ("server.original_max_model_len", *_BUDGETS, *_PREFIXES),
    "server.enable_chunked_prefill": _BUDGETS,
    "server.enforce_eager": ("server.compilation.*", *_CACHE),
    "server.async_scheduling": ("server.overlap_schedule",),
    "server.overlap_schedule": ("server.async_scheduling",),
    "server.tensor_parallel_size": (
        "server.world_size", "server.distributed_executor_backend", "server.disable_custom_all_reduce", *_CACHE
    ),
    "server.data_parallel_size": (
        "server.data_parallel_*", "server.disable_nccl_for_dp_synchronization", "server.elastic_ep_max_dp_size"
    ),
    "server.dtype": _CACHE,
    "server.quantization": _CACHE,
    "server.gpu_memory_utilization": _CACHE,
    "server.kv_cache_memory_bytes": _CACHE,
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

_VLLM_LENVM: Final[_Consequences] = {
    **_VLLM,
    "server.value_model": ("server.value_model.*",),
    "server.value_dtype": ("server.value_model.*",),
    "server.value_quantization": ("server.value_model.*",),
    "server.value_memory_bytes": ("server.value_model.*",),
    "server.value_graphs": (_RECORDED,),
    "server.value_recording": (_RECORDED,),
    "server.value_kernels": (_RECORDED, "server.value_model.has_kernels", "server.value_model.kernels_reason"),
    "server.lazy": ("server.value_model.*",),
    "sampling.top_k": _GUIDANCE,
    "sampling.temperature": _GUIDANCE,
    "guidance.mode": _GUIDANCE,
}

_SGLANG: Final[_Consequences] = {
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

_TRANSFORMERS: Final[_Consequences] = {
    "server.continuous_batching": ("server.cb.*", "server.request_seed", "server.attn_implementation"),
    "server.num_kv_blocks": ("server.cb.num_blocks", "server.cb.max_memory_percent"),
    "server.block_size": ("server.cb.block_size",),
    "server.max_num_batched_tokens": ("server.cb.max_batch_tokens", "server.cb.max_requests_per_batch"),
    "server.enable_prefix_caching": ("server.cb.allow_block_sharing",),
}

_BY_KIND: Final[Mapping[str, _Consequences]] = MappingProxyType({
    "vllm": _VLLM,
    "vllm-lenvm": _VLLM_LENVM,
    "sglang": _SGLANG,
    "sglang-lenvm": _SGLANG,
    "transformers": _TRANSFORMERS,
})  # fmt: skip
"""Engines that are not here (``sim``, ``llamacpp``, ``attach``, ``micro``) report options under their own names."""


def consequences_of(names: Iterable[str], kind: str) -> frozenset[str]:
    """Patterns of the settings that these options and flags of an engine change."""
    tables = (_EVERY_ENGINE, _BY_KIND.get(kind, {}))
    return frozenset(pattern for name in names for table in tables for pattern in table.get(name, ()))
