"""Names and shapes of the tensors of a value model, from the ``config.json`` of its backbone; needs no torch.

Written out because importing the models of transformers, which know them as well, takes seconds, and because what
plans an experiment has neither.
"""

from typing import Any, Final, Protocol

EMBEDDING: Final = "embed_tokens.weight"


class BackboneConfig(Protocol):
    """The keys of a backbone's ``config.json`` that shapes depend on, as transformers names them.

    A family may have ``attention_bias``, ``mlp_bias`` and a ``head_dim`` of its own beside them.
    """

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...


def backbone_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a bare backbone."""
    hidden = config.hidden_size
    shapes = {EMBEDDING: (config.vocab_size, hidden), "norm.weight": (hidden,)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes


def head_dim(config: BackboneConfig) -> int:
    """Dimensions of a head, which some families choose freely."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layer_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    hidden, size, ffn = config.hidden_size, head_dim(config), config.intermediate_size
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size
    linear = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    # Qwen2 has three of four biases without saying so; others have all of them or none.
    is_qwen2 = config.model_type == "qwen2"
    has_bias = is_qwen2 or _has(config, "attention_bias")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linear.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if has_bias and not (is_qwen2 and name == "o_proj"):
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    if config.model_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    for name, shape in {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}.items():
        shapes[f"mlp.{name}.weight"] = shape
        if _has(config, "mlp_bias"):
            shapes[f"mlp.{name}.bias"] = shape[:1]
    return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def head_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a value head: hidden to hidden, hidden to one number."""
    return {
        "v_head.fc.weight": (hidden, hidden),
        "v_head.fc.bias": (hidden,),
        "v_head.summary.weight": (1, hidden),
        "v_head.summary.bias": (1,),
    }


def _has(config: Any, key: str) -> bool:
    return bool(getattr(config, key, False))


def is_quantizable(name: str) -> bool:
    """True for the weights of linear maps of the layers, the only ones that are ever quantised."""
    return name.startswith("layers.") and name.endswith("_proj.weight")
