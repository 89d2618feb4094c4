"""Model shapes: the dimensions of a decoder-only transformer, and their FLOPs and bytes per token.

A shape is a built-in name (the Qwen2.5 family) or read from a ``config.json``. Only dense models with a gated
feed-forward block and ordinary (multi-head, grouped-query) attention are described; a mixture of experts or a
latent attention is refused, because these formulas would be silently wrong for it.

A multiply-add counts as two FLOPs. Norms, rotations, softmax, activations and biases are left out, as usual:
they are below one percent of the matrix products.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from benchctl.errors import UsageError

Head: TypeAlias = Literal["lm_head", "value_head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of one model.

    ``head_dim`` is a dimension of its own: ``hidden / q_heads`` is wrong for models that choose it freely.
    ``head`` follows the last hidden state: a projection on the vocabulary, or a value head of two
    layers (hidden to hidden, hidden to one number).
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    head: Head = "lm_head"
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise UsageError(
                    f"shape {self.name!r}: {field.name} is {value!r}; it must be a positive whole number"
                )
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"shape {self.name!r}: {self.q_heads} query heads do not divide among {self.kv_heads} key-value "
                "heads; kv_heads must divide q_heads"
            )

    def linear_flops_per_token(self) -> int:
        """FLOPs of all projections for one token: L (4 d Hq h + 4 d Hkv h + 6 d ff).

        The terms are query and output, key and value, and gate, up and down projection.
        """
        attention = 4 * self.hidden * self.head_dim * (self.q_heads + self.kv_heads)
        return self.layers * (attention + 6 * self.hidden * self.ffn)

    def attention_flops_per_position(self) -> int:
        """FLOPs of scores and weighted sum for one token and one position that it attends to: L 4 Hq h."""
        return self.layers * 4 * self.q_heads * self.head_dim

    def lm_head_flops(self) -> int:
        """FLOPs of one position's logits: 2 d V."""
        return 2 * self.hidden * self.vocab

    def value_head_flops(self) -> int:
        """FLOPs of one value: 2 d d + 2 d, a hidden layer of the model's width and one output."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden

    def head_flops(self) -> int:
        """FLOPs of the head that this model has, for one position."""
        return self.lm_head_flops() if self.head == "lm_head" else self.value_head_flops()

    def num_params(self) -> int:
        """Parameters: embedding, an untied vocabulary head or the value head, projections, biases, norms.

        A tied embedding is counted once. A value model keeps its embedding and no vocabulary head.
        """
        embedding = self.vocab * self.hidden
        untied = embedding if self.head == "lm_head" and not self.tied_embeddings else 0
        value_head = (self.hidden + 1) ** 2 if self.head == "value_head" else 0
        biases = self.layers * self.head_dim * (self.q_heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = (2 * self.layers + 1) * self.hidden
        return embedding + untied + value_head + self.linear_flops_per_token() // 2 + biases + norms

    def weight_bytes(self, bytes_per_param: float = 2) -> int:
        """Memory that all parameters occupy; 2 bytes each for bfloat16."""
        return round(self.num_params() * bytes_per_param)

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> int:
        """Key-value cache of one token: a key and a value for each layer and key-value head."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element)

    def as_value_model(self) -> "ModelShape":
        """The same backbone with a value head instead of the projection on the vocabulary."""
        return replace(self, head="value_head")


def _qwen25(size: str, dims: tuple[int, int, int, int, int, int, int], *, tied: bool) -> ModelShape:
    layers, hidden, q_heads, kv_heads, head_dim, ffn, vocab = dims
    return ModelShape(
        name=f"qwen2.5-{size}",
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
        qkv_bias=True,
    )


# From the config.json of each published Qwen2.5 checkpoint (base and instruct have the same dimensions).
BUILT_IN_SHAPES: Final[dict[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        _qwen25("0.5b", (24, 896, 14, 2, 64, 4864, 151936), tied=True),
        _qwen25("1.5b", (28, 1536, 12, 2, 128, 8960, 151936), tied=True),
        _qwen25("3b", (36, 2048, 16, 2, 128, 11008, 151936), tied=True),
        _qwen25("7b", (28, 3584, 28, 4, 128, 18944, 152064), tied=False),
        _qwen25("14b", (48, 5120, 40, 8, 128, 13824, 152064), tied=False),
        _qwen25("32b", (64, 5120, 40, 8, 128, 27648, 152064), tied=False),
        _qwen25("72b", (80, 8192, 64, 8, 128, 29568, 152064), tied=False),
    )
}

_LENVM_NAME: Final = re.compile(r"lvm-.*-b-(?P<backbone>.+)")
"""Published value models are called ``lvm-…-a-<generator>-b-<backbone>``."""
_VALUE_ARCHITECTURES: Final = ("LengthValueModel", "ValueModel", "ValueHead")
_UNSUPPORTED_KEYS: Final = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "a latent attention",
}


def shape_for(name_or_dir: str) -> ModelShape:
    """The shape of a built-in name or a path.

    A built-in name may carry its owner, ``-Instruct`` and capitals (``Qwen/Qwen2.5-7B-Instruct``). A path names a
    directory with a config.json, that file, or a .gguf file in the same directory. A published value model is known
    by its name (``lvm-…-b-qwen2.5-1.5b-instruct``) and has a value head. Raises UsageError for anything else.
    """
    if name_or_dir in BUILT_IN_SHAPES:
        return BUILT_IN_SHAPES[name_or_dir]
    path = Path(name_or_dir).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        path = path.parent
    config = path if path.is_file() else path / "config.json"
    if config.is_file():
        return shape_from_config(config)
    return _built_in(name_or_dir)


def _built_in(name: str) -> ModelShape:
    short = name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if short in BUILT_IN_SHAPES:
        return BUILT_IN_SHAPES[short]
    if (match := _LENVM_NAME.fullmatch(short)) and match["backbone"] in BUILT_IN_SHAPES:
        return replace(BUILT_IN_SHAPES[match["backbone"]].as_value_model(), name=short)
    nearest = difflib.get_close_matches(short, BUILT_IN_SHAPES, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise UsageError(
        f"unknown model {name!r}: {hint}Built-in shapes are {', '.join(BUILT_IN_SHAPES)}; "
        "for any other model name a directory with its config.json"
    )


def shape_from_config(path: Path) -> ModelShape:
    """The shape that a ``config.json`` describes.

    ``head_dim`` is taken before ``hidden_size / num_attention_heads``; absent key-value heads mean one for each
    query head; an absent ``tie_word_embeddings`` means untied. It is a value model when value_head.safetensors
    lies beside it or its architecture says so. Raises UsageError naming the file and the key.
    """
    config = _read_config(path)
    for key, what in _UNSUPPORTED_KEYS.items():
        if config.get(key):
            raise UsageError(
                f"{path}: {key} is {config[key]!r}, so this model has {what}; only dense models with ordinary "
                "attention can be accounted for"
            )
    architectures = " ".join(str(name) for name in config.get("architectures") or ())
    is_value_model = (path.parent / "value_head.safetensors").is_file() or any(
        part in architectures for part in _VALUE_ARCHITECTURES
    )
    q_heads, kv_heads = _head_counts(config, path)
    return ModelShape(
        name=path.resolve().parent.name or str(path),
        layers=_positive(config, "num_hidden_layers", path),
        hidden=_positive(config, "hidden_size", path),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, q_heads, path),
        ffn=_positive(config, "intermediate_size", path),
        vocab=_positive(config, "vocab_size", path),
        tied_embeddings=_flag(config, "tie_word_embeddings", path),
        head="value_head" if is_value_model else "lm_head",
        # Qwen2 has these biases without saying so; other families say it.
        qkv_bias=str(config.get("model_type", "")).startswith("qwen2") or _flag(config, "attention_bias", path),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); name a model's own config.json") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: holds {type(config).__name__}, not an object; name a model's own config.json")
    text = config.get("text_config")
    # Vision-language checkpoints may keep their language model in a part of its own.
    return config | text if isinstance(text, dict) else config


def _positive(config: Mapping[str, Any], key: str, path: Path, *, absent: int | None = None) -> int:
    value = config.get(key)
    if value is None and absent is not None:
        return absent
    if value is None:
        raise UsageError(f"{path}: {key} is missing; a model's config.json has it")
    if type(value) is not int or value < 1:
        raise UsageError(f"{path}: {key} is {value!r}; it must be a positive whole number")
    return value


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{path}: {key} is {value!r}; it must be true or false")
    return bool(value)


def _head_counts(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    q_heads = _positive(config, "num_attention_heads", path)
    kv_heads = _positive(config, "num_key_value_heads", path, absent=q_heads)
    if q_heads % kv_heads:
        raise UsageError(
            f"{path}: num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is {q_heads}"
        )
    return q_heads, kv_heads


def _head_dim(config: Mapping[str, Any], heads: int, path: Path) -> int:
    hidden = _positive(config, "hidden_size", path)
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim", path)
    if hidden % heads:
        raise UsageError(
            f"{path}: head_dim is missing and hidden_size {hidden} does not divide among num_attention_heads "
            f"{heads}; add head_dim"
        )
    return hidden // heads
