"""The shape that a ``config.json`` describes.

Only families whose layers are known to be those that ``ModelShape`` counts are read: in others the same keys mean
something else (a block without a gate, layers without attention), and their FLOPs would be silently wrong.
"""

from pathlib import Path
from typing import Final

from benchctl.costs.config_json.experts import dense_width, moe_shape
from benchctl.costs.config_json.keys import ConfigKeys
from benchctl.costs.config_json.weights import weight_format
from benchctl.costs.latent import LatentShape
from benchctl.costs.model_shape import ModelShape
from benchctl.errors import UsageError

_FAMILIES: Final = frozenset(
    (
        *("llama", "llama4", "llama4_text", "mistral", "mistral3", "ministral", "ministral3", "mixtral", "pixtral"),
        *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_moe"),
        *("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "minicpm", "minicpm3", "glm", "glm4"),
        *("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "dots1", "seed_oss", "ernie4_5"),
        *("gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "phimoe", "olmo", "olmo2", "olmoe", "baichuan"),
        *("granite", "granitemoe", "granitemoeshared", "internlm2", "internlm3", "smollm3", "stablelm", "exaone4"),
        *("cohere", "cohere2", "hunyuan_v1_dense"),
    )
)
_FOREIGN_KEYS: Final = {
    "mamba_d_state": "layers with a state space",
    "ssm_cfg": "layers with a state space",
    "state_size": "layers with a state space",
    "attn_layer_period": "attention in some of its layers only",
    "linear_num_key_heads": "layers with linear attention",
    "lightning_attention": "layers with linear attention",
    "index_topk": "sparse attention",
    "is_encoder_decoder": "an encoder",
}
_LAYER_TYPES: Final = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_VALUE_ARCHITECTURES: Final = ("LengthValueModel", "ValueModel", "ValueHead")


def shape_from_config(path: Path) -> ModelShape:
    """The shape that a ``config.json`` describes.

    ``head_dim`` is taken before ``hidden_size / num_attention_heads``; absent key-value heads mean one for each
    query head; an absent ``tie_word_embeddings`` means untied. It is a value model when value_head.safetensors
    lies beside it or its architecture says so. Raises UsageError naming the file and the key, also for a family
    whose layers are unknown.
    """
    config = ConfigKeys.read(path)
    _check_family(config)
    architectures = " ".join(config.words("architectures"))
    is_value_model = (path.parent / "value_head.safetensors").is_file() or any(
        part in architectures for part in _VALUE_ARCHITECTURES
    )
    q_heads, kv_heads = _head_counts(config)
    latent = _latent_shape(config)
    family = config.model_type
    return ModelShape(
        name=path.resolve().parent.name or str(path),
        layers=config.layers(),
        hidden=config.positive("hidden_size"),
        q_heads=q_heads,
        kv_heads=q_heads if latent else kv_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(config, q_heads),
        ffn=dense_width(config),
        vocab=config.positive("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        head="value_head" if is_value_model else "lm_head",
        # Qwen2 has these biases without saying so; other families say it.
        qkv_bias=family.startswith("qwen2") or config.flag("attention_bias"),
        qk_norm=family.startswith("qwen3"),
        moe=moe_shape(config),
        latent=latent,
        weight_format=weight_format(config),
    )


def _check_family(config: ConfigKeys) -> None:
    family = config.model_type
    if family and family not in _FAMILIES:
        raise UsageError(
            f"{config.path}: model_type is {family!r}, whose layers are unknown here; known are "
            f"{', '.join(sorted(_FAMILIES))}. If its layers are those of llama (attention and a gated block), name "
            'a copy of the file with "model_type": "llama"'
        )
    unknown_type = next((kind for kind in config.words("layer_types") if kind not in _LAYER_TYPES), None)
    foreign_key = next((key for key in _FOREIGN_KEYS if config.values.get(key)), None)
    if unknown_type is None and foreign_key is None:
        return
    what = f"layers of type {unknown_type}" if foreign_key is None else _FOREIGN_KEYS[foreign_key]
    key = "layer_types" if foreign_key is None else foreign_key
    raise UsageError(
        f"{config.path}: {key} says that this model has {what}, which cannot be counted; name a model in which "
        "every layer has attention over the whole context and a gated block, dense or with experts"
    )


def _latent_shape(config: ConfigKeys) -> LatentShape | None:
    """The latent attention; an absent or zero width of the values is that of the keys without rotation."""
    if not config.values.get("kv_lora_rank"):
        return None
    nope_dim = config.positive("qk_nope_head_dim")
    return LatentShape(
        q_rank=config.count("q_lora_rank") or None,
        kv_rank=config.positive("kv_lora_rank"),
        rope_dim=config.positive("qk_rope_head_dim"),
        nope_dim=nope_dim,
        value_dim=config.count("v_head_dim") or nope_dim,
    )


def _head_counts(config: ConfigKeys) -> tuple[int, int]:
    q_heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", absent=q_heads)
    if q_heads % kv_heads:
        raise UsageError(
            f"{config.path}: num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is "
            f"{q_heads}"
        )
    return q_heads, kv_heads


def _head_dim(config: ConfigKeys, heads: int) -> int:
    hidden = config.positive("hidden_size")
    if config.values.get("head_dim") is not None:
        return config.positive("head_dim")
    if hidden % heads:
        raise UsageError(
            f"{config.path}: head_dim is missing and hidden_size {hidden} does not divide among "
            f"num_attention_heads {heads}; add head_dim"
        )
    return hidden // heads
