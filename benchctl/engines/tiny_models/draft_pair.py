"""A base model and a draft for it, of one tokenizer, whose laws are both known: see ``circle``."""

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np

from benchctl.engines.tiny_models.circle import Floats, Waves, circle_draw, circle_specs, draw_waves, with_peak
from benchctl.engines.tiny_models.draft_law import draft_law, require_small
from benchctl.engines.tiny_models.files import train_tokenizer, write_model_files, write_tensors
from benchctl.engines.tiny_models.make import make_directories
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.errors import UsageError
from benchctl.records.files import encode

LAW_FILE: Final = "acceptance.json"
LAW_POSITIONS: Final = 8
_BISECTIONS: Final = 60


def make_draft_pair(
    directory: Path, base: Recipe, draft: Recipe, *, acceptance: float, replace: bool = False
) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/draft``; return their files.

    A token that the draft draws at temperature 1 is accepted with probability ``acceptance``, up to the rounding
    of weights to their type. ``draft/acceptance.json`` has the exact law of the stored weights. The recipes share
    vocabulary, hidden size and seed; both models get a head of their own. Raises UsageError for an acceptance that
    cannot be had, and for a vocabulary too large to compute the law.
    """
    require_small(base.shape.vocab)
    smooth, other = (
        draw_waves(base.shape.vocab, base.shape.hidden, base.seed, name=name) for name in ("base", "draft")
    )
    law = with_peak(smooth, base.seed)
    drafted = law.mixed_with(other, share_for(law, other, acceptance))
    bases: list[Path] = []

    def write_base(partial: Path) -> None:
        _write(partial, base, law)
        bases.append(partial)

    def write_draft(partial: Path) -> None:
        _write(partial, draft, drafted)
        measured = draft_law(bases[0], partial, LAW_POSITIONS)
        (partial / LAW_FILE).write_bytes(encode(measured) + b"\n")

    return make_directories({directory / "base": write_base, directory / "draft": write_draft}, replace=replace)


def share_for(base: Waves, other: Waves, acceptance: float) -> float:
    """The share of the other's waves at which a draft is accepted with this probability; 0 gives acceptance 1.

    Raises UsageError for an acceptance below that of the other waves alone, or above 1.
    """
    target = _distribution(base.logits())

    def reached(share: float) -> float:
        return float(np.minimum(target, _distribution(base.mixed_with(other, share).logits())).sum())

    lowest = reached(1.0)
    if not lowest <= acceptance <= 1:
        raise UsageError(
            f"draft acceptance {acceptance:g}: two unrelated models of this size and seed accept {lowest:.3f} of "
            "each other's tokens, so name a number from there to 1"
        )
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) >= acceptance else (low, middle)
    return low


def _distribution(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _write(directory: Path, recipe: Recipe, waves: Waves) -> None:
    shape = dataclasses.replace(recipe.shape, tied_embeddings=False)
    untied = dataclasses.replace(recipe, shape=shape)
    write_model_files(directory, untied, train_tokenizer(shape.vocab))
    write_tensors(directory / "model.safetensors", untied, circle_specs(untied), circle_draw(waves))
