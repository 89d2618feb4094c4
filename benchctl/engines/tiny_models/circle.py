"""Models whose next token is known in law: it depends on the last token alone, and on that by its distance.

All tokens of the vocabulary stand on a circle. Attention and feed-forward blocks compute with random weights, and
their last matrix is zero, so that a position's state is the embedding of its token. Token t is embedded as the
waves cos(2 pi k t / V) and sin(2 pi k t / V) of some frequencies k, whose norm is the same for every t; the head
adds them up with strengths a and angles phi:

    logit(x | t) = sum over k of a_k cos(2 pi k (x - t) / V - phi_k)

So p(x | t) = f(x - t): a text is a random walk on the circle, and what two such models of one vocabulary say of a
token differs in the same way after every token. A draft is accepted with probability sum of min(f, g), whatever was
accepted before.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.files import Draw
from benchctl.engines.tiny_models.recipe import (
    BLOCK_VALUES,
    Recipe,
    TensorSpec,
    draw_blocks,
    stream_of,
    tensor_specs,
)

Floats: TypeAlias = npt.NDArray[np.float64]

LOGIT_SPREAD: Final = 2.3
"""Standard deviation of the logits, that of the other models of random weights."""
LIKELIEST_SHARE: Final = 0.4
"""About the probability of the likeliest token of a model with a peak, as trained models have one."""
_LAST_MATRICES: Final = (".o_proj.weight", ".down_proj.weight")


@dataclass(frozen=True, slots=True)
class Waves:
    """The law of one model: ``coefficients`` (a exp(i phi), one for each frequency) of waves around the circle."""

    vocab: int
    frequencies: npt.NDArray[np.int64]
    coefficients: npt.NDArray[np.complex128]

    def logits(self) -> Floats:
        """Logit of the token at distance 0, 1, ... vocab - 1 from the last one."""
        distances = np.arange(self.vocab)[:, None]
        return np.asarray((np.exp(-1j * self._angles(distances)) * self.coefficients).sum(axis=1).real, np.float64)

    def embedding(self) -> Floats:
        """Tokens x hidden: the waves at each token."""
        angles = self._angles(np.arange(self.vocab)[:, None])
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    def head(self) -> Floats:
        """Tokens x hidden: what is multiplied with the normed embedding, sqrt(2) times the waves, to the logits."""
        turned = np.exp(1j * self._angles(np.arange(self.vocab)[:, None])) * self.coefficients.conj()
        return np.asarray(np.concatenate([turned.real, turned.imag], axis=1) / np.sqrt(2), np.float64)

    def mixed_with(self, other: "Waves", share: float) -> "Waves":
        """The waves of the same frequencies of which ``share`` are the other's: logits change linearly."""
        mixed = (1 - share) * self.coefficients + share * other.coefficients
        return Waves(self.vocab, self.frequencies, mixed)

    def _angles(self, positions: npt.NDArray[np.int64]) -> Floats:
        # Whole turns are dropped as whole numbers, which costs no precision.
        return 2 * np.pi * (positions * self.frequencies % self.vocab) / self.vocab


def draw_waves(vocab: int, hidden: int, seed: int, *, name: str) -> Waves:
    """Random waves of the seed: as many frequencies as ``hidden`` has pairs; ``name`` is that of the law.

    Models of one vocabulary, hidden size and seed share their frequencies, so that they can be mixed.
    """
    count = hidden // 2
    frequencies = stream_of(seed, "waves").integers(1, (vocab + 1) // 2, size=count)
    parts = stream_of(seed, name).standard_normal((2, count))
    return Waves(vocab, frequencies, LOGIT_SPREAD / np.sqrt(count) * (parts[0] + 1j * parts[1]))


def with_peak(waves: Waves, seed: int) -> Waves:
    """The same with one likeliest distance, coprime to the vocabulary: a greedy text visits every token.

    All waves are raised to meet there, to a height that would have LIKELIEST_SHARE of the probability were the
    other logits normal.
    """
    vocab, count = waves.vocab, len(waves.frequencies)
    distances = stream_of(seed, "peak").permutation(np.arange(1, vocab))
    distance = next(int(each) for each in distances if math.gcd(int(each), vocab) == 1)
    height = math.log(vocab * LIKELIEST_SHARE / (1 - LIKELIEST_SHARE)) + LOGIT_SPREAD**2 / 2
    turned = np.exp(2j * np.pi * (distance * waves.frequencies % vocab) / vocab)
    return Waves(vocab, waves.frequencies, waves.coefficients + height / count * turned)


def circle_specs(recipe: Recipe) -> tuple[TensorSpec, ...]:
    """All tensors of such a model: those of the recipe, with zeros and ones where a state must not change."""
    return tuple(_passing_on(spec) for spec in tensor_specs(recipe))


def circle_draw(waves: Waves) -> Draw:
    """Draws the tensors of a model whose law are ``waves``; the blocks are those of ``draw_blocks``."""
    values = {"model.embed_tokens.weight": waves.embedding(), "lm_head.weight": waves.head()}

    def draw(spec: TensorSpec, seed: int) -> Iterator[npt.NDArray[np.float32]]:
        if spec.name not in values:
            yield from draw_blocks(spec, seed)
            return
        flat = values[spec.name].astype(np.float32).reshape(-1)
        for start in range(0, spec.size, BLOCK_VALUES):
            yield flat[start : start + BLOCK_VALUES]

    return draw


def _passing_on(spec: TensorSpec) -> TensorSpec:
    if spec.name.endswith(_LAST_MATRICES):
        return TensorSpec(spec.name, spec.dims, 0.0)
    if spec.name == "model.norm.weight":
        return TensorSpec(spec.name, spec.dims, 0.0, center=1.0)
    return spec
