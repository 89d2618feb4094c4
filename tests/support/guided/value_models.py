"""Small pairs of a base model and its value model, of random weights, for tests of guidance."""

import math
from pathlib import Path

from safetensors.torch import save_file
from support.guided.tensors import torch

from benchctl.costs.shapes import ModelShape
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe

HIDDEN = 64


def write_pair(directory: Path, *, constant: float | None = None, vocabulary: int = 512) -> Path:
    """``directory/base`` and ``directory/value``, of one tokenizer; return the directory.

    With ``constant`` every token of every text has this value, otherwise values are drawn at random.
    """
    shape = ModelShape(
        name="tiny", layers=2, hidden=HIDDEN, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=vocabulary,
        tied_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    for seed, name in enumerate(("base", "value")):
        make_model(directory / name, Recipe(arch="qwen2", shape=shape, context=1024, dtype="bfloat16", seed=seed))
    write_head(directory / "value", constant=constant)
    return directory


def write_head(directory: Path, *, constant: float | None) -> None:
    """The head of a value model whose backbone lies in ``directory``."""
    drawn = torch.Generator().manual_seed(3)
    summary = torch.randn(1, HIDDEN, generator=drawn) if constant is None else torch.zeros(1, HIDDEN)
    raw = 0.0 if constant is None else math.log(constant / (1 - constant))
    head = {
        "v_head.fc.weight": torch.randn(HIDDEN, HIDDEN, generator=drawn) / HIDDEN**0.5,
        "v_head.fc.bias": torch.zeros(HIDDEN),
        "v_head.summary.weight": summary,
        "v_head.summary.bias": torch.full((1,), raw),
    }
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in head.items()}, directory / "value_head.safetensors"
    )
