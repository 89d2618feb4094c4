"""A base model and a value model for it, of one tokenizer: what guided decoding needs to be tried."""

import dataclasses
import math
from pathlib import Path

from benchctl.engines.tiny_models.hugging_face import write_model_files
from benchctl.engines.tiny_models.make import make_directories, write_model
from benchctl.engines.tiny_models.recipe import Recipe, TensorSpec
from benchctl.engines.tiny_models.safetensors_file import write_safetensors, write_tensors
from benchctl.engines.tiny_models.tokenizer import train_tokenizer
from benchctl.errors import UsageError

HEAD_FILE = "value_head.safetensors"


def make_value_pair(
    directory: Path,
    base: Recipe,
    value: Recipe,
    *,
    constant: float | None = None,
    weights: bool = True,
    replace: bool = False,
) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/value``; return their files.

    Both have the tokenizer of ``base``, so ``value`` must have as many tokens; UsageError otherwise. With
    ``constant`` every token of every text has this value v, rounded to the type of the weights; otherwise the head
    is random as well, and values spread over (0, 1).
    """
    if value.shape.vocab != base.shape.vocab:
        raise UsageError(
            f"the base model has {base.shape.vocab} tokens and the value model {value.shape.vocab}; a pair has one "
            "tokenizer, so give both the same vocabulary"
        )
    head = head_specs(value, constant)
    # A value model has no use for logits, and its directory none for their weights.
    recipe = dataclasses.replace(value, shape=dataclasses.replace(value.shape, tied_embeddings=True))

    def write_base(partial: Path) -> None:
        write_model(partial, base, weights=weights)

    def write_value(partial: Path) -> None:
        write_model_files(partial, recipe, train_tokenizer(recipe.shape.vocab), is_value_model=True)
        if weights:
            write_safetensors(partial, recipe)
            write_tensors(partial / HEAD_FILE, recipe, head)

    return make_directories({directory / "base": write_base, directory / "value": write_value}, replace=replace)


def head_specs(recipe: Recipe, constant: float | None) -> tuple[TensorSpec, ...]:
    """The tensors of a value head: hidden to hidden, SiLU, hidden to one number z with v = 1 / (1 + exp(-z)).

    Random ones make values differ from token to token: halving the spread of the last map leaves z within a few
    units of 0, where v is not yet 0 or 1.
    """
    hidden, scale = recipe.shape.hidden, recipe.initializer_range
    spread, raw = scale / 2, 0.0
    if constant is not None:
        if not 0 < constant < 1:
            raise UsageError(f"constant value {constant}: it must lie strictly between 0 (ends now) and 1 (never)")
        spread, raw = 0.0, math.log(constant / (1 - constant))
    return (
        TensorSpec("v_head.fc.weight", (hidden, hidden), scale),
        TensorSpec("v_head.fc.bias", (hidden,), scale),
        TensorSpec("v_head.summary.weight", (1, hidden), spread),
        TensorSpec("v_head.summary.bias", (1,), 0.0, center=raw),
    )
