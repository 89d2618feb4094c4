"""One size of KV cache for all servers of an experiment in which some load a value model.

Left to itself, vLLM gives its KV cache what remains of the memory that it may take. It counts what a value model
holds (free memory before and after loading), so a guided server would get a smaller cache than the stock server
that it is compared with, and would preempt and batch otherwise. All arms therefore state the cache of the one that
needs most beside it:

    KV cache = device memory * gpu_memory_utilization
               - max over arms (base model + value model + prefixes + reserve)

vLLM 0.32 takes ``--kv-cache-memory-bytes`` as it is (v1/worker/gpu_worker.py, ``determine_available_memory``):
it measures nothing then, and ``gpu_memory_utilization`` only says how much must be free at the start. So what a
server takes beside weights and caches has to be kept free here. That is the reserve. What the value model and the
runtime take was measured on one H200 (``docs/measurements/gpu.md``). What vLLM takes was not: these constants are
allowances, and vLLM's log of a server without the option says what it took ("peak activation", "CUDAGraph memory").
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from benchctl.costs.model_shape import ModelShape
from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.hub import context_of
from benchctl.engines.vllm_lenvm.engine import value_model_of
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.errors import UsageError
from benchctl.profile.model import VariantSettings
from benchctl.records.schema import GpuInfo
from benchctl.units import GIB, MIB

_OPTION: Final = "engine.options.kv_cache_memory_bytes"
DEFAULT_SHARE: Final = 0.92
"""``gpu_memory_utilization`` of vLLM 0.32 (vllm/config/cache.py)."""
_BLOCK_TOKENS: Final = 16
_RUNTIME_BYTES: Final = 3 * GIB // 2
"""CUDA's context and libraries, 883 MiB, and what the driver keeps of the memory that it states, 616 MiB."""
_GRAPH_BYTES: Final = GIB
"""vLLM's CUDA graphs, of up to 51 sizes."""
_VALUE_GRAPH_BYTES: Final = GIB // 2
"""Descriptions of the value model's CUDA graphs; their results are counted with its passes."""
_SAMPLING_BYTES: Final = 28
"""Of each logit of the largest batch: the logit, its probability, its sorted copy, the sum of these and the result
in 32 bits, the order in 64."""
_GUIDANCE_BYTES: Final = 12
"""The same for guidance: the logits in 32 bits, their copy with all but the candidates closed, the mass."""
_LARGE_BYTES: Final = 70 * GIB
_LARGEST_BYTES: Final = 160 * GIB


class ArmMemory(NamedTuple):
    """Bytes that the server of one arm needs on each device."""

    beside_cache: int
    """Weights, prefixes and reserve."""
    sequence: int
    """KV cache of the longest sequence that the server takes."""
    words: str
    """What it needs beside its cache, part by part."""


def kv_cache_bytes(device_bytes: int, share: float, needed_bytes: Iterable[int]) -> int:
    """Bytes of KV cache that every arm can have, whole MiB; negative where an arm needs more than there is.

    The formula of this module: ``device_bytes * share`` less the largest of ``needed_bytes``, one for each arm.
    """
    return (math.floor(device_bytes * share) - max(needed_bytes)) // MIB * MIB


def equal_kv_memory(device: GpuInfo, settings: dict[str, VariantSettings]) -> str:
    """The KV cache to state for all arms with these settings, by label, on ``device``, or why none fits.

    Raises UsageError where its memory or the size of a model is not known here.
    """
    if device.memory_bytes is None:
        raise UsageError(f"the driver does not tell the memory of {device.name}")
    memories = [memory_of(label, each, device) for label, each in settings.items()]
    shares = {own_options(each, VllmLenvmOptions).gpu_memory_utilization for each in settings.values()}
    share = min(DEFAULT_SHARE if share is None else share for share in shares)
    num_bytes = kv_cache_bytes(device.memory_bytes, share, [memory.beside_cache for memory in memories])
    sequence = max(memory.sequence for memory in memories)
    neediest = max(memories, key=lambda memory: memory.beside_cache)
    parts = f"{share:g} of the {device.memory_bytes / GIB:.2f} GiB of {device.name} less what {neediest.words}"
    if num_bytes >= sequence:
        return (
            "the arms would get KV caches of different sizes, because vLLM gives each server what its value model "
            f"leaves; state one for all: --set {_OPTION}={num_bytes}, which is {num_bytes / GIB:.2f} GiB, {parts}"
        )
    left = f"{num_bytes / GIB:.2f} GiB are left" if num_bytes > 0 else "nothing is left"
    return (
        f"no KV cache fits beside the value model: of {parts}, {left}, and the longest sequence takes "
        f"{sequence / GIB:.2f} GiB; lower max_num_seqs or max_model_len, choose a smaller value model, or "
        f"state {_OPTION} yourself"
    )


def memory_of(label: str, settings: VariantSettings, device: GpuInfo) -> ArmMemory:
    """The memory of an arm's server on ``device``. Raises UsageError where a model's size cannot be known."""
    options = own_options(settings, VllmLenvmOptions)
    shape = shape_for(settings.model)
    devices, max_tokens = options.tensor_parallel_size, max_model_len_of(settings)
    stored = 4 if options.dtype == "float32" else None  # bytes of an element
    element = stored or 2
    max_slots = options.max_num_seqs or default_max_num_seqs(device)
    value_model = None if options.value_model is None else value_model_of(settings, max_slots, max_tokens)
    reserve = {
        "activations": _batched_tokens(options, device, max_tokens) * _token_width(shape) * element // devices,
        "sampling": max_slots * shape.vocab * (_SAMPLING_BYTES + (_GUIDANCE_BYTES if value_model else 0)),
        "value model's passes": value_model.passes if value_model else 0,
        "CUDA graphs": (0 if options.enforce_eager else _GRAPH_BYTES)
        + (_VALUE_GRAPH_BYTES if value_model and options.value_graphs else 0),
        "runtime": _RUNTIME_BYTES,
    }
    weights = sum(each.weight_bytes(stored) for each in (shape, *_draft(options))) // devices
    num_blocks = -(-max_tokens // _BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in reserve.items() if size)
    reserved = sum(reserve.values())
    guides = f", value model {value_model}" if value_model else ""
    return ArmMemory(
        beside_cache=weights + (value_model.weights + value_model.prefixes if value_model else 0) + reserved,
        sequence=num_blocks * _BLOCK_TOKENS * shape.kv_bytes_per_token(element) // devices,
        words=f"{label} needs: base model {weights / GIB:.2f} GiB{guides}, {reserved / GIB:.2f} GiB in reserve "
        f"({listed})",
    )


def max_model_len_of(settings: VariantSettings) -> int:
    """Longest prompt and output together. Raises UsageError where neither options nor model state it."""
    stated = own_options(settings, VllmLenvmOptions).max_model_len or context_of(settings.model)
    if stated is None:
        raise UsageError(
            f"the longest sequence of {settings.model} is not known here; set engine.options.max_model_len"
        )
    return stated


def default_max_num_seqs(device: GpuInfo) -> int:
    """Sequences in one batch where no option says so: ``get_batch_defaults`` in vllm/engine/arg_utils.py."""
    memory = device.memory_bytes or 0
    is_large = memory >= _LARGEST_BYTES or (memory >= _LARGE_BYTES and "a100" not in device.name.lower())
    return 1024 if is_large else 256


def _batched_tokens(options: VllmLenvmOptions, device: GpuInfo, max_tokens: int) -> int:
    """Tokens of the largest step; the defaults are from the same place."""
    if options.max_num_batched_tokens is not None:
        return options.max_num_batched_tokens
    memory = device.memory_bytes or 0
    usual = 16_384 if memory >= _LARGEST_BYTES else 8192 if memory >= _LARGE_BYTES else 2048
    return usual if options.enable_chunked_prefill is not False else max(usual, max_tokens)


def _token_width(shape: ModelShape) -> int:
    """Numbers that a token has in one layer: residual and two results as wide, block, queries, keys, values."""
    block = max(shape.ffn, shape.moe.experts_per_token * shape.moe.expert_ffn if shape.moe is not None else 0)
    return 3 * shape.hidden + 3 * block + (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim


def _draft(options: VllmLenvmOptions) -> tuple[ModelShape, ...]:
    """The model that drafts, where there is one."""
    if not options.speculates:
        return ()
    source = options.draft_source
    if source.problem is not None:
        raise UsageError(f"the memory of what drafts is not known: {source.problem}")
    return () if source.model is None else (shape_for(source.model),)


def states_kv_size(settings: Iterable[VariantSettings]) -> bool:
    """True where the profile says how much memory the KV cache of a server gets, or sweeps what decides it."""
    options = [own_options(each, VllmLenvmOptions) for each in settings]
    words = {word.partition("=")[0] for each in options for word in each.extra_args}
    return (
        any(each.kv_cache_memory_bytes is not None for each in options)
        or not words.isdisjoint({"--kv-cache-memory-bytes", "--kv-cache-memory", "--num-gpu-blocks-override"})
        or len({each.gpu_memory_utilization for each in options}) > 1
    )
