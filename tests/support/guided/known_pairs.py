"""A pair of models that were not trained but built, so that what guidance must do to their answers can be computed.

The base model says the same in every place: its logits do not depend on the text. The value model sees how long the
text is: from the first token, which alone is marked, attention that is the same for all tokens carries 1 / (number
of tokens) on, and the value falls with it. Both are Llamas of numpy's making; no torch is needed.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.files import END_ID, train_tokenizer, write_model_files
from benchctl.engines.tiny_models.recipe import Recipe, tensor_specs

VOCABULARY, HIDDEN = 512, 64
END = END_ID
MARK = 400
"""The first token of every prompt; nothing else may say it."""
PROMPT = [MARK, 301, 302]
SHARES: Mapping[int, float] = {END: 0.08, 310: 0.34, 311: 0.26, 312: 0.18, 313: 0.14}
"""What the base model says, whatever stands before; all other tokens are as good as impossible."""
_FLOOR = -30.0
_OFFSET = -1.0
_SHAPE = ModelShape(
    name="known", layers=1, hidden=HIDDEN, q_heads=2, kv_heads=2, head_dim=32, ffn=64, vocab=VOCABULARY,
    tied_embeddings=False, qkv_bias=False,
)  # fmt: skip
_RECIPE = Recipe(arch="llama", shape=_SHAPE, context=1024, dtype="float32", seed=0)


def value_after(num_tokens: int) -> float:
    """The value of any token that comes after ``num_tokens`` others, in plain Python.

    The mark is the only token with a second number, 1, beside the first; the norm makes sqrt(H / 2) of it.
    Attention divides that by the tokens that a token sees, itself among them. The last norm, SiLU and an offset
    follow.
    """
    seen = math.sqrt(HIDDEN / 2) / (num_tokens + 1)
    normed = seen / math.sqrt((1 + seen**2) / HIDDEN)
    return 1 / (1 + math.exp(-(normed / (1 + math.exp(-normed)) + _OFFSET)))


def shares_after(num_tokens: int, scale: float) -> dict[int, float]:
    """The guided distribution of the next token: the end of an answer has value 0, all others the same one."""
    value = value_after(num_tokens)
    weights = {token: share * (1 if token == END else math.exp(scale * value)) for token, share in SHARES.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def length_law(scale: float, longest: int) -> list[float]:
    """The chance of an answer of 1, 2, ... ``longest`` tokens with its end; the last is that of being cut off."""
    law, alive = [], 1.0
    for length in range(1, longest):
        ends = shares_after(len(PROMPT) + length - 1, scale)[END]
        law.append(alive * ends)
        alive *= 1 - ends
    return [*law, alive]


def write_known_pair(directory: Path) -> Path:
    """``directory/base`` and ``directory/value``; return the directory."""
    tokenizer = train_tokenizer(VOCABULARY)
    for name, tensors in (("base", _base()), ("value", _value())):
        (directory / name).mkdir(parents=True)
        write_model_files(directory / name, _RECIPE, tokenizer, is_value_model=name == "value")
        save_file(tensors, directory / name / "model.safetensors", {"format": "pt"})
    return directory


def _plain() -> dict[str, np.ndarray]:
    """Weights that hand the embedding through: norms of 1, and 0 for everything else."""
    tensors = {
        spec.name: np.full(spec.dims, float("norm" in spec.name), np.float32) for spec in tensor_specs(_RECIPE)
    }
    (embedding,) = (tensor for name, tensor in tensors.items() if "embed_tokens" in name)
    embedding[:, 0] = 1
    return tensors


def _base() -> dict[str, np.ndarray]:
    tensors = _plain()
    (head,) = (tensor for name, tensor in tensors.items() if "lm_head" in name)
    head[:, 0] = _FLOOR / math.sqrt(HIDDEN)
    for token, share in SHARES.items():
        head[token, 0] = math.log(share) / math.sqrt(HIDDEN)
    return tensors


def _value() -> dict[str, np.ndarray]:
    tensors = {name: tensor for name, tensor in _plain().items() if "lm_head" not in name}
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor[MARK, 1] = 1
        if "v_proj" in name:
            tensor[0, 1] = 1
        if "o_proj" in name:
            tensor[2, 0] = 1
    shapes = {
        "fc.weight": (HIDDEN, HIDDEN),
        "fc.bias": (HIDDEN,),
        "summary.weight": (1, HIDDEN),
        "summary.bias": (1,),
    }
    head = {f"v_head.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    head["v_head.fc.weight"][0, 2] = 1
    head["v_head.summary.weight"][0, 0] = 1
    head["v_head.summary.bias"][0] = _OFFSET
    return tensors | head
