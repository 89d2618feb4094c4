"""The shapes that are known by name: dimensions as their ``config.json`` has them.

Numbers alone, without a reader of files: programs on a bare machine use them.
"""

from dataclasses import replace
from typing import Any, Final

from benchctl.costs.model_shape import LatentShape, ModelShape, MoeShape

_DIMENSIONS: Final = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "ffn", "vocab")


def _dense(name: str, *dimensions: int, **more: Any) -> ModelShape:
    """The shape with these ``_DIMENSIONS``, and further fields by name."""
    sizes: dict[str, Any] = dict(zip(_DIMENSIONS, dimensions, strict=True))
    return ModelShape(name=name, **sizes, **more)


def _moe(layers: int, experts: int, experts_per_token: int, width: int, shared: int = 0) -> MoeShape:
    return MoeShape(
        layers=layers, experts=experts, experts_per_token=experts_per_token, expert_ffn=width, shared_ffn=shared
    )


_LATENT: Final = LatentShape(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
_DEEPSEEK_V3: Final = replace(
    _dense("deepseek-v3", 61, 7168, 128, 128, 192, 18432, 129280),
    latent=_LATENT,
    moe=replace(_moe(58, 256, 8, 2048, 2048), has_routing_bias=True),
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
        replace(
            _dense("deepseek-v2", 60, 5120, 128, 128, 192, 12288, 102400),
            latent=_LATENT,
            moe=_moe(59, 160, 6, 1536, 2 * 1536),
        ),
        replace(
            _dense("deepseek-v2-lite", 27, 2048, 16, 16, 192, 10944, 102400),
            latent=replace(_LATENT, q_rank=None),
            moe=_moe(26, 64, 6, 1408, 2 * 1408),
        ),
        _DEEPSEEK_V3,
        replace(_DEEPSEEK_V3, name="deepseek-r1"),
        _dense("llama-68m", 2, 768, 12, 12, 64, 3072, 32000),
        _dense("llama-160m", 12, 768, 12, 12, 64, 3072, 32000),
    )
}
