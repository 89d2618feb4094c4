"""The shape of a model by its name or its path; that of a ``config.json`` has every value checked.

Errors name file and key. Only families whose layers are known to be those that ``ModelShape`` counts are read: in
others the same keys mean something else (a block without a gate, layers without attention), and their FLOPs would
be silently wrong.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchctl.costs.built_in_shapes import BUILT_IN_SHAPES
from benchctl.costs.model_shape import LatentShape, ModelShape, MoeShape, WeightFormat
from benchctl.errors import UsageError
from benchctl.untrusted.files import UnreadableError, read_json
from benchctl.untrusted.text import visible_value

__all__ = ["BUILT_IN_SHAPES", "ConfigKeys", "ModelShape", "shape_for", "shape_from_config"]

_ADDITIONS: Final = re.compile(r"^meta-(?=llama)|-(instruct|chat|hf|base|v0\.\d|\d{4}|17b-\d+e)(?=-|$)")
"""Parts of a published name that do not change the dimensions."""
_QUANTISED: Final[tuple[tuple[re.Pattern[str], WeightFormat], ...]] = (
    (re.compile(r"-(gptq-)?int4$|-gptq$|-awq$|-quantized\.w4a16$"), "int4"),
    (re.compile(r"-(gptq-)?int8$|-quantized\.w8a16$"), "int8-stored"),
    (re.compile(r"-quantized\.w8a8$"), "int8"),
    (re.compile(r"-fp8(-dynamic)?$"), "fp8"),
    (re.compile(r"-nvfp4$"), "fp4"),
)
_SAME_DIMENSIONS: Final = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-v3.1": "deepseek-v3",
}
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
_SPELLINGS: Final = {
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "experts of a token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "width of an expert": ("moe_intermediate_size", "intermediate_size"),
    "width of the shared experts": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "width of dense blocks": ("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size"),
}
"""Keys of one quantity: experts are ``n_routed_experts`` in DeepSeek, ``num_experts`` in Qwen and OLMoE, and
``num_local_experts`` in Mixtral and Llama-4, which keeps the width of dense blocks apart from theirs."""
_MOST: Final = 1 << 40
"""Above every dimension of a model."""
_MOST_LAYERS: Final = 10_000
_STORED_BITS: Final[dict[int, WeightFormat]] = {4: "int4", 8: "int8-stored"}
"""Formats of weights that are widened before they are multiplied, by bits."""
_MODELOPT: Final[dict[str, WeightFormat]] = {"FP8": "fp8", "NVFP4": "fp4", "W4A16_AWQ": "int4", "INT4_AWQ": "int4"}
_COMPRESSED: Final[dict[tuple[Any, Any, bool], WeightFormat]] = {
    ("float", 8, True): "fp8",
    ("float", 8, False): "fp8-stored",
    ("int", 8, True): "int8",
    ("int", 8, False): "int8-stored",
    ("int", 4, False): "int4",
    ("float", 4, True): "fp4",
}
"""Formats of compressed-tensors by type and bits of the weights, and whether activations are quantised."""


def shape_for(name_or_dir: str) -> ModelShape:
    """The shape of a built-in name or a path.

    A built-in name may be written as published, with its owner, ``-Instruct``, capitals and the format of its
    weights (``Qwen/Qwen2.5-7B-Instruct-AWQ``). A path names a directory with a config.json, that file, or a .gguf
    file in the same directory. A published value model is known by its name (``lvm-…-b-qwen2.5-1.5b-instruct``) and
    has a value head. Raises UsageError for anything else.
    """
    if name_or_dir in BUILT_IN_SHAPES:
        return BUILT_IN_SHAPES[name_or_dir]
    config = _config_of(name_or_dir)
    return _built_in(name_or_dir) if config is None else shape_from_config(config)


def _config_of(text: str) -> Path | None:
    """The config.json that a path means; None where there is none, as for a text that cannot be a path."""
    try:
        path = Path(text).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            path = path.parent
        config = path if path.is_file() else path / "config.json"
        return config if config.is_file() else None
    except (OSError, RuntimeError):  # a name too long; a home directory that nobody has
        return None


def _built_in(name: str) -> ModelShape:
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if (shape := _by_published_name(short)) is not None:
        return shape
    # Published value models are called ``lvm-…-a-<generator>-b-<backbone>``
    match = re.fullmatch(r"lvm-.*-b-(?P<backbone>.+)", short.removesuffix("-instruct"))
    if match and (backbone := _by_published_name(match["backbone"])) is not None:
        return replace(backbone.as_value_model(), name=match[0])
    nearest = difflib.get_close_matches(_ADDITIONS.sub("", short), BUILT_IN_SHAPES, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise UsageError(
        f"unknown model {visible_value(name)}: {hint}Built-in shapes are {', '.join(BUILT_IN_SHAPES)}; "
        "for any other model name a directory with its config.json"
    )


def _by_published_name(name: str) -> ModelShape | None:
    """The built-in shape of a name in lower case without owner."""
    weight_format: WeightFormat | None = None
    for pattern, stored_as in _QUANTISED:
        if pattern.search(name):
            name, weight_format = pattern.sub("", name), stored_as
    plain = _ADDITIONS.sub("", name)
    shape = BUILT_IN_SHAPES.get(_SAME_DIMENSIONS.get(plain, plain))
    return shape if shape is None or weight_format is None else replace(shape, weight_format=weight_format)


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Keys and values of one file."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ConfigKeys":
        """The keys of a file; those of its language model, if it has one beside others, come first."""
        try:
            config = read_json(path)
        except UnreadableError as error:
            raise UsageError(f"{error}; name a model's own config.json") from error
        if not isinstance(config, dict):
            raise UsageError(
                f"{path}: holds {type(config).__name__}, not an object; name a model's own config.json"
            )
        for part in ("text_config", "language_config"):
            if isinstance(text := config.get(part), dict):
                config |= text
        return cls(path, config)

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or "")

    def number(self, *keys: str, least: int = 1, most: int = _MOST, absent: int | None = None) -> int:
        """The whole number of the first of these keys that is there; ``absent`` where none is, or UsageError."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self.values.get(key)
        if value is None and absent is not None:
            return absent
        if value is None:
            raise UsageError(f"{self.path}: {' or '.join(keys)} is missing; a model's config.json has it")
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"a {'positive ' if least else ''}whole number from {least} to {most:,}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return bool(value)

    def words(self, key: str) -> list[str]:
        """A list of words; empty if it is absent."""
        return self._list(key, str, "words") or []

    def whole_numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None if it is absent."""
        return self._list(key, int, "whole numbers")

    def _list(self, key: str, kind: type, plural: str) -> list[Any] | None:
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise self._wrong(key, f"a list of {plural}")
        return value

    def _wrong(self, key: str, needed: str) -> UsageError:
        value = visible_value(self.values.get(key))
        return UsageError(f"{self.path}: {key} is {value}; it must be {needed}")


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
        part in architectures for part in ("LengthValueModel", "ValueModel", "ValueHead")
    )
    q_heads = config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", absent=q_heads)
    if q_heads % kv_heads:
        raise UsageError(
            f"{path}: num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is {q_heads}"
        )
    latent, family = _latent_shape(config), config.model_type
    return ModelShape(
        name=path.resolve().parent.name or str(path),
        layers=config.number("num_hidden_layers", most=_MOST_LAYERS),
        hidden=config.number("hidden_size"),
        q_heads=q_heads,
        kv_heads=q_heads if latent else kv_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(config, q_heads),
        ffn=config.number(*_SPELLINGS["width of dense blocks"]),
        vocab=config.number("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        head="value_head" if is_value_model else "lm_head",
        # Qwen2 has these biases without saying so; other families say it.
        qkv_bias=family.startswith("qwen2") or config.flag("attention_bias"),
        qk_norm=family.startswith("qwen3"),
        moe=_moe_shape(config),
        latent=latent,
        weight_format=_weight_format(config),
    )


def _check_family(config: ConfigKeys) -> None:
    family = config.model_type
    if family and family not in _FAMILIES:
        raise UsageError(
            f"{config.path}: model_type is {family!r}, whose layers are unknown here; known are "
            f"{', '.join(sorted(_FAMILIES))}. If its layers are those of llama (attention and a gated block), name "
            'a copy of the file with "model_type": "llama"'
        )
    foreign = [(key, part) for key, part in _FOREIGN_KEYS.items() if config.values.get(key)]
    foreign += [
        ("layer_types", f"layers of type {kind}")
        for kind in config.words("layer_types")
        if kind not in _LAYER_TYPES
    ]
    for key, part in foreign:
        raise UsageError(
            f"{config.path}: {key} says that this model has {part}, which cannot be counted; name a model in which "
            "every layer has attention over the whole context and a gated block, dense or with experts"
        )


def _latent_shape(config: ConfigKeys) -> LatentShape | None:
    """The latent attention; an absent or zero width of the values is that of the keys without rotation."""
    if not config.values.get("kv_lora_rank"):
        return None
    nope_dim = config.number("qk_nope_head_dim")
    return LatentShape(
        q_rank=config.number("q_lora_rank", least=0, absent=0) or None,
        kv_rank=config.number("kv_lora_rank"),
        rope_dim=config.number("qk_rope_head_dim"),
        nope_dim=nope_dim,
        value_dim=config.number("v_head_dim", least=0, absent=0) or nope_dim,
    )


def _head_dim(config: ConfigKeys, heads: int) -> int:
    hidden = config.number("hidden_size")
    if config.values.get("head_dim") is None and hidden % heads:
        raise UsageError(
            f"{config.path}: head_dim is missing and hidden_size {hidden} does not divide among "
            f"num_attention_heads {heads}; add head_dim"
        )
    return config.number("head_dim", absent=hidden // heads)


def _moe_shape(config: ConfigKeys) -> MoeShape | None:
    """The experts that a file describes; None for a dense model. Raises UsageError naming the key."""
    experts = config.number(*_SPELLINGS["experts"], least=0, absent=0)
    layers = _num_layers_with_experts(config) if experts else 0
    if not layers:
        return None
    width = config.number(*_SPELLINGS["width of an expert"])
    own_width = config.number(*_SPELLINGS["width of the shared experts"], least=0, absent=0)
    shared_ffn = own_width or config.number("n_shared_experts", least=0, absent=0) * width
    experts_per_token = config.number(*_SPELLINGS["experts of a token"])
    if experts_per_token > experts:
        raise UsageError(
            f"{config.path}: each token chooses {experts_per_token} of {experts} experts; it cannot choose more "
            "than there are"
        )
    return MoeShape(
        layers=layers,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=width,
        shared_ffn=width if config.model_type.startswith("llama4") else shared_ffn,
        has_shared_gate=config.model_type.startswith("qwen2_moe"),
        has_routing_bias=config.values.get("topk_method") == "noaux_tc",
    )


def _num_layers_with_experts(config: ConfigKeys) -> int:
    """Layers with experts. A layer i has them unless one of these keys says otherwise:

    first_k_dense_replace       i is below it
    moe_layer_freq              a number: i is not a multiple (0 is taken as 1); a list: its entry is 0
    decoder_sparse_step         i + 1 is not a multiple (Qwen)
    interleave_moe_layer_step   i + 1 is not a multiple, or it is 0 (Llama-4)
    mlp_only_layers             i is in the list (Qwen)
    moe_layers                  i is not in the list (Llama-4)
    """
    layers = config.number("num_hidden_layers", most=_MOST_LAYERS)
    with_experts = set(range(config.number("first_k_dense_replace", least=0, absent=0), layers))
    with_experts &= _by_frequency(config, layers)
    for key in ("decoder_sparse_step", "interleave_moe_layer_step"):
        step = config.number(key, least=int(key.startswith("decoder")), absent=1)
        with_experts &= set(range(step - 1, layers, step)) if step else set()
    with_experts -= set(config.whole_numbers("mlp_only_layers") or ())
    if (named := config.whole_numbers("moe_layers")) is not None:
        with_experts &= set(named)
    return len(with_experts)


def _by_frequency(config: ConfigKeys, layers: int) -> set[int]:
    if not isinstance(config.values.get("moe_layer_freq"), list):
        return set(range(0, layers, config.number("moe_layer_freq", least=0, absent=1) or 1))
    entries = config.whole_numbers("moe_layer_freq") or []
    if len(entries) != layers:
        raise UsageError(
            f"{config.path}: moe_layer_freq has {len(entries)} entries; it must have one for each of the "
            f"{layers} layers of num_hidden_layers"
        )
    return {layer for layer, entry in enumerate(entries) if entry}


def _weight_format(config: ConfigKeys) -> WeightFormat:
    """The format of the projections' weights; bfloat16 without a ``quantization_config``.

    A checkpoint in 32 bits counts as bfloat16, which engines serve it in. Raises UsageError for a method or a width
    that is unknown.
    """
    quantisation = config.values.get("quantization_config") or config.values.get("compression_config")
    if not quantisation:
        return "bfloat16"
    if not isinstance(quantisation, dict):
        raise UsageError(
            f"{config.path}: quantization_config is {visible_value(quantisation)}; it must be an object"
        )
    method = str(quantisation.get("quant_method") or "")
    bits = quantisation.get("bits", quantisation.get("w_bit", 4))
    by_bits = _STORED_BITS.get(bits) if isinstance(bits, int) else None
    formats: dict[str, WeightFormat | None] = {
        "fp8": "fp8",
        "fbgemm_fp8": "fp8",
        "gptq": by_bits,
        "gptq_marlin": by_bits,
        "awq": by_bits,
        "awq_marlin": by_bits,
        "bitsandbytes": "int8" if quantisation.get("load_in_8bit") else "int4",
        "modelopt": _MODELOPT.get(str(quantisation.get("quant_algo")).upper()),
        "compressed-tensors": _compressed_format(quantisation),
    }
    weights = formats.get(method)
    if weights is None:
        raise UsageError(
            f"{config.path}: quantization_config with quant_method {visible_value(method)} has weights of an "
            "unknown format; known are fp8, gptq and awq of 4 or 8 bits, bitsandbytes, compressed-tensors and "
            "modelopt. Remove the key from a copy of the file to count weights of 2 bytes"
        )
    return weights


def _compressed_format(quantisation: Mapping[str, Any]) -> WeightFormat | None:
    """The format of the first group; the groups of published checkpoints differ in targets, not in format."""
    groups = quantisation.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        return None
    kind, bits = weights.get("type"), weights.get("num_bits")
    is_named = isinstance(kind, str) and isinstance(bits, int)
    return _COMPRESSED.get((kind, bits, bool(group.get("input_activations")))) if is_named else None
