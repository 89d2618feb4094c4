"""The memory that the value model of an arm takes, known from its ``config.json`` before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.costs.config_json.keys import ConfigKeys
from benchctl.costs.config_json.shape import shape_from_config
from benchctl.engines.openai_server import own_options
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.guided.value_model.memory import ValueModelMemory, value_model_memory
from benchctl.profile.model import VariantSettings

MAX_CANDIDATES: Final = 64
_ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
_STORED: Final = "bfloat16"
"""Type of the weights where a ``config.json`` does not state it, as the server takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The keys of a ``config.json`` by which a value model's tensors have their shapes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """Type of the stored weights."""

    @classmethod
    def read(cls, directory: str | Path) -> "Backbone":
        """The backbone in a directory. Raises UsageError that names file and key."""
        path = Path(directory).expanduser() / "config.json"
        shape, keys = shape_from_config(path), ConfigKeys.read(path)
        return cls(
            model_type=keys.model_type,
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.q_heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            dtype=str(keys.values.get("dtype") or keys.values.get("torch_dtype") or _STORED),
        )


def value_model_of(settings: VariantSettings, max_num_seqs: int, max_model_len: int) -> ValueModelMemory:
    """The memory of the value model that an arm's server loads, on a server with these limits.

    Requests are guided with the arm's top_k, so its passes score so many candidates; without guidance none.
    Raises UsageError where there is no such model.
    """
    options = own_options(settings, VllmLenvmOptions)
    assert options.value_model is not None  # noqa: S101
    backbone = Backbone.read(options.value_model)
    top_k = settings.sampling.top_k if settings.guidance is not None else 1
    return value_model_memory(
        backbone,
        _ITEM_BYTES.get(backbone.dtype if options.value_dtype == "auto" else options.value_dtype, 2),
        max_slots=max_num_seqs,
        max_tokens=max_model_len,
        max_candidates=MAX_CANDIDATES,
        candidates=top_k if 1 <= top_k <= MAX_CANDIDATES else MAX_CANDIDATES,
        kernels=options.value_kernels,
        quantization=options.value_quantization,
    )


def disallowed(settings: VariantSettings, memory: ValueModelMemory) -> str | None:
    """The reason why ``value_memory_bytes`` refuses the prefixes of a value model; None where it does not."""
    options = own_options(settings, VllmLenvmOptions)
    allowed = options.value_memory_bytes
    if allowed is None or memory.prefixes <= allowed:
        return None
    return (
        f"the value model {options.value_model} takes: {memory}; its prefixes are {memory.prefixes} bytes, and "
        f"value_memory_bytes allows {allowed}; lower max_num_seqs or max_model_len, or raise it"
    )
