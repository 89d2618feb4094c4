"""Value models as transformers computes them: what benchctl's own forward pass is held against."""

from support.guided.tensors import torch
from transformers import AutoConfig, AutoModel

from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.sizes import backbone_shapes, head_shapes
from benchctl.guided.value_model.value_model import ValueModel

FAMILIES = ["qwen2", "qwen3", "llama"]
VOCABULARY = 97


def tiny_config(family):
    """Three query heads to each key head, a rotation of its own, two layers."""
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2} | ({} if family == "qwen2" else {"head_dim": 12})
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    return AutoConfig.for_model(family, **sizes, **heads, **rope, max_position_embeddings=512)


def random_tensors(config, dtype, seed=0):
    """Weights of a size that lets every part of the model count."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = {**backbone_shapes(config), **head_shapes(config.hidden_size)}
    tensors = {}
    for name, shape in shapes.items():
        centre, spread = (1, 0.2) if "norm" in name else (0, 0.5 if name.endswith("bias") else 0.3)
        tensors[name] = (centre + spread * torch.randn(shape, generator=drawn)).to(dtype)
    return tensors


class PlainModel:
    """The whole sequence through transformers, once for each candidate."""

    def __init__(self, config, tensors):
        self._dtype = tensors["norm.weight"].dtype
        self._backbone = AutoModel.from_config(config, attn_implementation="eager").to(self._dtype).eval()
        self._backbone.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("v_head")})
        self._head = {name.removeprefix("v_head."): t for name, t in tensors.items() if name.startswith("v_head")}

    @torch.no_grad()
    def value(self, tokens):
        """Raw value after the last token."""
        hidden = self._backbone(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0, -1]
        inner = torch.nn.functional.silu(self._head["fc.weight"] @ hidden + self._head["fc.bias"])
        return float(self._head["summary.weight"][0] @ inner + self._head["summary.bias"][0])


def both_models(family="qwen2", dtype=None, seed=0):
    """The same weights twice: benchctl's model, and transformers'."""
    config = tiny_config(family)
    tensors = random_tensors(config, dtype or torch.float32, seed)
    return ValueModel(Checkpoint(config, tensors, frozenset())), PlainModel(config, tensors)
