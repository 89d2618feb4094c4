"""The shape of a model by its name or its path."""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchctl.costs.config_json import shape_from_config
from benchctl.costs.model_shape import Head, LatentShape, ModelShape, MoeShape, WeightFormat
from benchctl.errors import UsageError
from benchctl.untrusted.text import visible_value

_DIMENSIONS: Final = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "ffn", "vocab")


def _dense(name: str, *dimensions: int, **more: Any) -> ModelShape:
    """The shape with these ``_DIMENSIONS``, and further fields by name."""
    sizes: dict[str, Any] = dict(zip(_DIMENSIONS, dimensions, strict=True))
    return ModelShape(name=name, **sizes, **more)


def _moe(layers: int, experts: int, experts_per_token: int, width: int, shared: int = 0) -> MoeShape:
    return MoeShape(
        layers=layers, experts=experts, experts_per_token=experts_per_token, expert_ffn=width, shared_ffn=shared
    )


_DEEPSEEK_V2: Final = ModelShape(
    name="deepseek-v2",
    layers=60,
    hidden=5120,
    q_heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=12288,
    vocab=102400,
    latent=LatentShape(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
    moe=MoeShape(
        layers=59,
        experts=160,
        experts_per_token=6,
        expert_ffn=1536,
        shared_ffn=2 * 1536,
        groups=8,
        groups_per_token=3,
    ),
)
_DEEPSEEK_V2_LITE: Final = ModelShape(
    name="deepseek-v2-lite",
    layers=27,
    hidden=2048,
    q_heads=16,
    kv_heads=16,
    head_dim=192,
    ffn=10944,
    vocab=102400,
    latent=LatentShape(q_rank=None, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
    moe=MoeShape(layers=26, experts=64, experts_per_token=6, expert_ffn=1408, shared_ffn=2 * 1408),
)
_DEEPSEEK_V3: Final = ModelShape(
    name="deepseek-v3",
    layers=61,
    hidden=7168,
    q_heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129280,
    latent=LatentShape(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
    moe=MoeShape(
        layers=58,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_ffn=2048,
        groups=8,
        groups_per_token=4,
        has_routing_bias=True,
    ),
    weight_format="fp8",
)

BUILT_IN_SHAPES: Final[dict[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        _dense("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True, tied_embeddings=True),
        _dense("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, qkv_bias=True, tied_embeddings=True),
        _dense("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, qkv_bias=True, tied_embeddings=True),
        _dense("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
        _dense("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, qkv_bias=True),
        _dense("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
        _dense("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, qkv_bias=True),
        _dense("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True, tied_embeddings=True),
        _dense("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, qk_norm=True, tied_embeddings=True),
        _dense("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, qk_norm=True, tied_embeddings=True),
        _dense("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
        _dense("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, qk_norm=True),
        _dense("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
        _dense("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True, moe=_moe(48, 128, 8, 768)),
        _dense("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, qk_norm=True, moe=_moe(94, 128, 8, 1536)),
        _dense("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        _dense("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        _dense("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        _dense("codellama-34b", 48, 8192, 64, 8, 128, 22016, 32000),
        _dense("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True),
        _dense("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied_embeddings=True),
        _dense("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        _dense("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        _dense("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        _dense("llama-4-scout", 48, 5120, 40, 8, 128, 16384, 202048, moe=_moe(48, 16, 1, 8192, 8192)),
        _dense("llama-4-maverick", 48, 5120, 40, 8, 128, 16384, 202048, moe=_moe(24, 128, 1, 8192, 8192)),
        _dense("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768),
        _dense("mistral-nemo", 40, 5120, 32, 8, 128, 14336, 131072),
        _dense("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, moe=_moe(32, 8, 2, 14336)),
        _dense("mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, moe=_moe(56, 8, 2, 16384)),
        _DEEPSEEK_V2,
        _DEEPSEEK_V2_LITE,
        _DEEPSEEK_V3,
        replace(_DEEPSEEK_V3, name="deepseek-r1"),
        _dense("llama-68m", 2, 768, 12, 12, 64, 3072, 32000),
        _dense("llama-160m", 12, 768, 12, 12, 64, 3072, 32000),
    )
}


__all__ = [
    "BUILT_IN_SHAPES",
    "Head",
    "LatentShape",
    "ModelShape",
    "MoeShape",
    "shape_for",
    "shape_from_config",
]

_LENVM_NAME: Final = re.compile(r"lvm-.*-b-(?P<backbone>.+)")
"""Published value models are called ``lvm-…-a-<generator>-b-<backbone>``."""
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
    match = _LENVM_NAME.fullmatch(short.removesuffix("-instruct"))
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
